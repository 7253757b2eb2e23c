"""Links whose path is dead break for whoever waits for them, and for nobody else."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
from tests.runtime.engine.run.test_links_that_die import Scene
from tests.runtime.transport.test_link_streams import tcp_pair

from collectived_runtime.engine.run import path_watch
from collectived_runtime.engine.run.path_watch import PathWatch
from collectived_runtime.transport.link import Link, LinkRefused

TIMEOUT = 8.0


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene(tcp_pair(), TIMEOUT)
    yield made
    made.close()


def silent(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(path_watch, "measure_silence", lambda descriptor, probe_after: seconds)


def test_a_link_that_a_task_waits_for_breaks_when_its_peers_host_answers_no_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.used = {scene.link: 1}
    scene.turn(0.0)
    due = scene.links.next_deadline
    assert 0 < due - time.monotonic() <= TIMEOUT / 4
    silent(monkeypatch, TIMEOUT)
    scene.links.on_timer(due - 0.1)
    assert not scene.broken, "it is early"
    silent(monkeypatch, TIMEOUT - 0.1)
    scene.links.on_timer(due)
    assert not scene.broken and scene.links.next_deadline == due + TIMEOUT / 4
    silent(monkeypatch, TIMEOUT + 0.25)
    scene.links.on_timer(due + TIMEOUT / 4)
    (error,) = scene.broken
    assert isinstance(error, LinkRefused) and error.peer == 1, "nobody is taken for lost"
    assert "has not answered for 8.2 s: the network between them is down" in str(error)
    assert not list(scene.links)


def test_nobody_looks_at_links_that_no_task_waits_for(scene: Scene) -> None:
    assert scene.links.next_deadline == math.inf
    scene.used = {scene.link: 1}
    scene.turn(0.0)
    assert scene.links.next_deadline < math.inf
    scene.used = {}
    scene.turn(0.0)
    assert scene.links.next_deadline == math.inf


def test_each_task_has_its_own_time(scene: Scene) -> None:
    scene.used = {scene.link: 1}
    scene.turn(0.0)
    first = scene.links.next_deadline
    scene.links.poll_idle()  # it has ended, and the next one begins
    scene.turn(0.0)
    assert scene.links.next_deadline > first


def test_a_link_that_cannot_be_looked_at_is_left_to_whoever_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, probe_after: float) -> float:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(path_watch, "measure_silence", fail)
    dialled, accepted = tcp_pair()
    watch = PathWatch(TIMEOUT)
    watch.start()
    assert watch.look([Link(1, 0, dialled)], math.inf) is None
    for stream in (dialled, accepted):
        stream.close()
