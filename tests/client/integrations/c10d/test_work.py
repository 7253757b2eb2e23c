"""Works of c10d over works of the service, with a scripted worker."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived_proto.errors import Code

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

from collectived.integrations.c10d.work import CompletedWork, FailedWork, PendingWork  # noqa: E402  # imports torch


def start(setting: Any, finish: Any = None) -> Any:
    work = setting.group.all_reduce("sum", np.ones(2), async_op=True)
    return PendingWork([work], finish, [torch.zeros(2)])


def test_the_result_is_put_in_place_once_by_whatever_asks_first(make: Any) -> None:
    for ask in (PendingWork.wait, PendingWork.result, PendingWork.synchronize, lambda work: work.get_future().wait()):
        given: list[Any] = []
        work = start(make(), given.extend)
        ask(work)
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        assert [part.tolist() for part in given] == [[2, 2]]


def test_an_error_is_that_of_torch_with_ours_as_its_cause(make: Any) -> None:
    setting = make()
    verdict = setting.far.verdict(Code.ABORTED, "rank 1 aborted", 0)
    setting.far.answer = lambda ring: [setting.far.failed(ring.instance, verdict)]
    work = start(setting)
    with pytest.raises(torch.distributed.DistBackendError, match="rank 1 aborted") as caught:
        work.wait()
    assert isinstance(caught.value.__cause__, cd.errors.AbortedError)
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), RuntimeError)


def test_a_wait_that_ends_by_its_own_timeout_ends_nothing_else(make: Any) -> None:
    setting = make()
    setting.far.answer = lambda ring: []
    work = start(setting)
    with pytest.raises(torch.distributed.DistBackendError, match=" Timed out waiting: "):
        work.wait(timedelta(milliseconds=10))
    assert not work.is_completed()


def test_a_failed_future_gives_tensors_to_those_who_do_not_ask_and_raises_to_those_who_wait(make: Any) -> None:
    setting = make()
    verdict = setting.far.verdict(Code.ABORTED, "rank 1 aborted", 0)
    setting.far.answer = lambda ring: [setting.far.failed(ring.instance, verdict)]
    future = start(setting).get_future()
    with pytest.raises(torch.distributed.DistBackendError, match="rank 1 aborted"):
        future.wait()
    with pytest.raises(RuntimeError, match="rank 1 aborted"):
        future.then(lambda done: done.value()).wait()


@pytest.mark.parametrize("fails", ["on all ranks", "here"])
def test_a_failed_future_that_is_dropped_keeps_no_work_and_no_tensors(make: Any, fails: str) -> None:
    setting = make()
    if fails == "on all ranks":
        verdict = setting.far.verdict(Code.ABORTED, "rank 1 aborted", 0)
        setting.far.answer = lambda ring: [setting.far.failed(ring.instance, verdict)]

    def finish(_: object) -> None:
        raise RuntimeError("it does not fit")

    def fail() -> list[Any]:
        work = start(setting, finish)
        future = work.get_future()
        with pytest.raises(RuntimeError):
            future.wait()
        return [weakref.ref(one) for one in (work, *work._works, *work._result)]

    kept = fail()
    end = time.monotonic() + 10  # for the thread that calls back to let go
    while any(one() is not None for one in kept) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert [one() for one in kept] == [None] * 3


def test_a_group_goes_on_once_the_caller_has_the_error_and_not_when_callbacks_hear_of_it(make: Any) -> None:
    """Else bucket after bucket of one backward pass would be numbered in another generation than on other ranks."""
    setting = make()
    verdict = setting.far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 0, successor=101)
    hung = threading.Event()

    def answer(ring: Any) -> list[bytes]:
        hung.wait()
        return [setting.far.failed(ring.instance, verdict)]

    setting.far.answer = answer
    before = setting.group.generation
    future = start(setting).get_future()
    seen = future.then(lambda done: done.value())
    hung.set()
    with pytest.raises(RuntimeError, match="rank 1 differs"):
        seen.wait()
    assert setting.group.generation == before
    with pytest.raises(torch.distributed.DistBackendError, match="rank 1 differs"):
        future.wait()
    assert setting.group.generation == 101


def test_asking_how_a_work_stands_takes_no_group_on(make: Any) -> None:
    """It happens at another point of the program on each rank: only a wait is at the same one."""
    setting = make()
    verdict = setting.far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 0, successor=101)
    setting.far.answer = lambda ring: [setting.far.failed(ring.instance, verdict)]
    before = setting.group.generation
    work = start(setting)
    while not work.is_completed():
        pass
    assert not work.is_success() and isinstance(work.exception(), torch.distributed.DistBackendError)
    assert isinstance(work.exception().__cause__, cd.errors.InvalidArgumentError)
    assert setting.group.generation == before
    with pytest.raises(torch.distributed.DistBackendError, match="rank 1 differs"):
        work.wait()
    assert setting.group.generation == 101


def test_a_result_that_cannot_be_put_in_place_is_an_error_of_its_work(make: Any) -> None:
    def finish(_: object) -> None:
        raise RuntimeError("it does not fit")

    work = start(make(), finish)
    while not work.is_completed():
        pass
    assert not work.is_success() and str(work.exception()) == "it does not fit"
    with pytest.raises(RuntimeError, match="it does not fit"):
        work.wait()


def test_an_operation_that_could_not_start_is_raised_where_it_is_waited_for() -> None:
    """DDP's reducer must come to the end of the backward pass, or the next one finds it in the middle of this one."""
    error = torch.distributed.DistBackendError("rank 1 is lost")
    work = FailedWork(error, [torch.zeros(2)])
    assert work.is_completed() and not work.is_success() and work.exception() is error
    for ask in (work.wait, work.synchronize, work.result, work.get_future().wait):
        with pytest.raises(torch.distributed.DistBackendError, match="rank 1 is lost"):
            ask()


def test_a_callback_of_a_future_may_wait_for_another_one(make: Any) -> None:
    setting = make()
    chained = start(setting).get_future().then(lambda _: start(setting).get_future().wait()[0].tolist())
    assert chained.wait() == [0, 0]


def test_a_completed_work_says_so() -> None:
    work = CompletedWork(["done"])
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    assert work.result() == work.get_future().wait() == ["done"]
