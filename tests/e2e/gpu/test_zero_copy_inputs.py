"""Memory of clients' own: real daemons and clients on fake GPUs, whose memory processes really share."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.gpu.cluster import Cluster
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.libraries import FakeCupy, own

import collectived as cd
from collectived.gpu import driver

LENT = "fake-lent"
MOST = 3  # as the worker is told
STREAM = 7


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(1, 2, tmp_path_factory.mktemp("lent"), options=("--max-session-openings", str(MOST)))
    yield cluster
    cluster.close()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    made = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


def alone(worker: Cluster, body: Callable[[cd.Session, cd.Group], None]) -> None:
    worker.run(1, body, device="GPU:0")
    worker.until(lambda: worker.files(LENT) == 0)  # what was open goes with the session


def test_arrays_of_a_library_are_read_where_they_lie(worker: Cluster, cuda: FakeClientCuda, cupy: FakeCupy) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        host = own(cuda, np.arange(24, dtype=np.float32).reshape(4, 6))
        whole, part = cupy.ndarray(host), cupy.ndarray(host[1:3])
        before = cuda.copied_bytes
        for number in range(5):
            host[...] = number + group.rank
            total = group.all_reduce("sum", {"a": whole, "b": part})
            assert (total["a"].host == 2 * number + 1).all() and total["b"].shape == (2, 6)
        assert cuda.copied_bytes == before, "nothing is copied in or out"

    worker.run(2, body, device="GPU:0")
    assert cuda.handles == 2, "one for the allocation of each rank"
    worker.until(lambda: worker.files(LENT) == 0)


def test_ranks_of_several_workers_read_theirs(two_workers: Cluster, cuda: FakeClientCuda, cupy: FakeCupy) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = cupy.ndarray(own(cuda, np.full(100_000, group.rank + 1.0)))
        assert (group.all_reduce("sum", x).host == 3).all()
        assert (group.broadcast(x, root=1).host == 2).all()

    two_workers.run(2, body, device="GPU:0")
    assert cuda.handles == 2 and not cuda.copied_bytes


@pytest.fixture(scope="module")
def two_workers(start: Callable[..., Cluster]) -> Cluster:
    return start(2)


def test_an_allocation_is_open_once_for_all_sessions_of_a_process(
    worker: Cluster, cuda: FakeClientCuda, cupy: FakeCupy
) -> None:
    host = own(cuda, np.ones((2, 1000)))

    def body(session: cd.Session, group: cd.Group) -> None:
        assert (group.all_reduce("sum", cupy.ndarray(host[group.rank])).host == 2).all()
        group.barrier()
        assert worker.files(LENT) == 1
        group.barrier()

    worker.run(2, body, device="GPU:0")
    assert not cuda.copied_bytes


def test_with_async_op_the_value_is_that_of_the_submission(
    worker: Cluster, cuda: FakeClientCuda, cupy: FakeCupy
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        host = own(cuda, np.ones(1000))
        work = group.all_reduce("sum", cupy.ndarray(host), async_op=True)
        host[...] = 5
        assert (work.result().host == 1).all()
        assert cuda.handles == 0

    alone(worker, body)


def test_an_address_that_is_allocated_again_is_read_anew(worker: Cluster, cuda: FakeClientCuda, cupy: FakeCupy) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        host = own(cuda, np.ones(1000))
        address = host.ctypes.data
        for value in range(1, 5):
            host[...] = value
            assert (group.all_reduce("sum", cupy.ndarray(host)).host == value).all()
            assert worker.files(LENT) == 1, "what was freed is closed"
            cuda.replace(address)
        assert cuda.handles == 4 and not cuda.copied_bytes

    alone(worker, body)


def test_what_was_freed_is_closed_when_the_next_is_opened_or_a_little_later(
    worker: Cluster, cuda: FakeClientCuda, cupy: FakeCupy
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        first, second, kept = own(cuda, np.ones(10)), own(cuda, np.ones(10)), own(cuda, np.ones(10))
        group.all_reduce("sum", cupy.ndarray(first))
        group.all_reduce("sum", cupy.ndarray(second))
        assert worker.files(LENT) == 2
        cuda.free(first.ctypes.data)
        group.all_reduce("sum", cupy.ndarray(kept))
        worker.until(lambda: worker.files(LENT) == 2)
        cuda.free(second.ctypes.data)
        again = cupy.ndarray(own(cuda, np.ones(10), kept.ctypes.data))
        worker.until(lambda: group.all_reduce("sum", again) is not None and worker.files(LENT) == 1)

    alone(worker, body)


def test_of_many_allocations_those_used_last_stay_open(worker: Cluster, cuda: FakeClientCuda, cupy: FakeCupy) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        arrays = [cupy.ndarray(own(cuda, np.full(100, float(number)))) for number in range(MOST + 3)]
        for _ in range(2):
            for number, array in enumerate(arrays):
                assert (group.all_reduce("sum", array).host == number).all()
                assert worker.files(LENT) <= MOST
        before = cuda.handles
        for array in arrays[-MOST:]:
            group.all_reduce("sum", array)
        assert cuda.handles == before
        assert not cuda.copied_bytes

    alone(worker, body)


def test_what_a_collective_reads_stays_open(worker: Cluster, cuda: FakeClientCuda, cupy: FakeCupy) -> None:
    """More allocations than may be open, each read by a collective that a GPU holds up: the rest are copied."""

    def body(session: cd.Session, group: cd.Group) -> None:
        groups = [session.join(f"held-{number}", 1, device="GPU:0") for number in range(MOST + 1)]
        arrays = [cupy.ndarray(own(cuda, np.full(100, float(number)))) for number in range(MOST + 1)]
        room = session.empty(10, device="GPU:0")  # for what is copied and for results, for a new one waits for the GPU
        worker.hold.touch()
        try:
            with ThreadPoolExecutor(MOST + 1) as pool:
                results = [pool.submit(one.all_reduce, "sum", x) for one, x in zip(groups, arrays, strict=True)]
                worker.until(lambda: worker.files(LENT) == MOST and cuda.copied_bytes > 0)
                worker.hold.unlink()
                for number, result in enumerate(results):
                    assert (result.result().host == number).all()
        finally:
            worker.hold.unlink(missing_ok=True)
        assert cuda.copied_bytes == 800, "one of them"
        del room

    alone(worker, body)


def test_memory_without_a_handle_is_copied(worker: Cluster, cuda: FakeClientCuda, cupy: FakeCupy) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        pool = cuda.malloc(800, exportable=False)
        x = cupy.ndarray(own(cuda, np.ones(100), pool))
        assert (group.all_reduce("sum", x).host == 1).all()
        nobodys = cupy.ndarray(np.ones(100))
        assert (group.all_reduce("sum", nobodys).host == 1).all()
        assert cuda.copied_bytes == 1600 and cuda.handles == 0

    alone(worker, body)


class Nonsense(FakeClientCuda):
    """One whose handles open nothing."""

    def get_ipc_handle(self, device: int, address: int) -> bytes:
        super().get_ipc_handle(device, address)
        return b"nonsense".ljust(64, b"\1")


def test_a_handle_that_cannot_be_opened_is_told_once_and_its_memory_copied(worker: Cluster, cupy: FakeCupy) -> None:
    cuda = Nonsense()
    driver.set_cuda(cuda)
    try:

        def body(session: cd.Session, group: cd.Group) -> None:
            x = cupy.ndarray(own(cuda, np.ones(100)))
            for _ in range(3):
                assert (group.all_reduce("sum", x).host == 1).all()
            assert cuda.handles == 1 and cuda.copied_bytes == 2400

        alone(worker, body)
    finally:
        driver.set_cuda(None)


def test_what_the_worker_has_not_opened_within_a_second_is_copied(
    start: Callable[..., Cluster], cuda: FakeClientCuda, cupy: FakeCupy
) -> None:
    worker = start(1)

    def asked() -> None:
        with cd.connect(worker.addresses[0]) as session, contextlib.suppress(cd.errors.ResourceExhaustedError):
            session.empty(40 << 20, np.uint8, device="GPU:0")

    with cd.connect(worker.addresses[0]) as session, ThreadPoolExecutor(2) as others:
        group = session.join("late", 1, rank=0, device="GPU:0", timeout=20)
        x = cupy.ndarray(own(cuda, np.full(1000, 3.0)))
        group.all_reduce("sum", x, async_op=True).result()  # from here on there is memory for a copy and the result
        before = cuda.copied_bytes
        worker.hold.touch()  # new memory is not cleared, and what is asked for next waits for that
        memory = [others.submit(asked) for _ in range(2)]
        worker.until(lambda: worker.files() > 2)

        def copied() -> None:
            worker.until(lambda: cuda.copied_bytes > before)
            worker.hold.unlink()

        release = threading.Thread(target=copied)
        release.start()
        options = cd.CommunicationOptions(timeout_seconds=4)
        assert (group.all_reduce("sum", x, options=options).host == 3).all()
        release.join()
        for one in memory:
            one.result(20)
        group.leave()
    worker.until(lambda: not worker.files(LENT))


def test_what_a_failed_call_still_copies_into_its_staging_does_not_reach_the_next_one(
    worker: Cluster, cuda: FakeClientCuda, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = threading.local()
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: current.stream)

    def body(session: cd.Session, group: cd.Group) -> None:
        current.stream = stream = types.SimpleNamespace(ptr=0)
        late = group.rank == 2

        def summed(value: float, size: int = 100) -> Any:
            return group.all_reduce("sum", cupy.ndarray(np.full(size, value)), async_op=True)

        assert (summed(1.0).result(20).host == 3).all()
        if late:
            stream.ptr = STREAM
            cuda.held.add(STREAM)
        with pytest.raises(cd.errors.InvalidArgumentError):
            summed(9.0, 101 if group.rank == 1 else 100).result(20)
        stream.ptr = 0
        if late:
            worker.hold.touch()
        all_three.wait(20)
        work = summed(3.0)
        if late:
            cuda.let_go()
            worker.until(lambda: not cuda.under_way(STREAM))  # the copy of the failed call
            worker.hold.unlink()
        assert (work.result(20).host == 9).all()

    all_three = threading.Barrier(3)
    worker.run(3, body, device="GPU:0")


def test_elements_that_are_not_aligned_are_copied(worker: Cluster, cuda: FakeClientCuda, cupy: FakeCupy) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = cupy.ndarray(own(cuda, np.ones(100), cuda.malloc(808) + 4))
        assert (group.all_reduce("sum", x).host == 1).all()
        assert cuda.handles == 0 and cuda.copied_bytes == 800

    alone(worker, body)


def test_without_openings_everything_is_copied(tmp_path: Path, cuda: FakeClientCuda, cupy: FakeCupy) -> None:
    cluster = Cluster(1, 1, tmp_path, options=("--max-session-openings", "0"))
    try:

        def body(session: cd.Session, group: cd.Group) -> None:
            assert (group.all_reduce("sum", cupy.ndarray(own(cuda, np.ones(100)))).host == 1).all()
            assert cuda.handles == 0

        cluster.run(1, body, device="GPU:0")
    finally:
        cluster.close()


PROGRAM = """
import sys
import numpy as np
import collectived as cd
from collectived.gpu import driver
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.libraries import FakeCupy, own
cuda, cupy = FakeClientCuda(), FakeCupy()
sys.modules["cupy"] = cupy
driver.set_cuda(cuda)
x = cupy.ndarray(own(cuda, np.ones(1000)))
group = cd.connect().join("lender", 1, rank=0, device="GPU:0")
group.all_reduce("sum", x)
print("ready", flush=True)
input()
print(x.host.sum(), flush=True)
try:
    group.all_reduce("sum", x)
except cd.errors.UnavailableError:
    print(x.host.sum(), flush=True)
"""


def test_a_client_that_is_killed_leaves_nothing_open(worker: Cluster) -> None:
    client = worker.client(PROGRAM)
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"
    assert worker.files(LENT) == 1
    client.kill()
    client.communicate()
    worker.until(lambda: worker.files(LENT) == 0)


def test_a_worker_that_is_killed_takes_no_memory_with_it(start: Callable[..., Cluster]) -> None:
    cluster = start(1)
    client = cluster.client(PROGRAM)
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"
    cluster.workers[0].kill()
    cluster.workers[0].process.wait()
    said: Any = client.communicate("\n")[0]
    assert said == "1000.0\n1000.0\n"
