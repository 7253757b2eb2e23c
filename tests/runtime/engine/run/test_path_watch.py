"""Links whose path is dead break for whoever waits for them, and for nobody else."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

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


@dataclass
class Kernel:
    """What it says of every path, and which it has been asked to probe no more."""

    silence: float = 0.0
    rests: list[int] = field(default_factory=list)

    def measure(self, descriptor: int, probe_after: float) -> float:
        return self.silence


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(path_watch, "measure_silence", made.measure)
    monkeypatch.setattr(path_watch, "stop_probing", made.rests.append)
    return made


def wait(scene: Scene) -> float:
    """A task waits for the link; when that began."""
    scene.used = {scene.link: 1}
    scene.turn(0.0)
    return scene.links.next_deadline - TIMEOUT / 4


def test_a_link_that_a_task_waits_for_breaks_when_its_peers_host_answers_no_more(scene: Scene, kernel: Kernel) -> None:
    began = wait(scene)
    assert 0 <= time.monotonic() - began < TIMEOUT / 4
    kernel.silence = 3600.0  # nothing was sent for an hour, and what is sent now has no answer yet
    scene.links.on_timer(began + TIMEOUT / 4 - 0.1)  # it is early
    for seconds in (2.0, 4.0, 6.0, 7.9):
        scene.links.on_timer(began + seconds)
        assert not scene.broken
    scene.links.on_timer(began + 10.0)
    (error,) = scene.broken
    assert isinstance(error, LinkRefused) and error.peer == 1, "nobody is taken for lost"
    assert "has not answered for 10.0 s: the network between them is down" in str(error)
    scene.links.on_timer(began + 20.0)
    assert len(scene.broken) == 1, "it is said once"


def test_an_answer_at_any_look_begins_the_count_anew(scene: Scene, kernel: Kernel) -> None:
    began = wait(scene)
    kernel.silence = 3600.0
    scene.links.on_timer(began + 6.0)
    kernel.silence = 0.0
    scene.links.on_timer(began + 8.0)
    kernel.silence = 3600.0
    scene.links.on_timer(began + 15.0)
    assert not scene.broken
    scene.links.on_timer(began + 17.0)
    assert scene.broken


def test_a_silence_that_is_shorter_than_the_wait_counts(scene: Scene, kernel: Kernel) -> None:
    began = wait(scene)
    kernel.silence = TIMEOUT - 0.1
    scene.links.on_timer(began + 60.0)
    assert not scene.broken


def test_a_path_is_probed_no_more_when_nobody_waits(scene: Scene, kernel: Kernel) -> None:
    began = wait(scene)
    scene.links.on_timer(began + 2.0)
    assert not kernel.rests
    scene.used = {}
    scene.turn(0.0)
    assert kernel.rests == [scene.link.stream.fileno()]


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
