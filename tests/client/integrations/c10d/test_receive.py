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

from collectived.integrations.c10d.receive import ReceiveWork  # noqa: E402  # imports torch

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

    def recv(self, async_op: bool = False) -> Any:
        self.begun.append("posted" if async_op else "received")
        if self.error is not None:
            raise self.error
        if async_op:
            return self.posted
        assert self.arrives.wait(30)
        return VALUE

    def start(self) -> ReceiveWork:
        return ReceiveWork(self.recv, 3, self.taken.extend, [torch.zeros(2)])


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
        ReceiveWork.post,
        ReceiveWork.is_completed,
        ReceiveWork.is_success,
        lambda work: work.wait(timedelta(seconds=5)),
        lambda work: work.get_future().wait(),
    ],
    ids=["post", "is_completed", "is_success", "wait for a time", "future"],
)
def test_whoever_asks_for_more_has_it_posted_once(group: Group, ask: Callable[[ReceiveWork], object]) -> None:
    work = group.start()
    ask(work)
    assert group.begun == ["posted"]
    work.post()
    assert work.wait() and group.taken == [VALUE] and group.begun == ["posted"]


def test_a_receive_that_is_taken_back_takes_nothing(group: Group) -> None:
    work = group.start()
    work.cancel()
    with pytest.raises(CancelledError):
        work.wait()
    assert work.is_completed() and not work.is_success() and group.begun == []
    posted = group.start()
    posted.post()
    posted.cancel()
    assert group.posted.is_cancelled


@pytest.mark.parametrize("is_posted", [False, True])
def test_an_error_is_that_of_torch_each_time(group: Group, is_posted: bool) -> None:
    group.error = cd.errors.AbortedError("rank 1 aborted")
    work = group.start()
    if is_posted:
        work.post()
    for _ in range(2):
        with pytest.raises(torch.distributed.DistBackendError, match="rank 1 aborted"):
            work.wait()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), RuntimeError)
    with pytest.raises(RuntimeError, match="rank 1 aborted"):
        work.get_future().wait()
    assert len(group.begun) == 1


def test_an_interrupted_receive_is_over(group: Group) -> None:
    group.error = KeyboardInterrupt()
    work = group.start()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    with pytest.raises(CancelledError, match="interrupted"):
        work.wait()


def test_two_threads_may_wait_and_a_third_one_post(group: Group) -> None:
    group.arrives.clear()
    work = group.start()
    waiting = [threading.Thread(target=work.wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    settle(lambda: group.begun)
    work.post()  # which does not wait for it
    work.cancel()
    assert not work.is_completed()
    with pytest.raises(torch.distributed.DistBackendError, match="Timed out waiting"):
        work.wait(timedelta(milliseconds=10))
    group.arrives.set()
    for thread in waiting:
        thread.join()
    assert work.is_completed() and group.begun == ["received"] and group.taken == [VALUE]
