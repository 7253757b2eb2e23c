"""What is free goes back to the kernel, though small blocks that live lie between."""

from __future__ import annotations

import asyncio
import ctypes
import queue
from pathlib import Path

import pytest

from collectived_runtime.heap import HeapTrimmer

BLOCKS, SIZE, KEPT = 20_000, 4096, 64


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_free_memory_between_blocks_that_live_is_given_back_once_for_many_wishes() -> None:
    async def scenario() -> None:
        trimmer = HeapTrimmer(delay=0.0)
        blocks = [b"x" * SIZE for _ in range(BLOCKS)]
        full = resident_bytes()
        kept = blocks[::KEPT]
        blocks.clear()
        for _ in range(10):
            trimmer.schedule()
        while full - resident_bytes() < BLOCKS * SIZE * 3 // 4:
            await asyncio.sleep(0.01)
        assert len(kept) == -(-BLOCKS // KEPT)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_wish_that_comes_while_one_waits_is_fulfilled_too() -> None:
    """What it is about may not have been freed yet when the first one is."""

    async def scenario() -> list[int]:
        trimmer, trims = HeapTrimmer(delay=0.0), queue.SimpleQueue[int]()
        trimmer._trim = lambda size: trims.put(size.value)
        for _ in range(2):
            trimmer.schedule()
            await asyncio.sleep(0)  # it waits now
        return [await asyncio.to_thread(trims.get, timeout=10) for _ in range(2)]

    assert asyncio.run(scenario()) == [0, 0]
