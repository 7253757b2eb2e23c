"""What fails in a rank's own process amid a collective never leaves it a step behind the others."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.e2e.faults.collective_scenes import AGAIN, OTHERS, SCENES, SOON, WITH_OPTIONS, Scene
from tests.e2e.faults.planting import (
    READING,
    STRIDE,
    Line,
    OnLine,
    Plant,
    Planted,
    find_lines,
    find_position,
    name_line,
    watch,
)

import collectived as cd

TRIES = 20  # at a line to which a step does not come each time


class Ranks:
    """Two ranks of a group, each in a thread and session of its own, which join again when a generation is over."""

    def __init__(self, cluster: Any, pool: ThreadPoolExecutor, name: str) -> None:
        self._pool = pool
        self.sessions = [cd.connect(cluster.address_of(rank, 2)) for rank in range(2)]
        self.groups: list[cd.Group] = self.both(
            lambda rank: self.sessions[rank].join(name, 2, rank=rank, timeout=20, options=SOON)
        )
        self._lengths = itertools.count(1)

    def both(self, act: Callable[[int], Any]) -> list[Any]:
        acting = [self._pool.submit(act, rank) for rank in range(2)]
        for one in as_completed(acting, 25):
            one.result()  # the first error is the cause of the other
        return [one.result() for one in acting]

    def inject(self, scene: Scene, on_line: OnLine) -> None:
        """Steps, one of which fails on rank 1, one more, and a sum; no result may be of different steps."""
        length = 2 * next(self._lengths)  # a new one: the first of these steps is prepared too
        is_over = threading.Event()

        def step(rank: int, number: int, played: Scene = scene) -> Any:
            value = np.full(length, 10.0**number * (rank + 1))
            try:
                return played.submit(self.groups[rank], value) / 10**number
            except cd.errors.CollectiveError as error:
                assert not isinstance(error, (cd.errors.DeadlineExceededError, cd.errors.InvalidArgumentError)), error
                return error

        def steps(rank: int) -> list[Any]:
            found = [step(rank, number) for number in range(scene.earlier)]
            if rank == 0:
                is_over.wait(scene.late)
                found.append(step(0, scene.earlier))
            else:
                before = find_position(self.groups[1])
                try:
                    found.append(watch(lambda: step(1, scene.earlier), on_line))
                except (OSError, MemoryError, Planted, KeyboardInterrupt):
                    is_where_it_was = find_position(self.groups[1]) == before
                    is_over.set()
                    if is_where_it_was or not scene.is_async:
                        found.append(step(1, scene.earlier))  # as whoever catches an error does
                        assert is_where_it_was or isinstance(found[-1], cd.errors.CollectiveError), found
                is_over.set()
            # With the sum, for which all wait, the same is known to all.
            return [*found, step(rank, scene.earlier + 1), step(rank, scene.earlier + 2, WITH_OPTIONS)]

        first, second = self.both(steps)
        outcomes = [*first, *second]
        assert all(isinstance(one, cd.errors.CollectiveError) or one == 3.0 for one in outcomes), outcomes
        failed = [isinstance(told[-1], cd.errors.CollectiveError) for told in (first, second)]
        assert failed[0] == failed[1], outcomes
        if failed[0]:
            self.both(lambda rank: self.groups[rank].rejoin(timeout=10))

    def close(self) -> None:
        for session in self.sessions:
            session.close()


@contextmanager
def stage(cluster: Any, name: str) -> Iterator[Callable[[Scene, OnLine], None]]:
    """Plays a scene in a group that has been used before, or in a fresh session where that matters."""
    numbers = itertools.count()
    with ThreadPoolExecutor(2) as pool:

        def make() -> Ranks:
            return Ranks(cluster, pool, f"{name}-{next(numbers)}")

        kept = make()
        kept.inject(WITH_OPTIONS, lambda *_: None)  # which is the first of its session

        def play(scene: Scene, on_line: OnLine) -> None:
            ranks = make() if scene.is_first else kept
            ranks.inject(scene, on_line)
            if scene.is_first:
                ranks.close()

        yield play
        kept.close()


_found: dict[tuple[int, str, str], dict[Line, bool]] = {}  # lines, of workers, transport and scene

COUNTS = {1: "one worker", 2: "two workers"}
WAYS = [(workers, transport) for workers in COUNTS for transport in ("", "grpc")]


def list_ways(number: int, scene: str) -> list[tuple[int, str]]:
    """Over which workers and transports a scene is played, of which `make test` takes one in turn for most."""
    if SCENES[scene].late:  # elsewhere a rank that waits comes to no other line
        return WAYS[:1]
    is_one_of_many = scene.removesuffix(AGAIN) in OTHERS and STRIDE > 1
    return [WAYS[number % len(WAYS)]] if is_one_of_many else WAYS


CELLS = [
    pytest.param(workers, transport, scene, id=f"{scene}, {COUNTS[workers]}, {transport or 'shared memory'}")
    for number, scene in enumerate(SCENES)
    for workers, transport in list_ways(number, scene)
]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers
@pytest.mark.parametrize(("workers", "transport", "scene"), CELLS, indirect=["transport"])
def test_an_error_at_any_line_of_a_collective_shifts_no_sum(
    grown: Any, request: pytest.FixtureRequest, workers: int, transport: str, scene: str
) -> None:
    """At every STRIDE-th line, each of which is reached; COLLECTIVED_TEST_STRIDE=1: at each."""
    played = SCENES[scene]
    with stage(grown(workers), request.node.name) as play:

        def find(scene: str) -> dict[Line, bool]:
            if (workers, transport, scene) not in _found:
                _found[workers, transport, scene] = find_lines(lambda on_line: play(SCENES[scene], on_line))
            return _found[workers, transport, scene]

        lines = find(scene)
        elsewhere = find(played.beyond) if played.beyond else {}
        assert len(lines) > (20 if not played.earlier else 10)  # of a call that is repeated most is in the core
        left = [line for line in lines if not elsewhere.get(line)]
        chosen = [at for number, at in enumerate(left) if not number % STRIDE or at[0].co_qualname in READING]
        missed = []
        for at, kind in zip(chosen, itertools.cycle((OSError, MemoryError, KeyboardInterrupt, Planted))):
            plant = Plant(at, kind("planted"))
            try:
                for _ in range(TRIES):
                    if not plant.is_planted:
                        play(played, plant)
            except Exception as error:
                pytest.fail(f"{kind.__name__} planted at {name_line(at)}: {error!r}", pytrace=False)
            if not plant.is_planted and lines[at]:
                missed.append(name_line(at))
    assert missed == []
