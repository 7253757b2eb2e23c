"""Waiting: deadlines, silence, verdicts, Ctrl-C, and several threads at one doorbell."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived.calls import channel
from collectived.calls.timeout import DEADLINE_GRACE, MOST_RENEWALS
from collectived.errors import Code
from collectived.shared import doorbell
from collectived_proto.ipc import messages

SUCCESSOR = 101


def silent(ring: messages.Submit) -> list[bytes]:
    return []


def test_a_worker_that_does_not_answer_is_given_up_a_quarter_second_after_the_deadline(make: Any, delays: Any) -> None:
    setting = make(rank=1)
    setting.far.answer, setting.far.pong = silent, False
    began = time.monotonic()
    says = (
        r"^barrier\(\) \(instance 0 of group 'train', test_call_waiting.py:\d+\) did not complete within "
        r"0.1 s: .*task:0 has"
    )
    with pytest.raises(cd.errors.DeadlineExceededError, match=says) as e:
        setting.group.barrier(cd.CommunicationOptions(timeout_seconds=0.1))
    assert 0.1 + DEADLINE_GRACE <= time.monotonic() - began < 1.5 + delays.room
    assert isinstance(e.value, TimeoutError) and e.value.rejoin and e.value.decided_by == "rank 1"
    setting.far.until(lambda: any(kind is messages.MessageType.FAIL for kind, _ in setting.far.texts))
    assert [member.rank for member in e.value.missing] == [1], "as the others are told"
    with pytest.raises(cd.errors.DeadlineExceededError):
        setting.group.barrier()


def test_a_worker_that_lives_and_is_late_is_waited_for(make: Any, delays: Any) -> None:
    """Another one may have to say first what both are to tell their clients."""

    def story() -> None:
        setting = make()
        rings: list[messages.Submit] = []
        asked: list[bytes] = []

        def remember(ring: messages.Submit) -> list[bytes]:
            rings.append(ring)
            return []

        def answer_at_last(message: bytes) -> None:
            on_doorbell(message)
            if messages.parse_type(message) is messages.MessageType.PING:
                asked.append(message)
                if len(asked) == 3:
                    for answer in setting.far.complete(rings[0]):
                        setting.far.doorbell.send(answer)

        setting.far.answer = remember
        on_doorbell, setting.far.on_doorbell = setting.far.on_doorbell, answer_at_last
        began = time.monotonic()
        assert setting.group.all_reduce("sum", 1, timeout=0.05) == 2
        assert len(asked) == 3 and time.monotonic() - began >= 2 * DEADLINE_GRACE

    delays.hold(story)


def test_a_worker_that_lives_and_says_nothing_is_given_up_at_last(make: Any, delays: Any) -> None:
    def story() -> None:
        setting = make()
        setting.far.answer = silent
        began = time.monotonic()
        with pytest.raises(cd.errors.DeadlineExceededError, match="has not answered"):
            setting.group.barrier(timeout=0.05)
        assert time.monotonic() - began >= (1 + MOST_RENEWALS) * DEADLINE_GRACE

    delays.hold(story)


def test_what_a_worker_has_not_ended_in_time_is_given_up_soon_once_it_is_waited_for(make: Any, delays: Any) -> None:
    def story() -> None:
        setting = make(rank=1)
        setting.far.answer, setting.far.pong = silent, False
        work = setting.group.barrier(async_op=True, timeout=0.1)
        time.sleep(0.1 + 2 * DEADLINE_GRACE)
        late = time.monotonic()
        with pytest.raises(cd.errors.DeadlineExceededError, match="has not answered"):
            work.result()
        assert time.monotonic() - late < DEADLINE_GRACE / 2 + delays.room

    delays.hold(story)


def test_who_looks_seldom_looks_in_vain_no_more_often(make: Any) -> None:
    setting = make(rank=1)
    setting.far.answer, setting.far.pong = silent, False
    work = setting.group.barrier(async_op=True, timeout=0.1)
    time.sleep(0.1 + DEADLINE_GRACE)
    for _ in range(2):  # asks the worker whether it lives, and has had no answer
        assert not work.done()
        with contextlib.suppress(TimeoutError):
            work.result(timeout=0.001)
        time.sleep(DEADLINE_GRACE)
    assert work.done()


def test_without_a_deadline_a_silent_worker_is_asked_whether_it_lives(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "PING_INTERVAL", 0.05)
    setting = make()
    rings: list[messages.Submit] = []

    def remember(ring: messages.Submit) -> list[bytes]:
        rings.append(ring)
        return []

    setting.far.answer = remember
    pongs: list[bytes] = []

    def answered_late(message: bytes) -> None:
        if messages.parse_type(message) is messages.MessageType.PING:
            pongs.append(message)
            if len(pongs) == 3:
                for answer in setting.far.complete(rings[0]):
                    setting.far.doorbell.send(answer)
        on_doorbell(message)

    on_doorbell, setting.far.on_doorbell = setting.far.on_doorbell, answered_late
    assert setting.group.all_reduce("sum", 1) == 2
    assert len(pongs) == 3


def test_a_worker_that_does_not_say_that_it_lives_is_lost(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "PING_INTERVAL", 0.05)
    setting = make()
    setting.far.answer = silent
    setting.far.pong = False
    with pytest.raises(cd.errors.UnavailableError, match="/job:worker/task:0 is lost: it has not answered"):
        setting.group.barrier()


def test_a_doorbell_that_closes_is_a_lost_worker(make: Any) -> None:
    setting = make()

    def hang_up(ring: messages.Submit) -> list[bytes]:
        setting.far.doorbell.shutdown(2)
        return []

    setting.far.answer = hang_up
    with pytest.raises(cd.errors.UnavailableError, match="task:0 is lost: it has closed the connection") as caught:
        setting.group.barrier()
    assert caught.value.rejoin
    with pytest.raises(cd.errors.UnavailableError, match="lost"):
        setting.group.barrier()


@pytest.mark.parametrize(
    "message",
    [
        b"\xff",
        b"\x10short",
        messages.encode_bare(messages.MessageType.SUBMIT),
        messages.Completion(0, 0, True, True, 9, 0, 1).encode(),
    ],
    ids=["unknown", "short", "wrong way", "unknown arena"],
)
def test_a_worker_that_talks_nonsense_is_lost(make: Any, message: bytes) -> None:
    setting = make()
    setting.far.answer = lambda ring: [message]
    with pytest.raises(cd.errors.UnavailableError, match="it sent something unexpected"):
        setting.group.barrier()


def test_a_verdict_is_raised_and_raised_again_without_asking(make: Any) -> None:
    setting = make()
    far = setting.far
    verdict = far.verdict(Code.UNAVAILABLE, "rank 1 is lost", 0)
    far.answer = lambda ring: [far.failed(ring.instance, verdict)]
    for _ in range(2):
        with pytest.raises(cd.errors.UnavailableError, match="rank 1 is lost") as caught:
            setting.group.all_reduce("sum", 1)
        assert caught.value.rejoin and caught.value.group == "train"
        assert caught.value.site.startswith("test_call_waiting.py:")
    with pytest.raises(cd.errors.UnavailableError):
        setting.group.all_reduce("sum", 1, async_op=True)
    assert len(far.rings) == 1


def test_after_a_mismatch_the_group_goes_on_in_the_successor(make: Any) -> None:
    setting = make()
    far, group = setting.far, setting.group
    verdict = far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 1, successor=SUCCESSOR)
    far.answer = lambda ring: None if ring.instance == 0 else [far.failed(ring.instance, verdict)]
    group.barrier()
    with pytest.raises(cd.errors.InvalidArgumentError, match="rank 1 differs") as caught:
        group.barrier()
    assert isinstance(caught.value, ValueError) and not caught.value.rejoin
    assert group.generation == SUCCESSOR
    far.answer = lambda ring: None
    group.barrier()
    assert [(ring.generation, ring.instance) for ring in far.rings] == [(100, 0), (100, 1), (SUCCESSOR, 0)]


def test_the_successor_begins_when_the_error_is_raised_not_when_it_arrives(make: Any) -> None:
    setting = make()
    far, group = setting.far, setting.group
    verdict = far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 0, successor=SUCCESSOR)
    far.answer = lambda ring: [far.failed(ring.instance, verdict)]
    first = group.barrier(async_op=True)
    far.until(lambda: len(far.rings) == 1)
    assert first.done() and group.generation == 100
    second = group.barrier(async_op=True)
    assert len(far.rings) == 1, "a call on a failed generation fails here"
    with pytest.raises(cd.errors.InvalidArgumentError):
        second.wait()
    assert group.generation == SUCCESSOR
    with pytest.raises(cd.errors.InvalidArgumentError):
        first.wait()
    assert group.generation == SUCCESSOR
    far.answer = lambda ring: None
    group.barrier()
    assert far.rings[-1].instance == 0


def test_calls_before_the_failed_one_still_succeed_and_end_before_the_successor_begins(make: Any) -> None:
    setting = make()
    far, group = setting.far, setting.group
    verdict = far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 1, successor=SUCCESSOR)

    def late(ring: messages.Submit) -> list[bytes] | None:
        if ring.generation == SUCCESSOR:
            return None
        return [] if ring.instance == 0 else [far.failed(1, verdict), *far.complete(far.rings[0])]

    far.answer = late
    first = group.all_reduce("sum", 1, async_op=True)
    with pytest.raises(cd.errors.InvalidArgumentError):
        group.all_reduce("sum", [1])
    assert group.all_reduce("sum", 5) == 10
    assert first.wait() == 2


def test_what_cannot_be_taken_in_ends_all_that_is_in_flight_in_a_generation_that_is_over_too(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = make()
    far, group = setting.far, setting.group
    verdict = far.verdict(Code.UNAVAILABLE, "rank 1 is lost", 1)
    far.answer = lambda ring: [] if ring.instance == 0 else [far.failed(1, verdict)]
    first = group.all_reduce("sum", 1, async_op=True)
    with pytest.raises(cd.errors.UnavailableError):
        group.all_reduce("sum", [1])
    monkeypatch.setattr(group._channel, "_handle", lambda *_: cd.errors.ResourceExhaustedError("no descriptor is left"))
    far.doorbell.send(far.complete(far.rings[0])[0])
    with pytest.raises(cd.errors.UnavailableError, match="rank 1 is lost"):
        first.result(5)


def test_a_verdict_that_nobody_asked_for_is_raised_by_leave(make: Any) -> None:
    setting = make()
    setting.group.broadcast(1)
    setting.far.doorbell.send(setting.far.failed(-1, setting.far.verdict(Code.UNAVAILABLE, "rank 1 is lost", 0)))
    with pytest.raises(cd.errors.UnavailableError, match="rank 1 is lost"):
        setting.group.leave()
    setting.far.until(lambda: (messages.MessageType.LEAVE, "") in setting.far.texts)
    setting.group.leave()


def test_ctrl_c_aborts_the_group_within_a_tenth_of_a_second(make: Any, delays: Any) -> None:
    setting = make(rank=1)
    pressed: list[float] = []

    def press(ring: messages.Submit) -> list[bytes]:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        return []

    setting.far.answer = press
    with pytest.raises(KeyboardInterrupt):
        setting.group.barrier()
    assert time.monotonic() - pressed[0] < 0.1 + delays.room
    setting.far.until(lambda: (messages.MessageType.ABORT, "interrupted on rank 1") in setting.far.texts)
    with pytest.raises(cd.errors.AbortedError, match="interrupted on rank 1"):
        setting.group.barrier()


def test_a_block_that_ends_by_an_exception_aborts_with_its_text_and_place(make: Any) -> None:
    setting = make()
    with pytest.raises(ValueError, match="loss is NaN"), setting.group:
        raise ValueError("loss is NaN")
    setting.far.until(lambda: len(setting.far.texts) == 2)
    (abort, text), (leave, _) = setting.far.texts
    assert (abort, leave) == (messages.MessageType.ABORT, messages.MessageType.LEAVE)
    assert text.startswith("ValueError: loss is NaN (test_call_waiting.py:")
    with pytest.raises(cd.errors.FailedPreconditionError, match="has left group 'train'"):
        setting.group.barrier()


def test_the_coordinators_words_replace_our_own_about_an_abort(make: Any) -> None:
    setting = make()
    verdict = setting.far.verdict(Code.ABORTED, "rank 0 aborted the group: enough", 0)
    setting.group.abort("enough")
    setting.far.doorbell.send(setting.far.failed(0, verdict))
    with pytest.raises(cd.errors.AbortedError, match="rank 0 aborted the group: enough"):
        setting.group.barrier()


def test_a_block_that_ends_well_leaves(make: Any) -> None:
    setting = make()
    with setting.group as group:
        group.barrier()
    setting.far.until(lambda: setting.far.texts == [(messages.MessageType.LEAVE, "")])


def test_abort_fails_what_is_in_flight_and_what_follows(make: Any) -> None:
    setting = make()
    setting.far.answer = silent
    work = setting.group.barrier(async_op=True)
    setting.group.abort("enough")
    with pytest.raises(cd.errors.AbortedError, match="enough"):
        work.wait()
    with pytest.raises(cd.errors.AbortedError, match="enough"):
        setting.group.barrier()


def complete(far: Any, ring: messages.Submit) -> None:
    for answer in far.complete(ring):
        far.doorbell.send(answer)


def test_the_sixty_fifth_call_waits_until_an_earlier_one_has_ended(make: Any) -> None:
    setting = make()
    far, group = setting.far, setting.group
    far.answer = silent
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(lambda: [group.all_reduce("sum", number, async_op=True) for number in range(160)])
        for number in range(160):  # the next one comes only as there is room for it
            far.until(lambda: len(far.rings) == min(160, number + 64))  # noqa: B023
            complete(far, far.rings[number])
        assert cd.wait(started.result(10)) == [2 * number for number in range(160)]
    assert [ring.instance for ring in far.rings] == list(range(160))


def test_a_call_that_finds_no_room_by_its_deadline_ends_the_generation(make: Any, delays: Any) -> None:
    setting = make()
    setting.far.answer = silent
    works = [setting.group.barrier(async_op=True) for _ in range(64)]
    with pytest.raises(cd.errors.DeadlineExceededError, match=r"did not complete within 0\.1 s: 64 collectives of"):
        begun = time.monotonic()
        setting.group.barrier(cd.CommunicationOptions(timeout_seconds=0.1))
    assert 0.1 <= time.monotonic() - begun <= 0.1 + DEADLINE_GRACE + delays.room
    for work in works:
        assert isinstance(work.exception(), cd.errors.DeadlineExceededError)
    with pytest.raises(cd.errors.DeadlineExceededError):
        setting.group.barrier()
    setting.far.until(lambda: len(setting.far.texts) > 0)
    assert setting.far.texts[0][0] is messages.MessageType.FAIL, "the others do not wait for it"
    assert len(setting.far.rings) == 64


def test_a_receive_that_finds_no_room_by_its_deadline_ends_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_P2P_OUTSTANDING", 3)
    setting = make()
    setting.far.answer = lambda ring: [] if ring.instance >= messages.P2P_BASE else setting.far.complete(ring)
    works = [setting.group.recv(1, async_op=True) for _ in range(3)]
    says = r"^recv.*did not complete within 0\.1 s: 3 sends and receives of this rank were in flight"
    with pytest.raises(cd.errors.DeadlineExceededError, match=says) as caught:
        setting.group.recv(1, timeout=0.1)
    assert not caught.value.rejoin
    setting.group.barrier()
    assert not any(work.done() for work in works) and not setting.far.texts


def test_a_receive_that_waits_for_room_for_long_says_so(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(messages, "MAX_P2P_OUTSTANDING", 3)
    monkeypatch.setattr(channel, "ROOM_WARNING_SECONDS", 0.01)
    setting = make()
    setting.far.answer = silent
    for _ in range(3):
        setting.group.recv(1, async_op=True)
    with pytest.raises(cd.errors.DeadlineExceededError):
        setting.group.recv(1, timeout=0.5)
    said = [record.message for record in caplog.records if "waits for room" in record.message]
    assert len(said) == 1 and "3 sends and receives of this rank are in flight" in said[0]


def test_what_waits_for_room_is_over_when_the_session_is_closed(make: Any) -> None:
    setting = make()
    setting.far.answer = silent
    works = [setting.group.barrier(async_op=True) for _ in range(64)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(setting.group.barrier)
        setting.far.until(lambda: len(setting.far.rings) == 64)
        setting.group._cancel("it is closed")
        with pytest.raises(cd.errors.CancelledError, match="it is closed"):
            waiting.result(10)
    assert len(setting.far.rings) == len(works), "it has taken no number"


def test_many_threads_share_one_doorbell(make: Any) -> None:
    group = make(size=2).group

    def run(number: int) -> list[int]:
        return [int(group.all_reduce("sum", np.full(3, number + i))[0]) for i in range(50)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(0, 800, 100)))
    assert results == [[2 * (start + i) for i in range(50)] for start in range(0, 800, 100)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_completions_in_any_order_reach_the_thread_that_waits(make: Any, order: tuple[int, ...]) -> None:
    setting = make(size=2)
    far = setting.far
    far.answer = silent
    works = [setting.group.all_reduce("sum", number, async_op=True) for number in range(3)]
    results: dict[int, int] = {}
    ended = [threading.Event() for _ in works]

    def wait(number: int) -> None:
        results[number] = works[number].wait()
        ended[number].set()

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    far.until(lambda: len(far.rings) == 3)
    for number in order:
        for answer in far.complete(far.rings[number]):
            far.doorbell.send(answer)
        assert ended[number].wait(10)
    for thread in threads:
        thread.join()
    assert results == {0: 0, 1: 2, 2: 4}
