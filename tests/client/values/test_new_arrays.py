"""Large arrays get memory that earlier ones have left; nobody else looks into it by then."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectived.values.new_arrays import MIN_KEPT_BYTES, ArrayMemory, make_array

BYTES = np.dtype(np.uint8)
SIZE = 4 << 20


def address(array: np.ndarray) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


@pytest.fixture
def memory() -> ArrayMemory:
    return ArrayMemory(max_free_bytes=2 * SIZE)


@pytest.mark.parametrize("dtype", [np.float32, np.complex128, np.int8])
def test_an_array_is_as_numpy_makes_it(memory: ArrayMemory, dtype: type) -> None:
    array = memory.make_array((3, 5, 1000), np.dtype(dtype))
    assert type(array) is np.ndarray
    assert (array.shape, array.dtype) == ((3, 5, 1000), np.dtype(dtype))
    assert array.flags.c_contiguous and array.flags.writeable
    array[...] = 7
    assert (array == 7).all()


def test_memory_is_given_to_the_next_array_of_that_size(memory: ArrayMemory) -> None:
    first = memory.make_array((SIZE,), BYTES)
    where = address(first)
    del first
    assert address(memory.make_array((SIZE // 4,), np.dtype(np.float32))) == where


def test_memory_of_an_array_that_lives_is_not_given_away(memory: ArrayMemory) -> None:
    first = memory.make_array((SIZE,), BYTES)
    second = memory.make_array((SIZE,), BYTES)
    assert not np.shares_memory(first, second)


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda array: array[5:9], id="slice"),
        pytest.param(lambda array: array[5:9].reshape(2, 2)[1:], id="view of a view"),
        pytest.param(lambda array: array.view(np.uint32), id="other dtype"),
        pytest.param(memoryview, id="memoryview"),
        pytest.param(np.from_dlpack, id="DLPack"),
    ],
)
def test_whatever_looks_into_an_array_keeps_its_memory(memory: ArrayMemory, look: Callable[[np.ndarray], Any]) -> None:
    array = memory.make_array((SIZE,), BYTES)
    array[...] = 1
    seen = look(array)
    del array
    gc.collect()
    memory.make_array((SIZE,), BYTES)[...] = 2
    assert np.asarray(seen).reshape(-1).view(np.uint8)[0] == 1
    del seen


def test_memory_of_another_size_is_not_taken(memory: ArrayMemory) -> None:
    memory.make_array((SIZE,), BYTES)[...] = 1
    small = memory.make_array((SIZE // 2,), BYTES)
    small[...] = 2
    again = memory.make_array((SIZE,), BYTES)
    assert again[0] == 1  # what the first had left
    assert small[0] == 2


def test_no_more_is_kept_than_the_limit(memory: ArrayMemory) -> None:
    arrays = [memory.make_array((SIZE,), BYTES) for _ in range(4)]
    for array in arrays:
        array[...] = 1
    del array
    arrays.clear()
    again = [memory.make_array((SIZE,), BYTES) for _ in range(4)]
    assert sum(int(array[0]) for array in again) == 2  # the others are new


@pytest.mark.parametrize("size", [SIZE, 3 * SIZE], ids=["within the limit", "above the limit"])
def test_memory_beyond_the_limit_goes_back_at_once(memory: ArrayMemory, size: int) -> None:
    arrays = [memory.make_array((size,), BYTES) for _ in range(4)]
    kept = [weakref.ref(array.base.memory) for array in arrays]  # type: ignore[union-attr]
    arrays.clear()
    assert sum(one() is not None for one in kept) == (2 if size == SIZE else 0)


def test_an_array_is_made_where_another_call_has_the_lock(memory: ArrayMemory) -> None:
    """As a handler of a signal, or a finalizer, in the middle of that call."""
    with memory._lock:
        first = memory.make_array((SIZE,), BYTES)
        where = address(first)
        del first
        second = memory.make_array((SIZE,), BYTES)
    assert address(memory.make_array((SIZE,), BYTES)) == where
    assert address(second) != where


def test_threads_never_share_memory(memory: ArrayMemory) -> None:
    wrong = []
    interval = sys.getswitchinterval()

    def work(mark: int) -> None:
        for _ in range(300):
            array = memory.make_array((SIZE,), BYTES)
            array[:: SIZE // 4] = mark
            if (array[:: SIZE // 4] != mark).any():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in (1, 2, 3)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_a_forked_child_keeps_memory_though_a_thread_held_the_lock() -> None:
    from collectived.values import new_arrays

    def takes_memory_again() -> bool:
        where = address(make_array((MIN_KEPT_BYTES,), BYTES))
        return address(make_array((MIN_KEPT_BYTES,), BYTES)) == where

    with new_arrays._memory._lock:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if takes_memory_again() else 2
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_small_arrays_are_those_of_numpy() -> None:
    assert make_array((4,), BYTES).base is None
    assert make_array((MIN_KEPT_BYTES,), BYTES).base is not None


@pytest.mark.parametrize("nbytes", [1 << 60, (1 << 63) - 1, 1 << 63], ids=["2**60", "2**63 - 1", "2**63"])
def test_what_there_is_no_memory_for_is_refused_as_numpy_does(memory: ArrayMemory, nbytes: int) -> None:
    with pytest.raises((MemoryError, ValueError)) as of_numpy:
        np.empty((nbytes,), BYTES)
    with pytest.raises(of_numpy.type, match=re.escape(str(of_numpy.value))):
        memory.make_array((nbytes,), BYTES)
