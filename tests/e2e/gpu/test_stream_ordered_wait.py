"""Stream order: `Work.wait` returns while the device is still at it, and the caller's stream waits. On fake GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.e2e.gpu.cluster import Cluster, filled
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.libraries import FakeCupy

import collectived as cd
from collectived.gpu.array import LEGACY_STREAM, DeviceArray
from collectived_runtime.engine.gpu.stream_order import MOST_EVENTS

GPU_LOST = 70
MINE = 7  # a stream


@pytest.fixture(scope="module")
def cluster(start: Callable[..., Cluster]) -> Cluster:
    return start(1)


@contextlib.contextmanager
def held(cluster: Cluster) -> Iterator[None]:
    """Nothing on the GPUs of workers goes on."""
    cluster.hold.touch()
    try:
        yield
    finally:
        cluster.hold.unlink(missing_ok=True)


def warm(session: cd.Session, group: cd.Group, value: float = 1.0) -> DeviceArray:
    """An array, once there is memory for it and its results."""
    x = filled(session, np.full(100, value))
    y = np.asarray(group.all_reduce("sum", x))
    assert (y == group.size * value).all()
    return x


@pytest.mark.parametrize("size", [1, 2])
def test_a_wait_returns_while_the_device_is_at_it_and_the_stream_sees_the_right_numbers(
    cluster: Cluster, cuda: FakeClientCuda, size: int
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = warm(session, group, 3.0)
        group.barrier()
        if group.rank == 0:
            cluster.hold.touch()
        group.barrier()
        x.stream = MINE + group.rank
        work = group.all_reduce("sum", x, async_op=True)
        y = work.wait(20)
        assert isinstance(y, DeviceArray) and y.stream == x.stream
        assert work.wait() is y, "as often as one likes"
        assert cuda.under_way(x.stream), "it waits, and nobody else does"
        assert not work.done()
        with pytest.raises(TimeoutError):
            work.result(0.05)
        ready.wait(20)  # that all ranks have come so far
        if group.rank == 0:
            cluster.hold.unlink()
        assert (np.asarray(y) == 3.0 * size).all()
        assert work.result() is y and work.exception() is None

    ready = threading.Barrier(size)
    cluster.run(size, body, device="GPU:0")


def test_nothing_waits_on_the_host_for_values_of_a_gpu(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x, other = warm(session, group), filled(session, np.ones(50))
        other.stream = MINE
        out = filled(session, np.zeros(100))
        before = cuda.synchronized
        for _ in range(10):
            x = group.all_reduce("sum", x, async_op=True).wait()
            group.all_reduce("sum", {"one": x, "of another stream": other}, async_op=True).wait()
            group.all_reduce("sum", x, out=out, async_op=True).wait()
        group.all_reduce("sum", {"one": x, "of another stream": other}, out={"one": x, "of another stream": other})
        assert cuda.synchronized == before
        assert (np.asarray(x) == 1).all() and (np.asarray(out) == 1).all()

    cluster.run(1, body, device="GPU:0")


def test_a_value_of_several_streams_is_read_when_all_of_them_have_written_it(
    cluster: Cluster, cuda: FakeClientCuda
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        value = [warm(session, group), filled(session, np.ones(50))]
        value[1].stream = MINE
        cuda.held.add(MINE)
        work = group.all_reduce("sum", value, async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(0.05)
        cuda.let_go()
        assert [np.asarray(one).tolist() for one in work.wait()] == [[1.0] * 100, [1.0] * 50]

    cluster.run(1, body, device="GPU:0")


def test_a_result_is_copied_out_on_the_callers_stream(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x, out = warm(session, group, 5.0), filled(session, np.zeros(100))
        with held(cluster):
            work = group.all_reduce("sum", x, out=out, async_op=True)
            assert work.wait(20) is out
            assert cuda.under_way(LEGACY_STREAM)
        assert (np.asarray(out) == 5).all()
        assert work.result() is out

    cluster.run(1, body, device="GPU:0")


def test_what_a_copy_out_still_reads_does_not_serve_again(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x, other, out = warm(session, group, 5.0), filled(session, np.full(100, 9.0)), filled(session, np.zeros(100))
        out.stream = MINE
        cuda.held.add(MINE)
        group.all_reduce("sum", x, out=out)  # it has ended, and waits for its stream to be copied out
        for _ in range(5):
            group.all_reduce("sum", other)
        cuda.let_go()
        assert (np.asarray(out) == 5).all()

    cluster.run(1, body, device="GPU:0")


def test_the_stream_that_waits_is_the_callers_current_one(
    cluster: Cluster, cuda: FakeClientCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = FakeCupy()
    current = types.SimpleNamespace(ptr=0)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: current)
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def body(session: cd.Session, group: cd.Group) -> None:
        x = cupy.ndarray(np.arange(10.0))
        assert (group.all_reduce("sum", x).host == x.host).all()
        with held(cluster):
            work = group.all_reduce("sum", x, async_op=True)
            for stream in (MINE, MINE + 1):  # whoever waits for it
                current.ptr = stream
                y = work.wait(20)
                assert type(y) is cupy.ndarray
                assert cuda.under_way(stream)
            assert not cuda.under_way(LEGACY_STREAM)
        work.result()
        assert (y.host == x.host).all()

    cluster.run(1, body, device="GPU:0")


@pytest.mark.parametrize("ended", [True, False])
def test_whoever_asks_for_a_result_has_its_stream_wait_for_the_copy_into_out(
    cluster: Cluster, cuda: FakeClientCuda, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    cupy = FakeCupy()
    current = types.SimpleNamespace(ptr=MINE)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: current)
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def body(session: cd.Session, group: cd.Group) -> None:
        x, out = cupy.ndarray(np.full(100, 5.0)), cupy.ndarray(np.zeros(100))
        group.all_reduce("sum", x, async_op=True).result()  # from here on there is memory for it
        with held(cluster):
            work = group.all_reduce("sum", x, out=out, async_op=True)
            if not ended:
                work.wait(20)
            cuda.held.add(MINE)
            if not ended:
                current.ptr = 8
                work.wait(20)
        group.barrier()  # which comes after it
        for ask, stream in ((work.wait, 8), (work.done, 9), (work.result, 10)):
            current.ptr = stream
            ask()
            assert cuda.under_way(stream), "it waits for the copy on the other stream"
        cuda.let_go()
        cluster.until(lambda: not any(map(cuda.under_way, (MINE, 8, 9, 10))))
        assert (out.host == 5).all()

    cluster.run(1, body, device="GPU:0")


def test_where_part_of_it_is_for_the_host_a_wait_lasts_until_it_is_there(
    cluster: Cluster, cuda: FakeClientCuda
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = warm(session, group)
        value, on_host = {"gpu": x, "host": np.ones(3)}, np.zeros(100)
        group.all_reduce("sum", value)
        group.all_reduce("sum", x, out=on_host)
        on_host[:] = 0
        with held(cluster):
            works: list[cd.Work[Any]] = [
                group.all_reduce("sum", value, async_op=True),
                group.all_reduce("sum", x, out=on_host, async_op=True),
            ]
            for work in works:
                with pytest.raises(TimeoutError):
                    work.wait(0.05)
        both = works[0].wait()
        assert (both["host"] == 1).all() and (np.asarray(both["gpu"]) == 1).all()
        assert (works[1].wait() == 1).all()

    cluster.run(1, body, device="GPU:0")


def test_a_blocking_call_waits_for_the_end_and_no_stream_does(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = warm(session, group)
        ended = threading.Event()

        def call() -> None:
            group.all_reduce("sum", x)
            ended.set()

        cuda.waits.clear()
        with held(cluster):
            thread = threading.Thread(target=call)
            thread.start()
            assert not ended.wait(0.1)
        thread.join()
        assert not cuda.waits and not cuda.opened

    cluster.run(1, body, device="GPU:0")


def test_done_callbacks_and_await_mean_the_end_on_the_device(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = warm(session, group)

        async def awaited(work: cd.Work[Any]) -> Any:
            return await work

        called = threading.Event()
        with held(cluster):
            work = group.all_reduce("sum", x, async_op=True)
            y = work.wait(20)
            work.add_done_callback(lambda _: called.set())
            assert not work.done() and not called.wait(0.05)
            with pytest.raises(TimeoutError):
                work.exception(0.01)
        assert asyncio.run(awaited(work)) is y
        assert called.wait(20) and work.done()
        assert [(path, leaf is y) for path, leaf in work.as_completed()] == [((), True)]

    cluster.run(1, body, device="GPU:0")


def test_many_in_a_row_take_a_bounded_number_of_events(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        works, most = [], 0
        for number in range(200):
            x = filled(session, np.full(1 + 37 * number % 5000, number % 91, np.float32))
            works.append(group.all_reduce("sum", x, async_op=True))
            if number % 50 == 49:
                for at, work in enumerate(works):
                    first = number - 49 + at
                    y = work.wait()
                    assert (np.asarray(y) == 2 * (first % 91)).all() and y.size == 1 + 37 * first % 5000
                works.clear()
            most = max(most, cluster.files("worker-event"))
        assert most <= 2 * MOST_EVENTS, "of two ranks"
        assert len(cuda.opened) <= 2 * MOST_EVENTS

    cluster.run(2, body, device="GPU:0")
    assert not cuda.opened and not cuda.events, "they end with the group"
    cluster.until(lambda: not cluster.files("worker-event"))


def test_what_nobody_waits_for_gives_its_events_back(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = warm(session, group)
        for _ in range(3 * MOST_EVENTS):
            group.all_reduce("sum", x, async_op=True).result()
        with held(cluster):
            work = group.all_reduce("sum", x, async_op=True)
            work.wait(20)
            assert not work.done()

    cluster.run(1, body, device="GPU:0")


def test_a_wait_that_streams_cannot_share_lasts_no_longer_than_it_may(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = warm(session, group)
        cuda.refused.add("cuIpcOpenEventHandle")
        with held(cluster):
            work = group.all_reduce("sum", x, async_op=True)
            began = time.monotonic()

            def late() -> None:
                cluster.until(lambda: time.monotonic() >= began + 1)

            cuda.opening = late  # the driver may take its time
            with pytest.raises(TimeoutError, match="within 1 s"):
                work.wait(1)
            assert time.monotonic() < began + 2
        assert (np.asarray(work.wait()) == 1).all()

    cluster.run(1, body, device="GPU:0")


def test_memory_of_a_result_that_is_dropped_before_its_end_does_not_serve_again_until_then(
    cluster: Cluster, cuda: FakeClientCuda
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = warm(session, group)
        with held(cluster):
            work = group.all_reduce("sum", x, async_op=True)
            address = work.wait(20).address
            del work
            taken = [session.empty(100, np.float64, device="GPU:0") for _ in range(20)]
            assert address not in [one.address for one in taken]

    cluster.run(1, body, device="GPU:0")


def test_an_error_after_a_wait_is_raised_by_result_and_by_the_next_call(
    start: Callable[..., Cluster], cuda: FakeClientCuda
) -> None:
    cluster = start(1)
    with cd.connect(cluster.addresses[0]) as session:
        group = session.join("broken", 1, rank=0, device="GPU:0", timeout=20)
        x = warm(session, group)
        cluster.hold.touch()
        work = group.all_reduce("sum", x, async_op=True)
        work.wait(20)
        cluster.broken.touch()
        for ask in (work.result, work.exception):
            failure = ask() if ask == work.exception else pytest.raises(cd.errors.UnavailableError, ask).value
            assert isinstance(failure, cd.errors.UnavailableError)
        with pytest.raises(cd.errors.UnavailableError):
            group.all_reduce("sum", x)
        assert cluster.workers[0].process.wait(20) == GPU_LOST


def test_a_deadline_is_kept_while_the_device_hangs_and_the_stream_goes_on_when_it_has_ended(
    start: Callable[..., Cluster], cuda: FakeClientCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = start(1)

    def body(session: cd.Session, group: cd.Group) -> None:
        x = warm(session, group)
        with held(cluster):
            work = group.all_reduce("sum", x, options=cd.CommunicationOptions(timeout_seconds=0.5), async_op=True)
            work.wait(20)
            with pytest.raises(cd.errors.DeadlineExceededError):
                work.result(20)
            with pytest.raises(cd.errors.DeadlineExceededError):
                group.all_reduce("sum", x)
        cluster.until(lambda: not cuda.under_way(LEGACY_STREAM))
        group.rejoin(timeout=20)
        assert (np.asarray(group.all_reduce("sum", x)) == 1).all()
        with held(cluster):
            work = group.all_reduce("sum", x, options=cd.CommunicationOptions(timeout_seconds=0.5), async_op=True)
            work.wait(20)
            del work
            gc.collect()
            with caplog.at_level(logging.ERROR), pytest.raises(cd.errors.DeadlineExceededError):
                while True:
                    group.all_reduce("sum", np.ones(3))
            cluster.until(lambda: "this error was never collected" in caplog.text)  # said by another thread
        cluster.until(lambda: not cuda.under_way(LEGACY_STREAM))

    cluster.run(1, body, device="GPU:0")


def test_a_worker_that_is_killed_before_the_end_is_an_error_and_holds_up_neither_close_nor_the_collector(
    start: Callable[..., Cluster], cuda: FakeClientCuda
) -> None:
    cluster = start(1)
    with cd.connect(cluster.addresses[0]) as session:
        group = session.join("killed", 1, rank=0, device="GPU:0", timeout=20)
        x = warm(session, group)
        x.stream = MINE
        cluster.hold.touch()
        work = group.all_reduce("sum", x, async_op=True)
        y = work.wait(20)
        cluster.workers[0].kill()
        with pytest.raises(cd.errors.UnavailableError):
            work.result(20)
        with pytest.raises(cd.errors.UnavailableError):
            group.all_reduce("sum", x)
        assert cuda.under_way(MINE), "CUDA does not promise that its event is ever over"
    del work, x, y, session, group
    gc.collect()
    assert cuda.mapped, "what a stream may still read stays"


def test_while_a_stream_waits_for_a_worker_no_session_of_the_process_waits_for_it_to_give_memory_back(
    start: Callable[..., Cluster], cluster: Cluster, cuda: FakeClientCuda
) -> None:
    stuck = start(1)
    with cd.connect(stuck.addresses[0]) as waits:
        group = waits.join("stuck", 1, rank=0, device="GPU:0", timeout=20)
        x = warm(waits, group)
        x.stream = MINE
        with held(stuck):
            work = group.all_reduce("sum", x, async_op=True)
            work.wait(20)
            cluster.run(1, warm, device="GPU:0")  # another session, of another worker, from its first call to its end
            gc.collect()
            kept = list(cuda.mapped.values())
            assert cuda.under_way(MINE)
        work.result(20)
        cluster.until(lambda: not cuda.under_way(MINE))
        cluster.run(1, warm, device="GPU:0")
        assert [one for one in kept if one in cuda.mapped.values()] == kept[:1], "the next one gave it back"
    del work, x, group, waits
    gc.collect()
    assert not cuda.mapped and not cuda.events


def test_a_client_that_is_killed_before_the_end_frees_all_it_had(
    start: Callable[..., Cluster], cuda: FakeClientCuda
) -> None:
    cluster = start(1)
    before = cluster.files()
    client = cluster.client(
        "import collectived as cd\n"
        "from collectived.gpu import driver\n"
        "from tests.fakes.client_cuda import FakeClientCuda\n"
        "driver.set_cuda(FakeClientCuda())\n"
        "session = cd.connect()\n"
        "group = session.join('alone', 1, rank=0, device='GPU:0')\n"
        "x = session.empty(1000, device='GPU:0')\n"
        "group.all_reduce('sum', x)\n"
        "print('ready', flush=True)\n"
        "input()\n"
        "group.all_reduce('sum', x, async_op=True).wait()\n"
        "print('launched', flush=True)\n"
        "input()\n"
    )
    assert client.stdout is not None and client.stdin is not None
    assert client.stdout.readline() == "ready\n"
    with held(cluster):
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "launched\n"
        assert cluster.files("worker-event") == 1
        client.kill()
        client.communicate()
    cluster.until(lambda: cluster.files() == before and not cluster.files("worker-event"))
    cluster.run(1, warm, device="GPU:0")


def test_a_group_whose_values_pass_by_the_host_tells_of_the_last_copy(
    start: Callable[..., Cluster], cuda: FakeClientCuda
) -> None:
    cluster = start(2)

    def body(session: cd.Session, group: cd.Group) -> None:
        x = warm(session, group)
        group.barrier()
        if group.rank == 0:
            cluster.hold.touch()
        group.barrier()
        work = group.all_reduce("sum", x, async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(0.1)  # the partial sums have not even come to the host
        group_held.wait(20)
        if group.rank == 0:
            cluster.hold.unlink()
        assert (np.asarray(work.wait(20)) == 2).all()

    group_held = threading.Barrier(2)
    cluster.run(2, body, device="GPU:0")
