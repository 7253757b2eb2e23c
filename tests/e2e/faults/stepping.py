"""Two ranks that take the same steps, amid one of which an error is planted, and whose sums say if one is behind."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.e2e.faults.collective_scenes import SOON, WITH_OPTIONS, Scene
from tests.e2e.faults.planting import READING, STRIDE, Line, OnLine, Plant, Planted, find_position, name_line, watch

import collectived as cd

TRIES = 20  # at a line to which a step does not come each time


class Ranks:
    """Two ranks of a group, each in a thread and session of its own, which join again when a generation is over."""

    def __init__(self, cluster: Any, pool: ThreadPoolExecutor, name: str, device: str | None) -> None:
        self._pool = pool
        self.sessions = [cd.connect(cluster.address_of(rank, 2)) for rank in range(2)]
        self.groups: list[cd.Group] = self.both(
            lambda rank: self.sessions[rank].join(name, 2, rank=rank, device=device, timeout=20, options=SOON)
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
                if error.verdict is None:  # nothing was submitted
                    raise
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
                except (OSError, MemoryError, Planted, KeyboardInterrupt, cd.errors.CollectiveError):
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
def stage(cluster: Any, name: str, device: str | None = None) -> Iterator[Callable[[Scene, OnLine], None]]:
    """Plays a scene in a group that has been used before, or in a fresh session where that matters."""
    numbers = itertools.count()
    with ThreadPoolExecutor(2) as pool:

        def make() -> Ranks:
            return Ranks(cluster, pool, f"{name}-{next(numbers)}", device)

        kept = make()
        kept.inject(WITH_OPTIONS, lambda *_: None)  # which is the first of its session

        def play(scene: Scene, on_line: OnLine) -> None:
            ranks = make() if scene.is_first else kept
            ranks.inject(scene, on_line)
            if scene.is_first:
                ranks.close()

        yield play
        kept.close()


def plant_each(play: Callable[[OnLine], None], lines: Iterable[Line], always: Mapping[Line, bool]) -> list[str]:
    """Play a scene for every STRIDE-th of these lines, with an error there.

    Args:
        always: which lines are come to each time that it is played.

    Returns:
        The lines that were not come to, though they always were.
    """
    chosen = [at for number, at in enumerate(lines) if not number % STRIDE or at[0].co_qualname in READING]
    missed = []
    for at, kind in zip(chosen, itertools.cycle((OSError, MemoryError, KeyboardInterrupt, Planted))):
        plant = Plant(at, kind("planted"))
        try:
            for _ in range(TRIES):
                if not plant.is_planted:
                    play(plant)
        except Exception as error:
            pytest.fail(f"{kind.__name__} planted at {name_line(at)}: {error!r}", pytrace=False)
        if not plant.is_planted and always[at]:
            missed.append(name_line(at))
    return missed
