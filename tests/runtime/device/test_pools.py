"""Memory of a GPU for intermediate results: what was given back serves again, whatever its size."""

from __future__ import annotations

import pytest
from tests.gpu.fake_cuda import FakeCuda
from tests.waiting import settle

from collectived_runtime.device.gpus import MOST_FREE, Gpu, chosen


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(1)


@pytest.fixture
def gpu(cuda: FakeCuda) -> Gpu:
    (found,) = chosen(cuda, None, pytest.fail)
    return found


@pytest.mark.parametrize("size", [1, 1000, 64 << 10, 600 << 10, 2 << 20, 9 << 20])
def test_what_was_given_back_serves_again(cuda: FakeCuda, gpu: Gpu, size: int) -> None:
    gpu.scratch.give(gpu.scratch.take(size))
    used = cuda.used_bytes
    for _ in range(10):
        gpu.scratch.give(gpu.scratch.take(size))
    assert cuda.used_bytes == used


def test_only_so_much_is_kept(cuda: FakeCuda, gpu: Gpu) -> None:
    taken = [gpu.scratch.take(MOST_FREE // 4) for _ in range(6)]
    while taken:
        gpu.scratch.give(taken.pop())
    settle(lambda: cuda.used_bytes == MOST_FREE)  # in a thread that may wait for the device
