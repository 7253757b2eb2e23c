"""What is free goes back to the kernel, though small blocks that live lie between."""

from __future__ import annotations

import asyncio
import ctypes
import queue
import subprocess
import sys
from pathlib import Path

import pytest

from collectived_runtime.heap import HeapTrimmer

HEAPS = """
import ctypes, pathlib, sys, threading
from collectived_runtime.heap import keep_one_arena
if sys.argv[1] == "one":
    keep_one_arena()
allocated, seen = threading.Barrier(9), threading.Barrier(9)
def allocate():
    ctypes.CDLL(None).malloc(10_000)
    allocated.wait(), seen.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
[thread.start() for thread in threads]
allocated.wait()
sizes = [[int(end, 16) for end in line.split()[0].split("-")] for line in pathlib.Path("/proc/self/maps").open()
         if line.split()[1] == "---p"]
print(sum(32 << 20 < end - start < 64 << 20 for start, end in sizes))
seen.wait()
"""  # a heap of a thread is the accessible beginning of 64 MiB
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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_threads_share_one_heap_where_that_is_asked_for() -> None:
    def count_heaps(how: str) -> int:
        ended = subprocess.run([sys.executable, "-c", HEAPS, how], capture_output=True, text=True, check=True)
        return int(ended.stdout)

    assert count_heaps("each its own") > 0
    assert count_heaps("one") == 0


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
