"""Memory for what sockets receive begins with a page, whatever is asked for."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectived_runtime.engine.base.aligned import allocate, allocate_like
from collectived_runtime.engine.base.arenas import Workspace


@pytest.mark.parametrize("nbytes", [2048, 300_001])
def test_memory_begins_with_a_page_and_is_as_long_as_asked(nbytes: int) -> None:
    memory = allocate(nbytes)
    assert len(memory) == nbytes
    assert memory.ctypes.data % mmap.PAGESIZE == 0
    memory[:] = 1


@pytest.mark.parametrize("array", [np.zeros((300, 2), np.float32), np.zeros(7000, np.complex64)])
def test_an_array_like_another_has_its_shape_and_dtype(array: NDArray[Any]) -> None:
    like = allocate_like(array)
    assert (like.shape, like.dtype) == (array.shape, array.dtype)
    assert like.ctypes.data % mmap.PAGESIZE == 0
    assert like.flags.c_contiguous
    assert like.flags.writeable


def test_there_may_be_little_or_nothing() -> None:
    assert [len(allocate(nbytes)) for nbytes in (0, 1, 2047)] == [0, 1, 2047]
    assert allocate_like(np.zeros((0, 4), np.int64)).shape == (0, 4)


def test_the_buffers_of_a_workspace_begin_with_a_page() -> None:
    workspace = Workspace(lambda: None)
    workspace.acquire("a")
    assert workspace.get_buffer("a", 200_000).ctypes.data % mmap.PAGESIZE == 0
