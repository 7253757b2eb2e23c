"""Copies of the native core: the same bytes wherever the two sides lie, and nothing else written."""

from __future__ import annotations

import numpy as np
import pytest
from tests.native.ranks import PAGE, SLOW_BEHIND, make_room

from collectived_native import core


@pytest.mark.parametrize("nbytes", [0, 1, 2047, 2048, 2049, 70_001])
@pytest.mark.parametrize("behind", [-64, -1, 0, 1, SLOW_BEHIND, 31, 63, 64, PAGE + SLOW_BEHIND])
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
