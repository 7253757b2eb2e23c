"""Real daemons and clients, by GPUs that are fake: values on GPUs from one end to the other."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.gpu.cluster import Cluster
from tests.gpu.fake_client import FakeClientCuda

import collectived as cd
from collectived.gpu import driver
from collectived.gpu.array import DeviceArray


@pytest.fixture
def cuda() -> Iterator[FakeClientCuda]:
    fake = FakeClientCuda()
    driver.use(fake)
    yield fake
    driver.use(None)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def start(workers: int, gpus: int = 2) -> Cluster:
        made.append(Cluster(workers, gpus, tmp_path_factory.mktemp("fakes")))
        return made[-1]

    yield start
    for one in made:
        one.close()


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


def filled(session: cd.Session, value: Any, device: str = "GPU:0") -> DeviceArray:
    host = np.asarray(value)
    array: DeviceArray = session.empty(host.shape, host.dtype, device=device)
    array.assign(host)
    return array


def test_arrays_on_a_gpu_are_reduced_there(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> Any:
        x = filled(session, np.arange(1000, dtype=np.float32) + group.rank)
        y = group.all_reduce("sum", x)
        assert isinstance(y, DeviceArray)
        assert y.address != x.address
        return np.asarray(y)

    for got in cluster.run(2, body, device="GPU:0"):
        assert (got == 2 * np.arange(1000) + 1).all()


def test_values_keep_their_structure_and_kinds(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> Any:
        value = {"gpu": filled(session, np.full(10, 2.0)), "host": np.full((2, 3), 3, np.int16), "number": 1.5}
        mean = group.all_reduce("mean", value)
        assert isinstance(mean["gpu"], DeviceArray)
        assert isinstance(mean["host"], np.ndarray)
        return np.asarray(mean["gpu"]), mean["host"], mean["number"]

    for gpu, host, number in cluster.run(2, body, device="GPU:1"):
        assert (gpu == 2).all() and (host == 3).all() and number == 1.5


def test_reduce_and_broadcast(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.full(100, group.rank + 1, np.int64))
        top = group.reduce("max", x, root=1)
        assert top is None if group.rank == 0 else (np.asarray(top) == 2).all()
        assert (np.asarray(group.broadcast(x, root=1)) == 2).all()

    cluster.run(2, body, device="GPU:0")


def test_all_other_collectives_pass_by_the_host(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.full((2, 3), group.rank, np.float32))
        joined = group.all_gather(x)
        assert isinstance(joined, DeviceArray)
        assert (np.asarray(joined) == [[0] * 3] * 2 + [[1] * 3] * 2).all()
        assert (np.asarray(group.all_gather(x, axis=1)) == [[0] * 3 + [1] * 3] * 2).all()
        piece = group.reduce_scatter("sum", x)
        assert (np.asarray(piece) == 1).all() and piece.shape == (1, 3)
        group.send(x, 1 - group.rank)
        assert (np.asarray(group.recv(1 - group.rank)) == 1 - group.rank).all()
        group.barrier()

    cluster.run(2, body, device="GPU:0")


def test_a_result_is_written_into_an_array_of_the_caller(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x, out = filled(session, np.ones(50, np.float32)), filled(session, np.zeros(50, np.float32))
        assert group.all_reduce("sum", x, out=out) is out
        assert (np.asarray(out) == 2).all()
        on_host = np.zeros(50, np.float32)
        group.all_reduce("sum", x, out=on_host)
        assert (on_host == 2).all()
        assert group.all_reduce("sum", x, out=x) is x
        assert (np.asarray(x) == 2).all()

    cluster.run(2, body, device="GPU:0")


def test_ranks_on_cpus_and_gpus_meet_in_one_group(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> Any:
        return np.asarray(group.all_reduce("sum", np.full(100, group.rank, np.float32)))

    def one(rank: int) -> Any:
        with (
            cd.connect(cluster.address_of(rank, 3)) as session,
            session.join("mixed", 3, rank=rank, device=f"{('GPU', 'CPU', 'GPU')[rank]}:0", timeout=20) as group,
        ):
            return body(session, group)

    with ThreadPoolExecutor(3) as pool:
        for got in pool.map(one, range(3)):
            assert (got == 3).all()


def test_arrays_on_gpus_are_taken_by_groups_on_cpus(one_worker: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        y = group.all_reduce("sum", filled(session, np.ones(10)))
        assert isinstance(y, DeviceArray) and (np.asarray(y) == 2).all()

    one_worker.run(2, body, device="CPU:0")


def test_many_in_flight_of_many_sizes_come_out_right(one_worker: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        sizes = np.random.default_rng(5).integers(1, 200_000, 40)
        works = [group.all_reduce("sum", filled(session, np.full(n, n % 91, np.float32)), async_op=True) for n in sizes]
        for n, work in zip(sizes, works, strict=True):
            assert (np.asarray(work.result()) == 2 * (n % 91)).all()

    one_worker.run(2, body, device="GPU:0")


def test_memory_is_given_back_with_the_last_array(one_worker: Cluster, cuda: FakeClientCuda) -> None:
    with cd.connect(one_worker.addresses[0]) as session:
        array = filled(session, np.zeros(1000))
        arenas = len(cuda.mapped)
        for _ in range(100):
            filled(session, np.zeros(100_000))
        assert len(cuda.mapped) == arenas, "the same memory serves again"
    assert cuda.mapped, "somebody looks into it"
    del array
    assert not cuda.mapped


def test_memory_beyond_a_gpus_share_is_refused_with_its_size(one_worker: Cluster, cuda: FakeClientCuda) -> None:
    with cd.connect(one_worker.addresses[0]) as session:
        with pytest.raises(cd.errors.ResourceExhaustedError, match="memory of GPU:0 for clients"):
            session.empty(1 << 30, np.uint8, device="GPU:0")
        filled(session, np.ones(10))


def test_devices_are_matched_by_uuid(one_worker: Cluster) -> None:
    driver.use(FakeClientCuda(["GPU-other", "GPU-fake-1"]))
    try:
        with cd.connect(one_worker.addresses[0]) as session:
            assert session.empty(3, device="cuda:1").device == 1
            assert session.empty(3, device="GPU:1").device == 1, "the same GPU, as the worker calls it"
            with pytest.raises(
                cd.errors.NotFoundError, match=r"GPU:0 of the worker is GPU-fake-0, and this process may"
            ):
                session.empty(3, device="GPU:0")
            with pytest.raises(cd.errors.NotFoundError, match="'cuda:0' is GPU-other"):
                session.join("uuid", 1, device="cuda:0")
            with session.join("uuid", 1, device="cuda:1") as group:
                assert group.device.endswith("device:GPU:1")
    finally:
        driver.use(None)


def test_over_grpc_a_group_on_gpus_takes_values_of_the_host(
    one_worker: Cluster, cuda: FakeClientCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLECTIVED_TRANSPORT", "grpc")

    def body(session: cd.Session, group: cd.Group) -> None:
        with pytest.raises(cd.errors.UnimplementedError, match="arrays on GPU:0 need shared memory"):
            session.empty(3, device="GPU:0")
        assert (group.all_reduce("sum", np.ones(10)) == 2).all()

    one_worker.run(2, body, device="GPU:0")


class Library(types.ModuleType):
    """As much of CuPy as arrays need, in the memory of the host, which is where a fake GPU has its own."""

    class ndarray:
        def __init__(self, host: Any, keep: Any = None) -> None:
            self.host, self.keep = host, keep
            self.shape, self.dtype = host.shape, host.dtype
            self.device = types.SimpleNamespace(id=0)
            self.data = types.SimpleNamespace(ptr=host.ctypes.data)

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return dict(self.host.__array_interface__)

    ndarray.__module__, ndarray.__qualname__ = "cupy", "ndarray"

    def __init__(self) -> None:
        super().__init__("cupy")
        stream = types.SimpleNamespace(ptr=0)
        self.cuda = types.SimpleNamespace(get_current_stream=lambda: stream, Device=lambda number: _Nothing())

    def ascontiguousarray(self, value: Any) -> Any:
        return value if value.host.flags.c_contiguous else self.ndarray(np.ascontiguousarray(value.host))

    def asarray(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.ndarray(value.copy())
        held = types.SimpleNamespace(__array_interface__=value.__cuda_array_interface__)
        return self.ndarray(np.asarray(held), value)


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_arrays_of_a_library_come_back_as_such(
    cluster: Cluster, cuda: FakeClientCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = Library()
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def body(session: cd.Session, group: cd.Group) -> None:
        x = cupy.ndarray(np.arange(24, dtype=np.float32).reshape(4, 6))
        y = group.all_reduce("sum", {"a": x})["a"]
        assert type(y) is cupy.ndarray and (y.host == 2 * x.host).all()
        across = cupy.ndarray(x.host.T)
        assert (group.all_reduce("sum", across).host == 2 * x.host.T).all(), "what is not contiguous is copied"
        joined = group.all_gather(x)
        assert type(joined) is cupy.ndarray and joined.shape == (8, 6)
        made = session.empty((2, 2), np.int32, device="GPU:0", like=cupy)
        assert type(made) is cupy.ndarray and made.shape == (2, 2)
        made.host[:] = 5
        assert (group.all_reduce("max", made).host == 5).all()
        assert group.all_reduce("sum", x, out=x) is x
        with pytest.raises(ValueError, match="not contiguous"):
            group.all_reduce("sum", across, out=across)

    cluster.run(2, body, device="GPU:0")


def test_session_arrays_of_a_library_are_read_where_they_lie(
    one_worker: Cluster, cuda: FakeClientCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = Library()
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def body(session: cd.Session, group: cd.Group) -> None:
        made = session.empty((2, 2), np.int32, device="GPU:0", like=cupy)
        made.host[:] = 5
        before = cuda.copied_bytes
        assert (group.all_reduce("max", made).host == 5).all()
        assert cuda.copied_bytes == before, "nothing is copied in or out"

    one_worker.run(1, body, device="GPU:0")


def test_without_bindings_a_join_says_what_to_install(one_worker: Cluster) -> None:
    with cd.connect(one_worker.addresses[0]) as session:
        try:
            driver.binding()
        except driver.CudaError:
            with pytest.raises(cd.errors.UnavailableError, match="GPU:0 of the worker cannot be used by this process"):
                session.join("bare", 1, device="GPU:0")
        else:
            pytest.skip("this machine has GPUs of its own")


def test_status_names_the_gpus(one_worker: Cluster) -> None:
    devices = list(one_worker.status().workers[0].devices)
    assert [name.rpartition("device:")[2] for name in devices if "GPU" in name] == ["GPU:0", "GPU:1"]


def test_a_deadline_ends_what_a_gpu_holds_up_and_it_goes_on_afterwards(
    make: Callable[..., Cluster], cuda: FakeClientCuda
) -> None:
    cluster = make(1)

    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.ones(10, np.float32))
        group.all_reduce("sum", x)
        cluster.hold.touch()
        try:
            with pytest.raises(cd.errors.DeadlineExceededError):
                group.all_reduce("sum", x, options=cd.CommunicationOptions(timeout_seconds=0.3))
        finally:
            cluster.hold.unlink()
        group.rejoin(timeout=20)
        assert (np.asarray(group.all_reduce("sum", x)) == 1).all()

    cluster.run(1, body, device="GPU:0")


def test_a_client_that_is_killed_frees_all_it_had(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    before = cluster.files()
    client = cluster.client(
        "import collectived as cd, os, signal\n"
        "from collectived.gpu import driver\n"
        "from tests.gpu.fake_client import FakeClientCuda\n"
        "driver.use(FakeClientCuda())\n"
        "session = cd.connect()\n"
        "group = session.join('alone', 1, rank=0, device='GPU:0')\n"
        "x = session.empty(1000, device='GPU:0')\n"
        "group.all_reduce('sum', x)\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"
    assert cluster.files() > before
    client.kill()
    client.communicate()
    cluster.until(lambda: cluster.files() == before)


def test_a_killed_worker_takes_no_client_with_it(make: Callable[..., Cluster], cuda: FakeClientCuda) -> None:
    cluster = make(1)
    with cd.connect(cluster.addresses[0]) as session:
        group = session.join("left", 1, rank=0, device="GPU:0", timeout=20)
        x = filled(session, np.full(10, 7.0))
        y = group.all_reduce("sum", x)
        cluster.workers[0].kill()
        with pytest.raises(cd.errors.UnavailableError):
            group.all_reduce("sum", x)
        assert (np.asarray(y) == 7).all(), "its memory outlives the worker"
    cluster.workers[0].process.wait()


def test_a_gpu_that_fails_ends_its_worker_after_its_ranks_have_heard(
    make: Callable[..., Cluster], cuda: FakeClientCuda
) -> None:
    cluster = make(1)
    with cd.connect(cluster.addresses[0]) as session:
        group = session.join("broken", 1, rank=0, device="GPU:0", timeout=20)
        x = filled(session, np.ones(10))
        cluster.broken.touch()
        with pytest.raises(cd.errors.UnavailableError, match="a GPU of its worker failed|is lost"):
            group.all_reduce("sum", x)
        assert cluster.workers[0].process.wait(20) == 70
    assert "GPU:0 (Fake, GPU-fake-0) of this worker is lost" in cluster.workers[0].log


def test_cross_device_operations_reduce_over_gpus(one_worker: Cluster, cuda: FakeClientCuda) -> None:
    with cd.connect(one_worker.addresses[0]) as session:
        parts = cd.PerReplica([filled(session, np.full(6, 1.0 + index), f"GPU:{index}") for index in range(2)])
        for ops in (cd.NcclAllReduce(session=session), cd.ReductionToOneDevice(session=session)):
            total = ops.reduce("sum", parts, parts)
            assert [np.asarray(component).tolist() for component in total.values] == [[3.0] * 6] * 2
            assert [device.rpartition("device:")[2] for device in total.devices] == ["GPU:0", "GPU:1"]
