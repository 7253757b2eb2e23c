"""Looking before sleeping: forever shorter where it is in vain, longer again where it is not."""

from __future__ import annotations

from typing import Any

import pytest

from collectived_proto.ipc.spin import MAX_SPIN_SECONDS, MIN_SPIN_SECONDS, RETRY_AFTER, AdaptiveSpin


class Fake:
    """A poll in which nothing happens until it has been asked `before` times."""

    def __init__(self, before: int | None) -> None:
        self.before = before
        self.asked = 0

    def poll(self, timeout: float | None = None, /) -> list[Any]:
        assert timeout == 0
        self.asked += 1
        return ["news"] if self.before is not None and self.asked > self.before else []


def test_what_comes_while_one_looks_is_found_without_sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectived_proto.ipc.spin.perf_counter", lambda: 0.0)  # however late this thread runs
    assert AdaptiveSpin().poll(Fake(3), 1.0) == ["news"]


def test_looking_in_vain_gets_shorter_and_then_rare() -> None:
    spin = AdaptiveSpin()
    nothing = Fake(None)
    waits = 0
    while spin.budget >= MIN_SPIN_SECONDS:
        assert spin.poll(nothing, 1.0) == []
        waits += 1
    assert waits < 10
    asked = nothing.asked
    for _ in range(RETRY_AFTER - 1):
        spin.poll(nothing, 1.0)
    assert nothing.asked == asked
    spin.poll(nothing, 1.0)
    assert nothing.asked > asked


def test_success_makes_it_longer_again_up_to_a_limit() -> None:
    spin = AdaptiveSpin()
    spin.budget = MIN_SPIN_SECONDS
    for _ in range(20):
        assert spin.poll(Fake(0), 1.0)
    assert spin.budget == MAX_SPIN_SECONDS


def test_it_never_looks_longer_than_there_is_time() -> None:
    spin = AdaptiveSpin()
    nothing = Fake(None)
    spin.poll(nothing, 0.0)
    assert nothing.asked == 1
