"""The thread that launches: what is submitted is done in order, waited for from outside, and let go when unwanted."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.cuda import FakeCuda, view_host_memory
from tests.waiting import settle

from collectived_runtime.device.cuda.driver import CudaError
from collectived_runtime.device.launch_thread import LaunchThread


class Gate:
    """A file that holds up a fake device."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def close(self) -> None:
        self.path.touch()

    def open(self) -> None:
        self.path.unlink()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "hold")


@pytest.fixture
def cuda(gate: Gate, tmp_path: Path) -> FakeCuda:
    return FakeCuda(hold=gate.path, broken=tmp_path / "broken")


@pytest.fixture
def launching(cuda: FakeCuda, gate: Gate) -> Iterator[LaunchThread]:
    launching = LaunchThread(cuda, 0)
    yield launching
    if gate.path.exists():
        gate.open()
    launching.close()


def test_work_is_done_and_told(cuda: FakeCuda, launching: LaunchThread) -> None:
    source, target = cuda.pin(100), cuda.pin(100)
    view_host_memory(source, 100)[:] = 7
    told = threading.Event()
    launch = launching.submit(lambda stream: cuda.copy(target, source, 100, stream), told.set)
    assert told.wait(20)
    assert launch.done and launch.error is None
    assert (view_host_memory(target, 100) == 7).all()


def test_work_that_is_under_way_is_not_done(cuda: FakeCuda, launching: LaunchThread, gate: Gate) -> None:
    gate.close()
    begun, told = threading.Event(), threading.Event()
    launch = launching.submit(lambda stream: begun.set(), told.set)
    assert begun.wait(20)
    launch.cancel()
    assert not launch.done and not launch.wait(0.02)
    gate.open()
    assert told.wait(20) and launch.done


def test_what_cannot_be_launched_has_failed(cuda: FakeCuda, launching: LaunchThread) -> None:
    told = threading.Event()
    launch = launching.submit(lambda stream: cuda.copy(1, 2, 3, stream), told.set)
    assert told.wait(20)
    assert isinstance(launch.error, CudaError)


def test_what_fails_on_the_device_has_failed(cuda: FakeCuda, launching: LaunchThread, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    told = threading.Event()
    launch = launching.submit(lambda stream: None, told.set)
    assert told.wait(20)
    assert isinstance(launch.error, CudaError) and launch.error.code == 700


def test_work_comes_after_its_events_and_holds_nobody_else_up(
    cuda: FakeCuda, launching: LaunchThread, gate: Gate
) -> None:
    stream, event = cuda.create_stream(0), cuda.create_event(0)
    gate.close()
    cuda.record(event, stream)
    first, second, begun = threading.Event(), threading.Event(), threading.Event()
    waiting = launching.submit(lambda stream: begun.set(), first.set, (event,))
    launching.submit(lambda stream: second.set(), lambda: None)
    assert second.wait(20), "it has been launched, whatever the other one waits for"
    assert not begun.is_set() and not waiting.done
    gate.open()
    assert first.wait(20) and begun.is_set()


def test_what_has_not_begun_never_does_once_it_is_unwanted(cuda: FakeCuda, launching: LaunchThread, gate: Gate) -> None:
    stream, event = cuda.create_stream(0), cuda.create_event(0)
    gate.close()
    cuda.record(event, stream)
    begun = threading.Event()
    waiting = launching.submit(lambda stream: begun.set(), lambda: None, (event,))
    waiting.cancel()
    assert waiting.wait(20)
    assert not begun.is_set()


def test_what_is_on_the_stream_has_begun(cuda: FakeCuda, launching: LaunchThread, gate: Gate) -> None:
    gate.close()
    told: list[str] = []
    begun, over = threading.Event(), threading.Event()
    launching.submit(lambda stream: told.append("launched"), over.set, begun=begun.set)
    assert begun.wait(20) and told == ["launched"]
    assert not over.is_set()
    gate.open()
    assert over.wait(20)


def test_who_only_waits_for_an_event_waits_for_nothing_that_is_on_the_stream(
    cuda: FakeCuda, launching: LaunchThread, gate: Gate
) -> None:
    event, over = cuda.create_event(0), threading.Event()
    gate.close()
    begun = threading.Event()
    under_way = launching.submit(lambda stream: None, lambda: None, begun=begun.set)
    assert begun.wait(20)
    launching.submit(None, over.set, (event,))
    assert over.wait(20) and not under_way.done


def test_what_will_not_come_to_its_end_is_told_while_it_is_under_way(launching: LaunchThread, gate: Gate) -> None:
    def check() -> None:
        raise ConnectionError("a rank is gone")

    gate.close()
    told = threading.Event()
    launch = launching.submit(lambda stream: None, told.set, check=check)
    assert told.wait(20) and launch.done and isinstance(launch.error, ConnectionError)
    assert not launch.wait(0.02), "the device is still at it"
    gate.open()
    assert launch.wait(20) and isinstance(launch.error, ConnectionError)


def test_what_is_under_way_keeps_what_it_works_on_though_nobody_wants_it(
    cuda: FakeCuda, launching: LaunchThread, gate: Gate
) -> None:
    class Memory:
        pass

    memory = Memory()
    kept, begun = weakref.ref(memory), threading.Event()
    gate.close()

    def work(_: int, memory: Memory = memory) -> None:
        begun.set()

    launch = launching.submit(work, lambda: None)
    del work, memory
    assert begun.wait(20)
    launch.cancel()
    gc.collect()
    assert kept() is not None
    gate.open()
    assert launch.wait(20)
    gc.collect()
    assert kept() is None


def test_what_has_ended_keeps_nothing_though_nothing_else_is_submitted(launching: LaunchThread) -> None:
    class Memory:
        def finish(self) -> None:
            pass

    memory = Memory()
    kept = weakref.ref(memory)
    launch = launching.submit(lambda _: None, memory.finish)
    assert launch.wait(20)
    del launch, memory
    settle(lambda: gc.collect() is not None and kept() is None)


def test_a_task_is_not_kept_by_what_it_has_launched(launching: LaunchThread) -> None:
    class Task:
        def __init__(self) -> None:
            self.launch = launching.submit(lambda _: None, self.look, begun=self.look, check=self.look)

        def look(self) -> None:
            pass

    gc.disable()
    try:
        task = Task()
        kept = weakref.ref(task)
        assert task.launch.wait(20)
        del task
        settle(lambda: kept() is None)
    finally:
        gc.enable()


def test_work_whose_end_nobody_will_know_has_failed_and_not_ended(
    cuda: FakeCuda, launching: LaunchThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(event: int, stream: int) -> None:
        raise CudaError("cuEventRecord", 700, "refused")

    monkeypatch.setattr(cuda, "record", record)
    told = threading.Event()
    launch = launching.submit(lambda _: None, told.set)
    assert told.wait(20)
    assert isinstance(launch.error, CudaError) and launch.done and not launch.has_ended
