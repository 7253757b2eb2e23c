"""GPUs for tests: fake ones, and those of this machine, skipped aloud where it has none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from tests.e2e.gpu.cluster import Cluster
from tests.fakes.client_cuda import FakeClientCuda, fake_gpus

from collectived_runtime.device.cuda.driver import Cuda, CudaError


def real_cuda() -> Cuda:
    """The driver, or a skip that says what is missing."""
    pytest.importorskip("cuda.bindings", reason="no GPU is asked: cuda-bindings are not installed")
    from collectived_runtime.device.cuda.driver_cuda import DriverCuda

    try:
        return DriverCuda()
    except CudaError as error:
        pytest.skip(f"no GPU can be asked: {error}")


@pytest.fixture
def cuda() -> Iterator[FakeClientCuda]:
    """What this process speaks to GPUs by: nothing real."""
    with fake_gpus() as fake:
        yield fake


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters, and closes them."""
    made: list[Cluster] = []

    def one(workers: int, real: bool = False) -> Cluster:
        made.append(Cluster(workers, 2, tmp_path_factory.mktemp("fakes"), real))
        return made[-1]

    yield one
    for cluster in made:
        cluster.close()


@pytest.fixture(scope="module", params=[False, True], ids=["fake", "real"])
def real(request: pytest.FixtureRequest) -> bool:
    """Whether the GPUs are those of this machine."""
    if request.param:
        real_cuda()
    return bool(request.param)


@pytest.fixture
def client_cuda(real: bool) -> Iterator[None]:
    """What this process speaks to GPUs by."""
    with contextlib.nullcontext() if real else fake_gpus():
        yield


@pytest.fixture(scope="module")
def make(start: Callable[..., Cluster], real: bool) -> Callable[..., Cluster]:
    return lambda workers: start(workers, real)


@pytest.fixture(scope="module")
def one_worker(make: Callable[..., Cluster]) -> Cluster:
    return make(1)


@pytest.fixture(scope="module")
def two_workers(make: Callable[..., Cluster]) -> Cluster:
    return make(2)


@pytest.fixture(params=["one_worker", "two_workers"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    found: Cluster = request.getfixturevalue(request.param)
    return found
