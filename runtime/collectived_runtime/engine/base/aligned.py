"""Memory that begins with a page: into it the kernel copies quickly what sockets have received.

That mostly lies at the start of pages, and the kernel copies it with `rep movsb`. Some processors take ten times as
long if the target begins 1 to 31 bytes behind, counted within a page (native `copying.c`). Large arrays of NumPy do:
they begin 16 bytes into a page.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = 2048  # bytes: to less the kernel copies quickly wherever it lies


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Return so many bytes, from the start of a page on if it matters; their content is undefined."""
    if nbytes < _LEAST:
        return np.empty(nbytes, np.uint8)
    memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    begin = -memory.ctypes.data % mmap.PAGESIZE
    return memory[begin : begin + nbytes]


def allocate_like(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of that shape and dtype; its content is undefined."""
    return allocate(array.nbytes).view(array.dtype).reshape(array.shape)
