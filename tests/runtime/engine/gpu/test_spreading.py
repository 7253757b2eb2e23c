"""Copies of the same bytes to several places on a fake GPU."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.cuda import FakeCuda, view_host_memory

from collectived_runtime.engine.gpu import spreading
from collectived_runtime.engine.gpu.spreading import plan_copies


@pytest.mark.parametrize(
    ("offsets", "nbytes", "kernels"),
    [
        ([0, 4096, 8192], 1000, 1),
        ([4, 4096, 8192], 1000, 1),
        ([0, 4096, 8192], 1004, 1),
        ([2, 4096, 8192], 1000, 0),
        ([0, 4096, 8192], 1001, 0),
        ([64], 1000, 0),
        ([0, 4096], 0, 0),
    ],
    ids=["words of 8", "words of 4", "a length of 4s", "an odd place", "an odd length", "one place", "nothing"],
)
def test_what_lies_by_whole_words_is_read_once(offsets: list[int], nbytes: int, kernels: int) -> None:
    cuda = FakeCuda()
    source, _ = cuda.allocate(0, 1 << 16)
    base, _ = cuda.allocate(0, 1 << 16)
    value = np.random.default_rng(3).integers(0, 256, nbytes).astype(np.uint8)
    view_host_memory(source, nbytes)[:] = value
    stream = cuda.create_stream(0)
    for step in plan_copies(cuda, source, [base + offset for offset in offsets], nbytes):
        step(stream)
    for offset in offsets:
        assert (view_host_memory(base + offset, nbytes) == value).all()
        assert not view_host_memory(base + offset + nbytes, 64).any(), "and nothing behind it is touched"
    assert len(cuda.folds) == kernels
    assert cuda.copied_bytes == (0 if kernels else nbytes * len(offsets))
    cuda.close()


def test_more_places_than_one_kernel_writes_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreading, "MOST_OUTPUTS", 2)
    cuda = FakeCuda()
    source, _ = cuda.allocate(0, 1 << 16)
    base, _ = cuda.allocate(0, 1 << 16)
    view_host_memory(source, 64)[:] = 7
    stream = cuda.create_stream(0)
    for step in plan_copies(cuda, source, [base + 64 * number for number in range(5)], 64):
        step(stream)
    assert (view_host_memory(base, 5 * 64) == 7).all() and len(cuda.folds) == 3
    cuda.close()
