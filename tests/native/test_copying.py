"""Copies of the native core: the same bytes wherever the two sides lie, and nothing else written."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from tests.native.ranks import DIRECT, Array, Work, as_threads, finish, make_value

from collectived_native import core
from collectived_proto.types import DType

PAGE = mmap.PAGESIZE
SLOW = 16  # bytes into a page, where memcpy of some processors is slow, and large arrays of NumPy begin


def make_room(nbytes: int, at: int) -> tuple[Array, Array]:
    """Memory of sevens, and so many bytes of it that begin there within a page."""
    memory = np.full(nbytes + 3 * PAGE, 7, np.uint8)
    begin = -memory.ctypes.data % PAGE + PAGE + at
    return memory, memory[begin : begin + nbytes]


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


@pytest.mark.parametrize("count", [3000, 50_000])
def test_what_is_read_in_another_process_may_lie_anywhere_in_a_page(count: int) -> None:
    """The kernel copies it; where that would be slow it goes through other memory, piece by piece."""

    def body(engine: core.Engine, rank: int) -> list[str]:
        wrong = []
        phase = (int(DType.INT32), (count,), (count,), (count,))
        for value_at, result_at in ((0, SLOW), (0, 0), (SLOW, 0), (8, SLOW)):
            _, value = make_room(4 * count, value_at)
            _, result = make_room(4 * count, result_at)
            value.view(np.int32)[:] = make_value(DType.INT32, count, rank)
            work = Work(core.BROADCAST, (phase,), (), (), 0, 1)
            finish(engine, engine.run(work.plan(engine), (value,), (result,), 0, None))
            wrong += [f"{value_at} to {result_at}"] * (result.tobytes() != make_value(DType.INT32, count, 1).tobytes())
        return wrong

    assert as_threads(3, body, geometry=DIRECT) == [[]] * 3
