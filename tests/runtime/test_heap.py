"""What is free goes back to the kernel, though small blocks that live lie between."""

from __future__ import annotations

import asyncio
import ctypes
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
