"""Abort, Ctrl-C and a client's own cut: callers get their memory back when the worker reads it no more."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived.errors import Code
from collectived.shared.doorbell import Doorbell
from collectived_proto.ipc import messages

Stop = Callable[[Any], None]


def silent(ring: messages.Submit) -> list[bytes]:
    return []


def on_abort(far: Any, answers: list[bytes]) -> None:
    """Has the far end send these when an ABORT comes."""
    take = far.on_doorbell

    def on_doorbell(message: bytes) -> None:
        take(message)
        if messages.parse_type(message) is messages.MessageType.ABORT:
            for answer in answers:
                far.doorbell.send(answer)

    far.on_doorbell = on_doorbell


def by_abort(setting: Any) -> None:
    setting.group.abort("enough")


def by_ctrl_c(setting: Any) -> None:
    def press(ring: messages.Submit) -> list[bytes]:
        os.kill(os.getpid(), signal.SIGINT)
        return []

    setting.far.answer = press
    with pytest.raises(KeyboardInterrupt):
        setting.group.barrier()


def by_cut(setting: Any) -> None:
    with pytest.raises(cd.errors.DeadlineExceededError):
        setting.group.barrier(cd.CommunicationOptions(timeout_seconds=0.01))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits for the worker as long as it takes, however busy this machine is."""
    monkeypatch.setattr(Doorbell, "_abort_ack_timeout", 20.0)
    monkeypatch.setattr(Doorbell, "_cutoff_ack_timeout", 20.0)


EVERY_WAY = pytest.mark.parametrize("stop", [by_abort, by_ctrl_c, by_cut], ids=["abort", "Ctrl-C", "cut"])


@EVERY_WAY
def test_calls_end_only_when_the_worker_has_stopped(make: Any, patient: None, stop: Stop) -> None:
    setting = make()
    far = setting.far
    far.answer = silent
    work = setting.group.all_reduce("sum", np.ones(3), async_op=True)
    far.until(lambda: len(far.rings) == 1)
    seen: list[bool] = []
    take = far.on_doorbell

    def on_doorbell(message: bytes) -> None:
        if messages.parse_type(message) is messages.MessageType.PING:
            seen.append(work._call.complete)
        take(message)

    far.on_doorbell = on_doorbell
    stop(setting)
    assert seen and not any(seen) and work.done()
    staging = setting.memory.acquire_staging(work._call.prepared)
    assert staging.address == far.rings[0].addresses, "what the worker reads no more is used again"


@EVERY_WAY
def test_memory_that_a_worker_may_still_be_reading_is_not_used_again(make: Any, stop: Stop) -> None:
    setting = make()
    far = setting.far
    far.answer, far.pong = silent, False
    own = setting.memory.empty((8,), np.dtype(np.float64))
    where = setting.memory.locate(own)
    works = [setting.group.all_reduce("sum", value, async_op=True) for value in (np.ones(3), own)]
    del own
    far.until(lambda: len(far.rings) == 2)
    began = time.monotonic()
    stop(setting)
    assert 0.09 <= time.monotonic() - began < 5
    assert all(work.done() for work in works)
    assert setting.memory.acquire_staging(works[0]._call.prepared).address != far.rings[0].addresses
    assert setting.memory.locate(setting.memory.empty((8,), np.dtype(np.float64))) != where


def test_what_a_worker_completes_after_all_serves_again(make: Any) -> None:
    setting = make()
    far = setting.far
    far.answer, far.pong = silent, False
    own = setting.memory.empty((8,), np.dtype(np.float64))
    where = setting.memory.locate(own)
    work = setting.group.all_reduce("sum", own, async_op=True)
    del own
    far.until(lambda: len(far.rings) == 1)
    setting.group.abort("enough")
    assert work.done()
    far.doorbell.send(messages.Completion(far.rings[0].instance, 0, True, False).encode())
    setting.group._channel.poll()
    assert setting.memory.locate(setting.memory.empty((8,), np.dtype(np.float64))) == where


def test_a_worker_that_fails_all_that_is_in_flight_has_stopped_too(make: Any, patient: None) -> None:
    setting = make()
    far = setting.far
    far.answer, far.pong = silent, False
    works = [setting.group.all_reduce("sum", number, async_op=True) for number in range(2)]
    verdict = far.verdict(Code.ABORTED, "rank 0 aborted the group: enough", 0)
    on_abort(far, [far.failed(number, verdict) for number in range(2)])
    began = time.monotonic()
    setting.group.abort("enough")
    assert time.monotonic() - began < 10
    for work in works:
        with pytest.raises(cd.errors.AbortedError, match="rank 0 aborted the group"):
            work.wait()
    assert setting.memory.acquire_staging(works[0]._call.prepared).address in {ring.addresses for ring in far.rings}


