"""Real daemons and clients on GPUs that are fake: what a real one does not do when a test wants it."""

from __future__ import annotations

import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.e2e.gpu.cluster import Cluster, filled
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.libraries import FakeCupy

import collectived as cd
from collectived.gpu import driver
from collectived.gpu.array import LEGACY_STREAM, DeviceArray

STREAM = 7


@pytest.fixture(scope="module")
def make(start: Callable[..., Cluster]) -> Callable[..., Cluster]:
    return start


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


def test_memory_beyond_a_sessions_share_is_refused_with_its_figures(one_worker: Cluster, cuda: FakeClientCuda) -> None:
    with cd.connect(one_worker.addresses[0]) as session:
        held = session.empty(64 << 20, np.uint8, device="GPU:0")
        refused = r"\d+ bytes more would exceed the 402653184 bytes of memory of GPU:0 that one session may have, of"
        with pytest.raises(cd.errors.ResourceExhaustedError, match=f"{refused} which 67108864 .* max_session_gpu_mem"):
            session.empty(380 << 20, np.uint8, device="GPU:0")
        filled(session, np.ones(10))
        session.empty(300 << 20, np.uint8, device="GPU:1")  # each GPU by itself
        del held


def test_one_session_leaves_memory_of_a_gpu_to_others(one_worker: Cluster, cuda: FakeClientCuda) -> None:
    with cd.connect(one_worker.addresses[0]) as greedy, cd.connect(one_worker.addresses[0]) as modest:
        with pytest.raises(cd.errors.ResourceExhaustedError, match="one session may have"):
            [greedy.empty(48 << 20, np.uint8, device="GPU:0") for _ in range(12)]
        assert np.asarray(filled(modest, np.arange(10))).tolist() == list(range(10))
        with modest.join("modest", 1, device="GPU:0") as group:
            assert (np.asarray(group.all_reduce("sum", filled(modest, np.ones(10)))) == 1).all()
        more = [greedy.empty(48 << 20, np.uint8, device="GPU:0") for _ in range(7)]
        with pytest.raises(cd.errors.ResourceExhaustedError, match="536870912 bytes of memory of GPU:0 for clients"):
            modest.empty(300 << 20, np.uint8, device="GPU:0")
        filled(greedy, np.ones(10))
        del more


def test_devices_are_matched_by_uuid(one_worker: Cluster) -> None:
    driver.set_cuda(FakeClientCuda(["GPU-other", "GPU-fake-1"]))
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
        driver.set_cuda(None)


