"""Work: what a started collective offers."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived.errors import Code
from collectived_proto.ipc import messages


def test_a_result_can_be_asked_for_again(make: Any) -> None:
    work = make().group.all_reduce("sum", [np.ones(2), None], async_op=True)
    first = work.result()
    assert first[0].tolist() == [2, 2] and first[1] is None
    assert work.wait() is first and work.done() and work.exception() is None


def test_ordinary_arrays_are_copied_at_submission(make: Any) -> None:
    setting = make()
    setting.far.answer = lambda ring: []
    value = np.ones(3)
    work = setting.group.all_reduce("sum", value, async_op=True)
    value[:] = 7
    setting.far.until(lambda: len(setting.far.rings) == 1)
    for answer in setting.far.complete(setting.far.rings[0]):
        setting.far.doorbell.send(answer)
    assert work.wait().tolist() == [2, 2, 2]


def test_when_only_their_timeout_passes_the_collective_goes_on(make: Any) -> None:
    setting = make()
    setting.far.answer = lambda ring: []
    work = setting.group.all_reduce("sum", 1, async_op=True)
    with pytest.raises(TimeoutError, match=r"all_reduce\(sum\) has not ended within 0.01 s") as caught:
        work.wait(0.01)
    assert not isinstance(caught.value, cd.errors.CollectiveError)
    with pytest.raises(TimeoutError):
        cd.wait([work], timeout=0)
    assert not work.done()
    for answer in setting.far.complete(setting.far.rings[0]):
        setting.far.doorbell.send(answer)
    assert work.wait(10) == 2


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_none_is_refused(make: Any, timeout: float) -> None:
    work = make().group.barrier(async_op=True)
    with pytest.raises(ValueError, match="timeout must not be negative or NaN"):
        work.wait(timeout)


def test_leaves_come_by_pack_last_leaves_first(make: Any) -> None:
    setting = make()
    far = setting.far
    far.answer = lambda ring: far.complete(ring)[:1]
    value = {"a": np.ones(1), "b": np.ones(2), "c": [np.ones(3), np.ones(4)]}
    work = setting.group.all_reduce("sum", value, async_op=True)
    arriving = work.as_completed()
    assert next(arriving)[0] == ("c", 1)
    assert not work.done(), "the other pack has not ended"
    assert next(arriving)[0] == ("c", 0)
    far.doorbell.send(messages.Completion(0, 1, True, True, 1000, 0, 5000).encode())
    rest = dict(arriving)
    assert list(rest) == [("b",), ("a",)]
    assert work.wait()["b"] is rest["b",]
    assert work.wait()["b"].tolist() == [2, 2]


def test_weights_of_a_complete_pack_are_updated_while_the_others_are_still_being_reduced(make: Any) -> None:
    setting = make()
    far = setting.far
    held: list[bytes] = []
    events: list[str] = []

    def hold(ring: messages.Submit) -> list[bytes]:
        held.extend(far.complete(ring))
        return []

    def complete_next_pack() -> None:
        events.append(f"pack {len(held)} is complete")
        far.doorbell.send(held.pop(0))

    far.answer = hold
    weights = {f"layer{number}": np.zeros(2) for number in range(6)}
    gradients = {name: np.full(2, float(number)) for number, name in enumerate(weights)}
    work = setting.group.all_reduce("sum", gradients, async_op=True)
    far.until(lambda: len(held) == 3)
    complete_next_pack()
    for number, (path, gradient) in enumerate(work.as_completed()):
        (name,) = path
        weights[name] -= gradient
        events.append(name)
        if number in (1, 3):  # all of a pack has been used, and no other pack is complete
            assert not work.done()
            complete_next_pack()
    assert events == [
        *("pack 3 is complete", "layer5", "layer4"),
        *("pack 2 is complete", "layer3", "layer2"),
        *("pack 1 is complete", "layer1", "layer0"),
    ]
    assert [weights[name][0] for name in weights] == [-2.0 * number for number in range(6)]


def test_leaves_can_be_walked_again_after_the_result_was_collected(make: Any) -> None:
    work = make().group.all_reduce("sum", {"a": np.ones(1), "b": (2, None)}, async_op=True)
    result = work.wait()
    for _ in range(2):
        assert [
            (path, leaf is found)
            for (path, leaf), found in zip(work.as_completed(), (result["b"][0], result["a"]), strict=True)
        ] == [(("b", 0), True), (("a",), True)]


def test_as_completed_ends_in_the_collectives_error(make: Any) -> None:
    setting = make()
    far = setting.far
    verdict = far.verdict(Code.ABORTED, "rank 1 aborted", 0)
    far.answer = lambda ring: [*far.complete(ring)[:1], far.failed(0, verdict)]
    arriving = setting.group.all_reduce("sum", [1, 2, 3], async_op=True).as_completed()
    assert [next(arriving)[0], next(arriving)[0]] == [(2,), (1,)]
    with pytest.raises(cd.errors.AbortedError, match="rank 1 aborted"):
        next(arriving)


def test_callbacks_are_called_though_nobody_waits(make: Any) -> None:
    setting = make()
    called: list[tuple[str, int]] = []
    ended = threading.Event()
    work = setting.group.all_reduce("sum", 1, async_op=True)
    work.add_done_callback(lambda work: called.append(("first", work.result())))
    work.add_done_callback(lambda work: ended.set())
    assert ended.wait(10)
    late = threading.Event()
    work.add_done_callback(lambda work: called.append(("late", work.result())))
    work.add_done_callback(lambda work: late.set())
    assert late.wait(10) and called == [("first", 2), ("late", 2)]


def test_works_can_be_awaited(make: Any) -> None:
    group = make().group

    async def main() -> list[int]:
        works = [group.all_reduce("sum", number, async_op=True) for number in range(20)]
        return [await work for work in reversed(works)]

    assert asyncio.run(main()) == [2 * number for number in reversed(range(20))]


def test_waiting_for_several_raises_the_first_error_after_all_have_ended(make: Any) -> None:
    setting = make()
    far = setting.far
    verdict = far.verdict(Code.ABORTED, "rank 1 aborted", 1)
    answers: list[list[bytes] | None] = [None, [], [far.failed(1, verdict), far.failed(2, verdict)]]
    far.answer = lambda ring: answers[ring.instance]
    works = [setting.group.all_reduce("sum", 1, async_op=True) for _ in range(3)]
    with pytest.raises(cd.errors.AbortedError):
        cd.wait(works)
    assert [work.done() for work in works] == [True] * 3
    assert works[0].result() == 2


def test_an_error_nobody_collected_is_logged_once_and_raised_by_the_next_call(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    setting = make()
    far = setting.far
    verdict = far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 0, successor=101)
    far.answer = lambda ring: [far.failed(ring.instance, verdict)] if ring.generation == 100 else None
    work = setting.group.barrier(async_op=True)
    far.until(lambda: len(far.rings) == 1)
    assert work.done()
    with caplog.at_level(logging.ERROR):
        del work
        gc.collect()
    assert [
        record.getMessage().startswith("this error was never collected: rank 1 differs") for record in caplog.records
    ]
    with pytest.raises(cd.errors.InvalidArgumentError, match="rank 1 differs"):
        setting.group.barrier()
    setting.group.barrier()


def test_a_work_that_is_dropped_releases_its_result(make: Any) -> None:
    setting = make()
    setting.group.all_reduce("sum", np.ones(3), async_op=True)
    setting.far.until(lambda: len(setting.far.rings) == 1)
    for _ in range(2):
        setting.group.barrier()
    assert setting.far.released == [5000]


def test_leaving_waits_for_what_is_in_flight(make: Any) -> None:
    setting = make()
    work = setting.group.all_reduce("sum", 21, async_op=True)
    setting.group.leave()
    assert work.done() and work.wait() == 42


def test_a_work_says_what_it_is(make: Any) -> None:
    work = make().group.all_reduce("sum", 1, async_op=True)
    work.wait()
    assert repr(work).startswith("<Work all_reduce(sum) instance 0 from test_work.py:")


def answer_all(setting: Any) -> None:
    """Has the far end complete everything that it has not yet."""
    for ring in setting.far.rings:
        for answer in setting.far.complete(ring):
            setting.far.doorbell.send(answer)


@pytest.mark.parametrize("ask", ["done", "exception", "callback"])
def test_out_is_filled_once_the_work_is_done(make: Any, ask: str) -> None:
    setting = make()
    setting.far.answer = lambda ring: []
    out: list[Any] = [np.zeros(2), np.zeros(1, np.int32)]
    seen: list[Any] = []
    called = threading.Event()
    work = setting.group.all_reduce("sum", [np.ones(2), np.ones(1, np.int32)], out=out, async_op=True)

    def callback(work: cd.Work[Any]) -> None:
        seen.extend(leaf.tolist() for leaf in out)
        called.set()

    if ask == "callback":
        work.add_done_callback(callback)
    setting.far.until(lambda: len(setting.far.rings) == 1)
    assert not work.done() and not np.any(out[0])
    answer_all(setting)
    if ask == "callback":
        assert called.wait(10) and seen == [[2, 2], [2]]
    elif ask == "exception":
        assert work.exception(10) is None
    else:
        while not work.done():
            pass
    assert out[0].tolist() == [2, 2] and out[1].tolist() == [2]
    out[0][:] = 7
    assert work.result() is out and out[0].tolist() == [7, 7], "it is written once"


def test_the_out_of_a_recv_is_filled_too(make: Any) -> None:
    setting = make()
    setting.far.comes = {"a": np.arange(3.0)}
    out = {"a": np.zeros(3)}
    work = setting.group.recv(1, out=out, async_op=True)
    assert work.exception(10) is None and out["a"].tolist() == [0, 1, 2]
    assert work.result() is out


def in_flight_and_failing(make: Any, successor: int) -> Any:
    """A setting whose first generation answers everything with one error."""
    setting = make()
    far = setting.far
    verdict = far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 0, successor=successor)
    far.answer = lambda ring: [far.failed(ring.instance, verdict)] if ring.generation == 100 else None
    return setting


def uncollected(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith("this error was never collected")]


@pytest.mark.parametrize("value", [1, cd.IndexedSlices(np.ones((1, 1)), [0])], ids=["dense", "sparse"])
def test_an_error_nobody_collected_is_raised_by_the_next_call_though_that_does_not_wait(
    make: Any, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    setting = in_flight_and_failing(make, 101)
    work = setting.group.barrier(async_op=True)
    setting.far.until(lambda: len(setting.far.rings) == 1)
    assert work.done()
    del work
    gc.collect()
    with pytest.raises(cd.errors.InvalidArgumentError, match="rank 1 differs"):
        setting.group.all_reduce("sum", value, async_op=True)
    gc.collect()
    assert len(uncollected(caplog)) == 1
    assert setting.group.all_reduce("sum", 1, async_op=True).result() == 2
    assert setting.group.generation == 101


def test_a_work_that_was_dropped_in_flight_is_heard_of_when_it_fails(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    setting = make()
    far = setting.far
    verdict = far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 0, successor=101)
    far.answer = lambda ring: [] if ring.generation == 100 else None
    for _ in range(2):
        setting.group.barrier(async_op=True)
    gc.collect()
    far.until(lambda: len(far.rings) == 2)
    assert uncollected(caplog) == []
    far.doorbell.send(far.failed(0, verdict))
    logged = threading.Event()

    def heard(record: logging.LogRecord) -> bool:
        logged.set()
        return True

    caplog.handler.addFilter(heard)
    with pytest.raises(cd.errors.InvalidArgumentError, match="rank 1 differs"):
        setting.group.barrier(async_op=True)
    setting.group.barrier()
    setting.group.leave()
    assert logged.wait(10)
    caplog.handler.acquire()  # until the record is kept
    caplog.handler.release()
    assert len(uncollected(caplog)) == 1


def test_an_error_that_the_caller_was_given_is_not_logged(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    setting = in_flight_and_failing(make, 0)
    fail = setting.far.answer
    setting.far.answer = lambda ring: fail(ring) if ring.instance == 2 else []  # when all are in flight
    works = [setting.group.barrier(async_op=True) for _ in range(3)]
    with pytest.raises(cd.errors.InvalidArgumentError):
        works[1].wait()
    del works
    gc.collect()
    assert uncollected(caplog) == []


@pytest.mark.parametrize("where", ["work", "call", "leave"])
def test_after_ctrl_c_nobody_is_told_of_it_again(make: Any, caplog: pytest.LogCaptureFixture, where: str) -> None:
    setting = make()

    def press(ring: messages.Submit) -> list[bytes]:
        if where != "call" or ring.instance == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return []

    setting.far.answer = press
    works: list[cd.Work[Any]] = []
    with pytest.raises(KeyboardInterrupt):
        works.append(setting.group.barrier(async_op=True))
        if where == "work":
            works[0].wait(20)
        elif where == "call":
            setting.group.barrier()
        else:
            setting.group.leave()
    works.clear()
    gc.collect()
    assert uncollected(caplog) == []


def test_callbacks_are_called_in_a_thread_of_the_librarys_and_their_errors_logged(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    setting = make()
    threads: list[int] = []
    called = threading.Semaphore(0)

    def callback(work: cd.Work[Any]) -> None:
        threads.append(threading.get_ident())
        called.release()
        raise ValueError("of the caller's")

    work = setting.group.all_reduce("sum", 1, async_op=True)
    work.add_done_callback(callback)
    assert work.result() == 2 and called.acquire(timeout=10)
    work.add_done_callback(callback)
    ended = threading.Event()
    work.add_done_callback(lambda work: ended.set())
    assert called.acquire(timeout=10) and ended.wait(10)
    assert len(threads) == 2 and threading.get_ident() not in threads
    assert caplog.messages.count("a callback of a collective failed") == 2


@pytest.mark.parametrize("callback", [None, 3, "print"])
def test_what_cannot_be_called_back_is_refused_at_once(make: Any, callback: Any) -> None:
    work = make().group.barrier(async_op=True)
    with pytest.raises(TypeError, match="callback must be a function of this Work, got"):
        work.add_done_callback(callback)
    work.wait()


def test_a_work_that_has_ended_is_awaited_without_a_thread(make: Any) -> None:
    work = make().group.all_reduce("sum", 1, async_op=True)
    work.wait()

    async def main() -> tuple[Any, int]:
        before = threading.active_count()
        return await work, threading.active_count() - before

    assert asyncio.run(main()) == (2, 0)


def test_only_works_are_waited_for(make: Any) -> None:
    work = make().group.barrier(async_op=True)
    with pytest.raises(TypeError, match=r"works\[1\] must be a Work, as async_op=True returns them, got 3"):
        cd.wait([work, 3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="works must be several Works, such as a list of them, got <Work barrier"):
        cd.wait(work)
    assert cd.wait([work]) == [None]
