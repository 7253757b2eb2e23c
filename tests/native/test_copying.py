"""Copies of the native core: the same bytes wherever the two sides lie, and nothing else written."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from tests.native.ranks import Array

from collectived_native import core

PAGE = mmap.PAGESIZE
SLOW = 16  # bytes into a page, where memcpy of some processors is slow, and large arrays of NumPy begin


def make_room(nbytes: int, at: int) -> tuple[Array, Array]:
    """Memory of sevens, and so many bytes of it that begin there within a page."""
    memory = np.full(nbytes + 4 * PAGE, 7, np.uint8)
    begin = -memory.ctypes.data % PAGE + PAGE + at
    room = memory[begin : begin + nbytes]
    assert len(room) == nbytes
    return memory, room


@pytest.mark.parametrize("nbytes", [0, 1, 2047, 2048, 2049, 70_001])
@pytest.mark.parametrize("behind", [-64, -1, 0, 1, SLOW, 31, 63, 64, PAGE + SLOW])
@pytest.mark.parametrize("source_at", [0, 40])
def test_a_copy_has_the_same_bytes_and_writes_nothing_else(source_at: int, behind: int, nbytes: int) -> None:
    _, source = make_room(nbytes, source_at)
    source[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    memory, target = make_room(nbytes, source_at + behind)
    core.copy(target, source)
    assert target.tobytes() == source.tobytes()
    assert np.count_nonzero(memory == 7) == len(memory) - nbytes + np.count_nonzero(source == 7)


def test_a_copy_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="the source has 3 bytes, expected 4"):
        core.copy(bytearray(4), bytes(3))
    with pytest.raises(BufferError):
        core.copy(bytes(4), bytes(4))
    with pytest.raises(TypeError, match="expected"):
        core.copy(bytearray(4))  # type: ignore[call-arg]
