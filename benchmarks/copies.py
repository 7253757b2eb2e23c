"""Copies of 64 KiB by memcpy and by the native core, by how far behind the source the target begins within a page."""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import conditions
from benchmarks.page import write
from collectived_native import core

Array = NDArray[np.uint8]

NBYTES = 64 << 10
BEHIND = (0, 1, 16, 31, 32, 64)  # bytes
TRIES = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/internals/performance.md")
    arguments = parser.parse_args()
    text = f"{conditions.shown()}\n\n{table(measure(copy_by_numpy), measure(core.copy))}"
    print(text)
    if arguments.write:
        write("copies", text)


def copy_by_numpy(target: Array, source: Array) -> None:
    """Copy as NumPy does: by memcpy."""
    target[...] = source


def measure(copy: Callable[[Any, Any], None]) -> list[float]:
    """Seconds of the quickest of many copies, by `BEHIND`."""
    found = []
    for behind in BEHIND:
        source, target = make_room(0), make_room(behind)
        seconds = []
        for _ in range(TRIES):
            begin = time.perf_counter()
            copy(target, source)
            seconds.append(time.perf_counter() - begin)
        found.append(min(seconds))
    return found


def make_room(at: int) -> Array:
    """Memory that begins there within a page, and has been written."""
    memory = np.ones(NBYTES + 2 * mmap.PAGESIZE, np.uint8)
    begin = -memory.ctypes.data % mmap.PAGESIZE + at
    return memory[begin : begin + NBYTES]


def table(memcpy: list[float], native: list[float]) -> str:
    """The table of the page. Pure."""
    head = "| bytes behind | " + " | ".join(map(str, BEHIND)) + " |"
    rows = [head, "|---" + "|---:" * len(BEHIND) + "|"]
    for name, found in (("memcpy", memcpy), ("the core", native)):
        rows.append(f"| {name} | " + " | ".join(f"{seconds * 1e6:.1f} µs" for seconds in found) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
