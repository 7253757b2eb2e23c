"""Worker memory: arenas grow, slots come back, arrays are recognised."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived.errors import Code

MIB = 1 << 20
BYTES = np.dtype(np.uint8)


def test_slots_come_back_when_the_last_view_is_collected(make: Any) -> None:
    memory = make().memory
    first = memory.empty((MIB,), BYTES)
    where = memory.locate(first)
    part = first[10:20].reshape(2, 5)
    del first
    gc.collect()
    assert memory.locate(memory.empty((MIB,), BYTES)) != where
    del part
    gc.collect()
    assert memory.locate(memory.empty((MIB,), BYTES)) == where


def test_arrays_that_lie_side_by_side_in_worker_memory_are_recognised(make: Any) -> None:
    memory = make().memory
    array = memory.empty((4, 6), np.dtype(np.float32))
    arena, start = memory.locate(array)
    assert memory.locate(array[1:]) == (arena, start + 24)
    assert memory.locate(array.reshape(-1)[3:5]) == (arena, start + 12)
    assert memory.locate(np.asarray(memoryview(array))) == (arena, start)
    assert memory.locate(np.frombuffer(array, np.int16)) == (arena, start)
    assert memory.locate(array[:, 1:]) is None
    assert memory.locate(array.T) is None
    assert memory.locate(array.copy()) is None
    assert memory.locate(np.zeros(8)[2:]) is None
    assert memory.locate(array.reshape(-1).view(BYTES)[1:5].view(np.float32)) is None, "not aligned"


def test_arenas_of_other_sessions_are_not_mistaken_for_ours(make: Any) -> None:
    ours, theirs = make().memory, make().memory
    ours.empty((1,), BYTES)
    assert ours.locate(theirs.empty((4,), BYTES)) is None


def test_arenas_grow_with_what_is_used(make: Any) -> None:
    setting = make()
    held = [setting.memory.empty((size * MIB,), BYTES) for size in (1, 10, 10, 10, 100)]
    assert setting.far.asked == [2 * MIB, 10 * MIB, 12 * MIB, 24 * MIB, 100 * MIB]
    for number, array in enumerate(held):
        array[:] = number
    assert [int(array.max()) for array in held] == [0, 1, 2, 3, 4]


def test_a_worker_short_of_memory_is_asked_for_the_least_and_gets_unused_arenas_back(make: Any) -> None:
    setting = make()
    memory, far = setting.memory, setting.far
    memory.empty((10 * MIB,), BYTES)
    gc.collect()
    far.refusals.append((Code.RESOURCE_EXHAUSTED, "no more than 20 MiB for this session"))
    array = memory.empty((17 * MIB + 1,), BYTES)
    assert far.asked == [10 * MIB, 18 * MIB, 18 * MIB]
    assert list(far.inputs) == [3]
    assert memory.locate(array) == (3, 0)


def test_a_refusal_is_raised_with_the_workers_words(make: Any) -> None:
    setting = make()
    setting.far.refusals.extend([(Code.RESOURCE_EXHAUSTED, "this session may have 1 MiB")] * 2)
    with pytest.raises(cd.errors.ResourceExhaustedError, match="may have 1 MiB"):
        setting.memory.empty((2 * MIB,), BYTES)


def test_staging_slots_are_kept_for_the_next_call_and_given_up_when_memory_is_short(make: Any) -> None:
    setting = make(result_bytes=64 * MIB)
    group, far = setting.group, setting.far
    for _ in range(3):
        group.all_reduce("sum", np.ones(5 * MIB, BYTES))
    assert len({ring.addresses for ring in far.rings}) == 1
    group.all_reduce("sum", np.ones(4 * MIB, BYTES))
    group.all_reduce("sum", np.ones(6 * MIB, BYTES))
    assert far.asked == [6 * MIB]


def test_worker_memory_outlives_the_session(make: Any) -> None:
    setting = make()
    array = setting.memory.empty((100,), BYTES)
    array[:] = 5
    result = setting.group.all_reduce("sum", array)
    setting.group.leave()
    setting.memory.clear()
    del setting
    gc.collect()
    assert np.all(array == 5) and np.all(result == 10)