def test_without_calls_in_flight_abort_does_not_wait(make: Any, patient: None) -> None:
    setting = make()
    setting.far.pong = False
    began = time.monotonic()
    setting.group.abort("enough")
    setting.group.abort("again")
    assert time.monotonic() - began < 10
    with pytest.raises(cd.errors.AbortedError, match="enough"):
        setting.group.leave()
    setting.far.until(
        lambda: [kind for kind, _ in setting.far.texts] == [messages.MessageType.ABORT, messages.MessageType.LEAVE]
    )


def test_an_abort_frees_a_thread_that_waits(make: Any) -> None:
    setting = make()
    setting.far.answer = silent
    ended: list[BaseException | None] = []
    work = setting.group.barrier(async_op=True)
    waiting = threading.Thread(target=lambda: ended.append(work.exception()))
    waiting.start()
    setting.far.until(lambda: len(setting.far.rings) == 1)
    setting.group.abort("enough")
    waiting.join(10)
    assert [type(error) for error in ended] == [cd.errors.AbortedError]


@pytest.mark.parametrize("use", ["abort", "barrier"])
def test_a_callback_may_use_the_group(make: Any, use: str) -> None:
    setting = make()
    far, group = setting.far, setting.group
    far.answer = lambda ring: [] if ring.instance == 0 else None
    first = group.all_reduce("sum", 1, async_op=True)
    used = threading.Event()

    def callback(work: cd.Work[Any]) -> None:
        group.abort("seen enough") if use == "abort" else group.barrier()
        used.set()

    first.add_done_callback(callback)
    far.until(lambda: len(far.rings) == 1)
    for answer in far.complete(far.rings[0]):
        far.doorbell.send(answer)
    assert first.wait(10) == 2 and used.wait(10)


def test_an_abort_is_cut_to_what_people_read_and_to_what_utf_8_carries(make: Any) -> None:
    setting = make()
    with pytest.raises(ValueError), setting.group:
        raise ValueError(os.fsdecode(b"\xff") + "x" * 1_000_000)
    setting.far.until(lambda: len(setting.far.texts) == 2)
    assert setting.far.texts[0][1].startswith(r"ValueError: \udcffxxx")
    assert 4000 < len(setting.far.texts[0][1]) <= 4096


def test_an_error_whose_text_cannot_be_had_still_aborts(make: Any) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    setting = make()
    with pytest.raises(Broken), setting.group:
        raise Broken
    setting.far.until(lambda: len(setting.far.texts) == 2)
    assert setting.far.texts[0][1].startswith("Broken: (its text cannot be had: RuntimeError) (test_group_abort.py:")


def test_a_reason_must_be_a_text(make: Any) -> None:
    with pytest.raises(TypeError, match="reason must be a text.* got 5"):
        make().group.abort(5)


def test_a_compact_verdict_is_completed_from_the_groups_members(make: Any) -> None:
    setting = make(size=3)
    far, members = setting.far, setting.group.members
    short = [cd.Member(rank, "", 0, "", 0, "", 4, "barrier()", "a.py:1", 2.5) for rank in range(3)]
    verdict = far.verdict(Code.UNAVAILABLE, "rank 1 is lost", 0, missing=(short[1],), members=tuple(short))
    far.answer = lambda ring: [far.failed(ring.instance, verdict)]
    with pytest.raises(cd.errors.UnavailableError) as caught:
        setting.group.barrier()
    (missing,) = caught.value.missing
    assert (missing.host, missing.pid, missing.device) == (members[1].host, members[1].pid, members[1].device)
    assert (missing.last_instance, missing.last_op, missing.last_site) == (4, "barrier()", "a.py:1")
    assert [member.device for member in caught.value.members] == [member.device for member in members]
    assert caught.value.members[2].idle_seconds == 2.5


def test_a_verdict_that_came_in_full_is_left_as_it_is(make: Any) -> None:
    setting = make()
    far = setting.far
    full = cd.Member(1, "/job:worker/replica:0/task:9/device:CPU:0", 9, "elsewhere", 5)
    verdict = far.verdict(Code.UNAVAILABLE, "rank 1 is lost", 0, missing=(full,))
    far.answer = lambda ring: [far.failed(ring.instance, verdict)]
    with pytest.raises(cd.errors.UnavailableError) as caught:
        setting.group.barrier()
    assert caught.value.missing == (full,)


def test_a_verdict_that_cannot_be_read_is_a_lost_worker(make: Any) -> None:
    setting = make()
    setting.far.answer = lambda ring: [messages.encode_failed(ring.instance, b"\xff" * 9)]
    with pytest.raises(cd.errors.UnavailableError, match="a verdict that cannot be read"):
        setting.group.barrier()
