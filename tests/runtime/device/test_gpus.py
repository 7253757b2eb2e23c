"""Memory of a GPU for intermediate results: what was given back serves again, whatever its size."""

from __future__ import annotations

import pytest
from tests.fakes.cuda import FakeCuda
from tests.waiting import settle

from collectived_runtime.device.gpus import MOST_FREE, Gpu, select_gpus


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(1)


@pytest.fixture
def gpu(cuda: FakeCuda) -> Gpu:
    (found,) = select_gpus(cuda, None, pytest.fail)
    return found


@pytest.mark.parametrize("size", [1, 1000, 64 << 10, 600 << 10, 2 << 20, 9 << 20])
def test_what_was_given_back_serves_again(cuda: FakeCuda, gpu: Gpu, size: int) -> None:
    gpu.scratch.release(gpu.scratch.acquire(size))
    used = cuda.used_bytes
    for _ in range(10):
        gpu.scratch.release(gpu.scratch.acquire(size))
    assert cuda.used_bytes == used


def test_only_so_much_is_kept(cuda: FakeCuda, gpu: Gpu) -> None:
    taken = [gpu.scratch.acquire(MOST_FREE // 4) for _ in range(6)]
    while taken:
        gpu.scratch.release(taken.pop())
    settle(lambda: cuda.used_bytes == MOST_FREE)  # in a thread that may wait for the device
