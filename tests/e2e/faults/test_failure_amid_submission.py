"""What fails in a rank's own process amid a collective never leaves it a step behind the others."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectived as cd
from collectived.shared.segment_channel import SegmentChannel

SOON = cd.CommunicationOptions(timeout_seconds=10)
OURS = ("/collectived/", "/collectived_proto/")
STRIDE = int(os.environ.get("COLLECTIVED_TEST_STRIDE", "9"))
LATE_SECONDS = 0.04  # for which a rank is kept waiting: longer than the core waits before it hands a call back
TRIES = 5  # at a line to which a step does not come each time

# Where no error can be planted, and why; at every other line to which a step comes one is.
ASSIGNMENTS = {  # that allocate nothing; and finalizers, out of which no error comes
    f"{name}.{method}" for name in ("InputSlot", "MappedResult", "Block") for method in ("__init__", "__del__")
}
HARMLESS = (
    "try:",  # no instruction
    "if held:",  # a local name is looked at, on the way to what releases a lock
    "self._lock.release()",  # one call, that an error cannot come before
)
# Where no line is left out: what is read is lost with an error there, and other threads may wait for this one.
READING = ("LeaderFollower.lead", "LeaderFollower._resign", "Doorbell._read", "Doorbell._receive", "receive")
Line = tuple[CodeType, int]
OnLine = Callable[[FrameType, int], None]


class Planted(Exception):
    """Stands for a defect of the library."""


def is_ours(frame: FrameType) -> bool:
    code = frame.f_code
    return any(part in code.co_filename for part in OURS) and code.co_qualname not in ASSIGNMENTS


def watch(act: Callable[[], Any], on_line: OnLine) -> Any:
    """Runs `act`; `on_line` is told of every line of ours that it comes to, and may raise there.

    Not where nothing can go wrong: at `try:`, which is no instruction, at the end of a `with` and where else a lock is
    released, which is one call that an error cannot come before.
    """

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not is_ours(frame):
            return None
        entered: dict[int, int] = {}

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                entered[frame.f_lineno] = entered.get(frame.f_lineno, 0) + 1
                leaves = text.startswith("with ") and not entered[frame.f_lineno] % 2
                if text not in HARMLESS and not leaves:
                    on_line(frame, frame.f_lineno)
            return line

        return line

    sys.settrace(trace)
    try:
        return act()
    finally:
        sys.settrace(None)


class Scene(NamedTuple):
    """A collective of rank 1 amid which an error is planted.

    Attributes:
        is_first: whether it is the first that its session has ever submitted.
        earlier: how many times the same has been submitted before in this generation.
        late: for how many seconds rank 0 keeps it waiting.
        beyond: the scene whose lines are left out here, for there they are reached sooner.
    """

    submit: Callable[[cd.Group, Any], Any]
    is_first: bool = False
    earlier: int = 0
    late: float = 0.0
    beyond: str = ""


WITH_OPTIONS = Scene(lambda group, value: group.all_reduce("sum", value, SOON))
SCENES = {
    "of a new shape": WITH_OPTIONS,
    "the first of a session": WITH_OPTIONS._replace(is_first=True, beyond="of a new shape"),
    "that waits": WITH_OPTIONS._replace(late=LATE_SECONDS, beyond="of a new shape"),
    "repeated": Scene(lambda group, value: group.all_reduce("sum", value), earlier=1),
    "asynchronous": Scene(lambda group, value: group.all_reduce("sum", value, async_op=True).result()),
}
SCENES["repeated, that waits"] = SCENES["repeated"]._replace(late=LATE_SECONDS, beyond="repeated")


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
        return [future.result(25) for future in [self._pool.submit(act, rank) for rank in range(2)]]

    def inject(self, scene: Scene, on_line: OnLine) -> None:
        """Steps, one of which fails on rank 1, and one more; no sum may be of different steps."""
        length = next(self._lengths)  # a new one: the first of these steps is prepared too
        is_over = threading.Event()

        def step(rank: int, number: int) -> Any:
            value = np.full(length, 10.0**number * (rank + 1))
            try:
                return scene.submit(self.groups[rank], value)[0] / 10**number
            except cd.errors.CollectiveError as error:
                assert not isinstance(error, cd.errors.DeadlineExceededError), error
                return error

        def steps(rank: int) -> list[Any]:
            found = [step(rank, number) for number in range(scene.earlier)]
            if rank == 0:
                is_over.wait(scene.late)
                return [*found, step(0, scene.earlier), step(0, scene.earlier + 1)]
            before = self._position()
            try:
                found.append(watch(lambda: step(1, scene.earlier), on_line))
            except (OSError, MemoryError, Planted, KeyboardInterrupt):
                if self._position() == before:
                    is_over.set()
                    found.append(step(1, scene.earlier))  # it is where it was
            is_over.set()
            return [*found, step(1, scene.earlier + 1)]

        first, second = self.both(steps)
        outcomes = [*first, *second]
        assert all(isinstance(one, cd.errors.CollectiveError) or one == 3.0 for one in outcomes), outcomes
        failed = [isinstance(told[-1], cd.errors.CollectiveError) for told in (first, second)]
        assert failed[0] == failed[1], outcomes
        if failed[0]:
            self.both(lambda rank: self.groups[rank].rejoin(timeout=10))

    def _position(self) -> Any:
        """Where rank 1 stands: its generation, how that has ended, and the number of its next instance."""
        channel = self.groups[1]._channel
        if isinstance(channel, SegmentChannel):
            channel._count_instances()  # what completes at once is not counted one by one
        state = channel.rank_state
        return state.generation, state.verdict, state.next_instance

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


def find_lines(play: Callable[[OnLine], None]) -> dict[Line, bool]:
    """The lines to which a scene comes, and whether each time."""
    counts: Counter[Line] = Counter()
    for _ in range(3):
        lines: dict[Line, None] = {}
        play(lambda frame, number: lines.setdefault((frame.f_code, number)))  # noqa: B023
        counts.update(list(lines))
    return {line: count == 3 for line, count in counts.items()}


CELLS = [
    pytest.param(workers, transport, scene, id=f"{scene}, {count}, {transport or 'shared memory'}")
    for workers, count in ((1, "one worker"), (2, "two workers"))
    for transport in ("", "grpc")
    for scene, played in SCENES.items()
    if not played.late or (workers, transport) == (1, "")  # elsewhere a rank that waits comes to no other line
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
        lines = find_lines(lambda on_line: play(played, on_line))
        elsewhere = find_lines(lambda on_line: play(SCENES[played.beyond], on_line)) if played.beyond else {}
        assert len(lines) > 50
        left = [line for line in lines if not elsewhere.get(line)]
        chosen = [at for number, at in enumerate(left) if not number % STRIDE or at[0].co_qualname in READING]
        missed = []
        for at, kind in zip(chosen, itertools.cycle((OSError, MemoryError, KeyboardInterrupt, Planted))):
            planted: list[BaseException] = [kind("planted")]

            def plant(frame: FrameType, number: int) -> None:
                if (frame.f_code, number) == at and planted:  # noqa: B023
                    raise planted.pop()  # noqa: B023

            try:
                for _ in range(TRIES):
                    if planted:
                        play(played, plant)
            except Exception as error:
                pytest.fail(f"{kind.__name__} planted at {name_line(at)}: {error!r}", pytrace=False)
            if planted and lines[at]:
                missed.append(name_line(at))
    assert missed == []


def name_line(line: Line) -> str:
    code, number = line
    return f"{code.co_filename}:{number}, in {code.co_qualname}"
