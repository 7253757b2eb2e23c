"""A receive of c10d is posted only when something else needs it to be; else its wait receives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from datetime import timedelta
from typing import Any

import pytest
from tests.waiting import settle

import collectived as cd

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

from collectived.integrations.c10d.receive import LazyReceive, ReceiveWork  # noqa: E402  # imports torch

VALUE = "a value"


class Posted:
    """A work of a receive that has been posted, and has its message."""

    source = 3

    def __init__(self) -> None:
        self.is_cancelled = False

    def wait(self, timeout: float | None) -> str:
        return VALUE

    def done(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def cancel(self) -> None:
        self.is_cancelled = True

    def add_done_callback(self, callback: Callable[[Posted], object]) -> None:
        callback(self)


class Group:
    """Takes note of receives. `arrives`: when a thread that receives has its message."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.taken: list[Any] = []
        self.posted = Posted()
        self.arrives = threading.Event()
        self.arrives.set()
        self.error: BaseException | None = None
        self.generation = 1
        self.lazy = LazyReceive()

    def recv(self, async_op: bool = False) -> Any:
        self.begun.append("posted" if async_op else "received")
        if self.error is not None:
            raise self.error
        if async_op:
            return self.posted
        assert self.arrives.wait(30)
        return VALUE

    def start(self) -> ReceiveWork:
        group: Any = self
        work = ReceiveWork(self.lazy, group, self.recv, 3, self.taken.extend, [torch.zeros(2)])
        self.lazy.keep(work)
        return work


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr("collectived.integrations.c10d.work.peek_failure", lambda work: None)
    return Group()


def test_a_wait_receives(group: Group) -> None:
    work = group.start()
    assert group.begun == []
    assert work.wait() and work.wait() and work.is_completed() and work.is_success()
    assert group.begun == ["received"] and group.taken == [VALUE] and work.source_rank() == 3
    assert work.result()[0].tolist() == [0, 0]
    assert work.get_future().wait()[0].tolist() == [0, 0]
    assert group.begun == ["received"]


@pytest.mark.parametrize(
    "ask",
    [
        ReceiveWork.is_completed,
        ReceiveWork.is_success,
        lambda work: work._lazy.post(),
        lambda work: work.wait(timedelta(seconds=5)),
        lambda work: work.get_future().wait(),
        lambda work: run_in_thread(work.wait),
    ],
    ids=["is_completed", "is_success", "another operation", "wait for a time", "future", "wait of another thread"],
)
def test_whoever_asks_for_more_has_it_posted_once(group: Group, ask: Callable[[ReceiveWork], object]) -> None:
    work = group.start()
    ask(work)
    assert group.begun == ["posted"]
    group.lazy.post()
    assert work.wait() and group.taken == [VALUE] and group.begun == ["posted"]


def test_a_receive_that_is_taken_back_takes_nothing(group: Group) -> None:
    work = group.start()
    work.cancel()
    with pytest.raises(CancelledError):
        work.wait()
    assert work.is_completed() and not work.is_success() and group.begun == []
    posted = group.start()
    group.lazy.post()
    posted.cancel()
    assert group.posted.is_cancelled


@pytest.mark.parametrize("is_posted", [False, True])
def test_an_error_is_that_of_torch_each_time(group: Group, is_posted: bool) -> None:
    group.error = cd.errors.AbortedError("rank 1 aborted")
    work = group.start()
    if is_posted:
        group.lazy.post()
    for _ in range(2):
        with pytest.raises(torch.distributed.DistBackendError, match="rank 1 aborted"):
            work.wait()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), RuntimeError)
    with pytest.raises(RuntimeError, match="rank 1 aborted"):
        work.get_future().wait()
    assert len(group.begun) == 1


@pytest.mark.parametrize("is_posted", [False, True])
def test_an_interrupted_receive_is_over(group: Group, is_posted: bool) -> None:
    group.error = KeyboardInterrupt()
    work = group.start()
    with pytest.raises(KeyboardInterrupt):
        group.lazy.post() if is_posted else work.wait()
    for _ in range(2):
        with pytest.raises(CancelledError, match="interrupted"):
            work.wait()


def test_a_value_that_does_not_fit_is_said_each_time(group: Group) -> None:
    group.error = ValueError("it does not fit")
    work = group.start()
    for _ in range(2):
        with pytest.raises(ValueError, match="it does not fit"):
            work.wait()
    assert work.is_completed() and not work.is_success()


def test_the_next_receive_posts_the_one_before(group: Group) -> None:
    first, second = group.start(), group.start()
    assert group.begun == ["posted"]
    assert second.wait() and first.wait()
    assert group.begun == ["posted", "received"]


def test_a_receive_of_a_generation_that_is_over_takes_nothing_of_the_next_one(group: Group) -> None:
    waited = group.start()
    group.generation = 2
    with pytest.raises(torch.distributed.DistBackendError, match="its generation ended"):
        waited.wait()
    posted = group.start()
    group.generation = 3
    group.lazy.post()
    with pytest.raises(torch.distributed.DistBackendError, match="its generation ended"):
        posted.wait()
    assert group.begun == []


def test_while_a_thread_receives_others_wait_or_do_not_as_they_ask(group: Group) -> None:
    group.arrives.clear()
    made: list[ReceiveWork] = []

    def receive() -> None:
        made.append(group.start())
        made[0].wait()

    waiting = [threading.Thread(target=receive)]
    waiting[0].start()
    settle(lambda: group.begun)
    work = made[0]
    waiting.append(threading.Thread(target=work.wait))
    waiting[1].start()
    group.lazy.post()
    work.cancel()
    assert not work.is_completed()
    with pytest.raises(torch.distributed.DistBackendError, match="Timed out waiting"):
        work.wait(timedelta(milliseconds=10))
    group.arrives.set()
    for thread in waiting:
        thread.join()
    assert work.is_completed() and group.begun == ["received"] and group.taken == [VALUE]


def run_in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