def test_over_grpc_a_group_on_gpus_takes_values_of_the_host(
    one_worker: Cluster, cuda: FakeClientCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLECTIVED_TRANSPORT", "grpc")

    def body(session: cd.Session, group: cd.Group) -> None:
        with pytest.raises(cd.errors.UnimplementedError, match="arrays on GPU:0 need shared memory"):
            session.empty(3, device="GPU:0")
        assert (group.all_reduce("sum", np.ones(10)) == 2).all()

    one_worker.run(2, body, device="GPU:0")


def test_arrays_of_a_library_come_back_as_such(
    cluster: Cluster, cuda: FakeClientCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = FakeCupy()
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
    cupy = FakeCupy()
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
            driver.get_cuda()
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


@pytest.mark.parametrize("function", ["cuEventRecord", "cuMemcpyAsync"])
def test_a_call_that_the_driver_does_not_let_start_is_the_end_of_the_generation_for_all(
    one_worker: Cluster, cuda: FakeClientCuda, function: str
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = np.ones(10) if function == "cuMemcpyAsync" else filled(session, np.ones(10))
        group.all_reduce("sum", x)
        group.barrier()
        if group.rank == 1:
            cuda.refused.add(function)
            with pytest.raises(cd.errors.UnavailableError, match=f"could not be started.*{function} failed"):
                group.all_reduce("sum", x, async_op=True)
            cuda.refused.clear()
            refused.set()
        else:
            assert refused.wait(20)
            with pytest.raises(cd.errors.UnavailableError, match=f"could not be started.*{function} failed"):
                group.all_reduce("sum", x)
        group.rejoin(timeout=20)
        assert (np.asarray(group.all_reduce("sum", x)) == 2).all()

    refused = threading.Event()
    one_worker.run(2, body, device="GPU:0")


def test_arrays_on_another_gpu_than_the_ranks_pass_by_the_host(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        near, far = (filled(session, np.full(10, 3.0), f"GPU:{number}") for number in range(2))
        far.stream = STREAM
        for async_op in (False, True):
            both: Any = group.all_reduce("sum", {"far": far, "near": near}, async_op=async_op)
            both = both.wait() if async_op else both
            assert (both["far"].device, both["near"].device) == (1, 0), "as they were given"
            assert (np.asarray(both["far"]) == 6).all() and (np.asarray(both["near"]) == 6).all()
            out = filled(session, np.zeros(10), "GPU:1")
            work: Any = group.all_reduce("sum", near, out=out, async_op=async_op)
            assert (work.wait() if async_op else work) is out
            assert (np.asarray(out) == 6).all()
            assert group.all_reduce("sum", far, out=far) is far
            assert (np.asarray(far) == 6).all()
            far.assign(np.full(10, 3.0))

    cluster.run(2, body, device="GPU:0")


def test_what_is_copied_from_the_host_is_read_when_it_is_there(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.full(10, 2.0))
        value: dict[str, Any] = {"gpu": x, "host": np.full(10, 3.0)}
        group.all_reduce("sum", value)
        x.stream = STREAM
        cuda.held.add(LEGACY_STREAM)
        value["host"] = np.full(10, 4.0)
        work = group.all_reduce("sum", value, async_op=True)
        with pytest.raises(TimeoutError):
            work.result(0.1)
        cuda.let_go()
        both = work.result()
        assert (np.asarray(both["gpu"]) == 2).all() and (both["host"] == 4).all()

    cluster.run(1, body, device="GPU:0")


def test_a_client_that_is_killed_frees_all_it_had(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    before = cluster.files()
    client = cluster.client(
        "import collectived as cd, os, signal\n"
        "from collectived.gpu import driver\n"
        "from tests.fakes.client_cuda import FakeClientCuda\n"
        "driver.set_cuda(FakeClientCuda())\n"
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


def test_a_gpu_that_fails_ends_its_worker_after_its_ranks_have_heard(
    make: Callable[..., Cluster], cuda: FakeClientCuda
) -> None:
    cluster = make(1)
    with cd.connect(cluster.addresses[0]) as session:
        group = session.join("broken", 1, rank=0, device="GPU:0", timeout=20)
        x = filled(session, np.ones(10))
        cluster.broken.touch()
        with pytest.raises(cd.errors.UnavailableError, match="a GPU of its worker failed"):
            group.all_reduce("sum", x)
        assert cluster.workers[0].process.wait(20) == 70
    assert "GPU:0 (Fake, GPU-fake-0) of this worker is lost" in cluster.workers[0].log


def test_what_is_still_being_written_is_waited_for_by_the_worker_and_by_nobody_here(
    one_worker: Cluster, cuda: FakeClientCuda
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.full(100, 1.0))
        group.all_reduce("sum", x)
        before = cuda.synchronized
        x.stream = STREAM
        cuda.held.add(STREAM)
        works = [group.all_reduce("sum", x, async_op=True) for _ in range(3)]
        with session.join("beside", 1, device="GPU:0") as other:
            other.all_reduce("sum", np.ones(3))
        on_host = group.all_reduce("sum", np.ones(3), async_op=True)
        assert cuda.synchronized <= before + 4, "for values of the host alone"
        assert not any(work.done() for work in (*works, on_host)), "they keep their order"
        cuda.let_go()
        assert [np.asarray(work.result()).tolist() for work in works] == [[1.0] * 100] * 3
        assert (on_host.result() == 1).all()

    one_worker.run(1, body, device="GPU:0")
    assert not cuda.events, "they end with the group"


def test_a_deadline_ends_what_is_never_written(one_worker: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.ones(10))
        x.stream = STREAM
        cuda.held.add(STREAM)
        with pytest.raises(cd.errors.DeadlineExceededError):
            group.all_reduce("sum", x, options=cd.CommunicationOptions(timeout_seconds=0.3))
        cuda.let_go()
        group.rejoin(timeout=20)
        assert (np.asarray(group.all_reduce("sum", x)) == 1).all()

    one_worker.run(1, body, device="GPU:0")


def rehearsed(session: cd.Session, group: cd.Group, size: int = 10) -> DeviceArray:
    """An array, once a collective has made its memory and its communicators."""
    group.all_reduce("sum", filled(session, np.ones(10)))
    return filled(session, np.ones(size))


def failure(group: cd.Group, x: DeviceArray, timeout: float = 0) -> tuple[cd.errors.CollectiveError, float]:
    """The error of a collective, and the seconds that it took."""
    began = time.monotonic()
    with pytest.raises(cd.errors.CollectiveError) as caught:
        group.all_reduce("sum", x, options=cd.CommunicationOptions(timeout_seconds=timeout or None))
    return caught.value, time.monotonic() - began


def test_who_waits_for_its_own_gpu_hears_at_once_that_another_rank_is_lost(
    cluster: Cluster, cuda: FakeClientCuda
) -> None:
    name, ready = f"lost on {len(cluster.workers)}", threading.Barrier(2)

    def lost() -> None:
        with cd.connect(cluster.address_of(0, 2)) as session:
            group = session.join(name, 2, rank=0, device="GPU:0", timeout=20)
            rehearsed(session, group)
            ready.wait(20)
            assert called.wait(20)
            doorbell: Any = group._channel
            doorbell._socket.shutdown(socket.SHUT_RDWR)  # as the end of its process does
            ready.wait(20)

    called = threading.Event()
    with ThreadPoolExecutor(1) as pool, cd.connect(cluster.address_of(1, 2)) as session:
        other = pool.submit(lost)
        group = session.join(name, 2, rank=1, device="GPU:0", timeout=20)
        x = rehearsed(session, group)
        ready.wait(20)
        x.stream = STREAM
        cuda.held.add(STREAM)
        work = group.all_reduce("sum", x, async_op=True)
        called.set()
        try:
            with pytest.raises(cd.errors.UnavailableError, match="rank 0 .* is lost"):
                work.result(5)
        finally:
            cuda.let_go()
            ready.wait(20)
        other.result()


def test_a_rank_whose_gpu_has_not_written_its_value_is_who_a_deadline_names_to_all(
    cluster: Cluster, cuda: FakeClientCuda
) -> None:
    def body(session: cd.Session, group: cd.Group) -> tuple[list[int], str]:
        x = rehearsed(session, group)
        if group.rank == 1:
            x.stream = STREAM
            cuda.held.add(STREAM)
        error, _ = failure(group, x, 0.5)
        assert isinstance(error, cd.errors.DeadlineExceededError)
        return [member.rank for member in error.missing], str(error)

    told = cluster.run(2, body, device="GPU:0")
    cuda.let_go()
    assert [ranks for ranks, _ in told] == [[1], [1]]
    for _, text in told:
        assert re.search(
            r"rank 1 .* has called it at .*test_gpu_faults.py:\d+, and its GPU has not written the value", text
        )


def test_contracts_that_differ_are_found_while_a_gpu_is_still_writing(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = rehearsed(session, group, 10 + group.rank)
        if group.rank == 1:
            x.stream = STREAM
            cuda.held.add(STREAM)
        error, took = failure(group, x, 8)
        assert isinstance(error, cd.errors.InvalidArgumentError) and error.differing
        assert took < 3.0, "within `stall_after`, which is 1 s"

    cluster.run(2, body, device="GPU:0")
    cuda.let_go()


FORKING = """
import gc, os, pathlib, sys, threading
import numpy as np
import collectived as cd
from collectived.gpu import driver
from tests.e2e.gpu.cluster import filled
from tests.fakes.client_cuda import FakeClientCuda

cuda, hold = FakeClientCuda(), pathlib.Path(sys.stdin.readline().strip())
driver.set_cuda(cuda)
session = cd.connect()
group = session.join("forking", 1, rank=0, device="GPU:0", timeout=20)
x = filled(session, np.ones(100))
group.all_reduce("sum", x)
asked, inside, goes_on = cuda.wait_event, threading.Event(), threading.Event()

def slow(device, event, stream):
    inside.set()
    goes_on.wait()
    asked(device, event, stream)

cuda.wait_event = slow
hold.touch()
thread = threading.Thread(target=lambda: group.all_reduce("sum", x, async_op=True).wait(20))
thread.start()
inside.wait()
child = os.fork()
if not child:
    for name in ("unmap", "destroy_event", "destroy_stream", "is_event_done", "create_event", "record_event"):
        setattr(cuda, name, lambda *_: os._exit(3))
    del x
    gc.collect()
    os._exit(0)
killer = threading.Timer(15, os.kill, (child, 9))
killer.daemon = True
killer.start()
print("the child:", os.waitpid(child, 0)[1], flush=True)
goes_on.set()
hold.unlink()
thread.join()
session.close()
"""


def test_a_forked_child_ends_whatever_its_parents_threads_were_at_and_asks_the_driver_for_nothing(
    one_worker: Cluster,
) -> None:
    client = one_worker.client(FORKING)
    try:
        said, _ = client.communicate(f"{one_worker.hold}\n", timeout=30)
        assert said == "the child: 0\n" and client.returncode == 0
    finally:
        client.kill()
        one_worker.hold.unlink(missing_ok=True)


def test_a_call_keeps_its_deadline_while_it_gets_memory_for_its_result(
    make: Callable[..., Cluster], cuda: FakeClientCuda
) -> None:
    cluster = make(1)
    with cd.connect(cluster.addresses[0]) as session:
        group = session.join("stopped", 1, rank=0, device="GPU:0", timeout=20)
        x = session.empty(12 << 20, np.uint8, device="GPU:0")
        options = cd.CommunicationOptions(timeout_seconds=0.5)

        def summed() -> Any:
            return group.all_reduce("sum", x, options=options)

        held = summed()  # as much again needs new memory
        worker = cluster.workers[0].process
        worker.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(cd.errors.UnavailableError):
                summed()
            assert time.monotonic() - began < 5, "not the 30 s in which memory comes at all"
            del held
        finally:
            worker.send_signal(signal.SIGCONT)
