"""Tensors of PyTorch that say they lie on a GPU, by the hook for DDP and by process groups, on fake GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.e2e.gpu.cluster import Cluster
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.libraries import own

import collectived as cd

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

from collectived.integrations import futures  # noqa: E402  # imports torch
from collectived.integrations.c10d import ProcessGroupCollectived  # noqa: E402
from collectived.integrations.c10d.submission import Submission  # noqa: E402
from collectived.integrations.torch import allreduce_hook  # noqa: E402

OWN, OTHER = 7, 8  # streams
GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):  # type: ignore[misc]  # torch is not there for the type checker
    """A tensor that says that it lies on GPU 0: its memory is that of a fake one.

    Attributes:
        recorded: the streams on which such tensors were said to be in use.
    """

    is_cuda, is_cpu = True, False
    recorded: list[int] = []

    @property
    def device(self) -> Any:
        return GPU

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream.cuda_stream)


class FakeStream:
    """A stream of a fake GPU as `torch.cuda` shows it."""

    def __init__(self, cuda: FakeClientCuda, number: int) -> None:
        self._cuda = cuda
        self.cuda_stream = number

    def record_event(self) -> int:
        event, _ = self._cuda.create_event(0)
        self._cuda.record_event(0, event, self.cuda_stream)
        return event

    def wait_event(self, event: int) -> None:
        self._cuda.wait_event(0, event, self.cuda_stream)


class Streams(threading.local):
    """Which stream is current in a thread; at first none but the default one."""

    current = 0


@pytest.fixture
def streams(cuda: FakeClientCuda, monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream(cuda, made.current))
    OnGpu.recorded.clear()
    return made


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those of all futures that are made. The futures have none, for there is no driver."""
    asked: list[Any] = []
    plain = torch.futures.Future

    def make(*, devices: Any = None) -> Any:
        asked.append(devices)
        return plain()

    monkeypatch.setattr(torch.futures, "Future", make)
    return asked


@pytest.fixture(scope="module")
def worker(start: Callable[..., Cluster]) -> Cluster:
    return start(1)


@pytest.fixture
def groups(worker: Cluster, streams: Streams, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Runs a function as every rank of a process group."""
    monkeypatch.setenv("COLLECTIVED_WORKER", worker.address_of(0, 1))
    monkeypatch.setenv("COLLECTIVED_JOB", "test")

    def run(size: int, body: Callable[[Any], Any]) -> list[Any]:
        def one(_: cd.Session, group: cd.Group) -> Any:
            name = f"of torch, {group.key}"
            limit = timedelta(seconds=20)
            submission = Submission(
                limit,
                lambda session, options: session.join(
                    name, size, rank=group.rank, device="GPU:0", options=options, timeout=20
                ),
            )
            made = ProcessGroupCollectived(None, submission)
            try:
                return body(made)
            finally:
                made.shutdown()

        return worker.run(size, one, device="GPU:0")

    yield run


def tensor(cuda: FakeClientCuda, value: Any) -> Any:
    return torch.from_numpy(own(cuda, value)).as_subclass(OnGpu)


def numbers(of: Any) -> list[float]:
    found: list[float] = of.as_subclass(torch.Tensor).tolist()
    return found


def test_the_hook_averages_buckets_on_a_gpu(worker: Cluster, cuda: FakeClientCuda, streams: Any, devices: Any) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        gradients = tensor(cuda, np.arange(100, dtype=np.float32) + group.rank)
        future = allreduce_hook(group)(None, SimpleNamespace(buffer=lambda: gradients))
        assert future.wait() is gradients
        assert numbers(gradients) == [number + 0.5 for number in range(100)]

    worker.run(2, body, device="GPU:0")
    assert devices == [[GPU]] * 2, "who waits for them waits on its streams"


@pytest.mark.usefixtures("devices")
def test_the_hooks_future_is_complete_when_streams_need_not_wait_for_the_worker(
    worker: Cluster, cuda: FakeClientCuda, streams: Streams
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        gradients = tensor(cuda, np.ones(100, np.float32))
        hook = allreduce_hook(group)
        hook(None, SimpleNamespace(buffer=lambda: gradients)).wait()
        streams.current = OWN
        cuda.held.add(OWN)
        future = hook(None, SimpleNamespace(buffer=lambda: gradients))
        assert not future.done(), "the gradients are still to be written on that stream"
        cuda.let_go()
        future.wait()

    worker.run(1, body, device="GPU:0")


def test_a_process_group_sums_in_place_and_gives_a_future_on_whose_value_streams_wait(
    groups: Any, cuda: FakeClientCuda, devices: Any
) -> None:
    def body(group: Any) -> None:
        one = tensor(cuda, np.full(100, group.rank() + 1, np.float32))
        work = group.allreduce([one])
        work.wait()
        assert work.get_future().wait()[0] is one
        assert numbers(one) == [3.0] * 100

    groups(2, body)
    assert devices == [[GPU]] * 2


@pytest.mark.usefixtures("devices")
def test_what_another_thread_has_put_in_place_is_waited_for_on_the_current_stream(
    groups: Any, cuda: FakeClientCuda, streams: Streams
) -> None:
    """A tensor that is not contiguous gets its result by a copy, on the stream of whoever waits first."""

    def body(group: Any) -> None:
        whole = tensor(cuda, np.ones((10, 10), np.float32))
        work = group.allreduce([whole.t()])
        other = threading.Thread(target=wait_on, args=(work, OTHER))
        other.start()
        other.join()
        streams.current = OWN
        before = len(cuda.waits)
        work.wait()
        assert OWN in cuda.waits[before:], "it is told to wait for the copies of the other one"
        assert OnGpu.recorded == [OTHER], "the memory that is copied from is in use there"
        assert numbers(whole.reshape(-1)) == [1.0] * 100

    def wait_on(work: Any, stream: int) -> None:
        streams.current = stream
        work.wait()

    groups(1, body)


def test_futures_know_the_gpus_of_tensors_in_lists(cuda: FakeClientCuda) -> None:
    one = tensor(cuda, np.ones(2))
    assert futures.gpus_of([[one, one], [torch.ones(1)]]) == {GPU}
    assert futures.gpus_of(torch.ones(1)) == set() and futures.gpus_of([]) == set()
