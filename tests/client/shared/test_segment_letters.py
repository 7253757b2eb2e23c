"""Which sends and receives a worker hears of: those that have waited for a while, and no others."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from collectived.shared import segment_letters
from collectived.shared.segment_letters import Announcements
from collectived_proto.ipc.messages import parse_submit

AFTER = 0.03125  # of which sums are exact


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(segment_letters, "monotonic", made)
    return made


class Worker:
    """Hears what is announced, if there is room."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.has_room = True
        self.announcements = Announcements(threading.Lock(), self._hear)

    def _hear(self, message: bytes) -> bool:
        if self.has_room:
            self.heard.append(parse_submit(message).instance)
        return self.has_room


@pytest.fixture
def worker() -> Worker:
    return Worker()


def make_call(instance: int) -> Any:
    return SimpleNamespace(
        generation=1,
        prepared=SimpleNamespace(id=5),
        instance=instance,
        cutoff=math.inf,
        expires_here=True,
        timeout=0.0,
        complete=False,
        is_announced=False,
        began=0.0,
    )


def test_calls_that_wait_are_announced_and_others_are_not(worker: Worker, clock: Clock) -> None:
    ended, waiting, young = (make_call(number) for number in range(3))
    for call in (ended, waiting):
        worker.announcements.add(call)
    ended.complete = True
    clock.now += AFTER
    worker.announcements.add(young)
    assert worker.announcements.announce_old(AFTER)
    assert worker.heard == [1]
    clock.now += AFTER
    worker.announcements.announce_old(AFTER)
    assert worker.heard == [1, 2]


def test_none_is_announced_early_while_calls_come_often(worker: Worker, clock: Clock) -> None:
    """Though there is none just when the thread looks."""
    for number in range(200):
        call = make_call(number)
        assert not worker.announcements.add(call)
        call.complete = True
        clock.now += AFTER / 2
        assert worker.announcements.announce_old(AFTER)
    assert worker.heard == []


def test_after_a_pause_the_next_call_is_announced_by_who_makes_it(worker: Worker, clock: Clock) -> None:
    first, second = make_call(0), make_call(1)
    worker.announcements.add(first)
    first.complete = True
    clock.now += 2.0
    assert not worker.announcements.announce_old(AFTER)  # the thread sleeps long now
    assert worker.announcements.add(second)
    assert not worker.announcements.announce_young()
    assert worker.heard == [1]
    assert worker.announcements.announce_old(AFTER)  # and looks often again


def test_a_call_for_which_there_is_no_room_is_announced_later(worker: Worker, clock: Clock) -> None:
    worker.announcements.add(make_call(0))
    clock.now += AFTER
    worker.has_room = False
    assert worker.announcements.announce_old(AFTER)
    worker.has_room = True
    worker.announcements.announce_old(AFTER)
    assert worker.heard == [0]
