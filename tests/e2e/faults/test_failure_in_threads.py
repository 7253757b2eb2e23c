"""What fails in a thread of the library's own is told to the callers, and leaves nobody waiting or a step behind."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import pytest
from tests.e2e.faults.collective_scenes import SOON, Array, own_share
from tests.e2e.faults.planting import STRIDE, Line, Plant, Planted, name_line, watch_threads

import collectived as cd

# The last resort of a thread, which hands on whatever has happened in it.
LAST_RESORTS = (
    *("RpcThread._run", "RpcThread._cancel", "_explain", "Submission._run", "Describer._run", "RankChannel._watch"),
    *("RankChannel._on_own_failure", "Callbacks._wait_loop", "Callbacks._dispatch_loop", "Callbacks._run_due"),
    "call_back",
)


def reduce_later(group: cd.Group, value: Array) -> Any:
    return group.all_reduce("sum", value, async_op=True).result()[0]


def call_back(group: cd.Group, value: Array) -> Any:
    """Nobody waits for it but the library."""
    ended = threading.Event()
    work = group.all_gather(value, async_op=True)
    work.add_done_callback(lambda _: ended.set())
    assert ended.wait(20), "nobody has called back"
    return work.result()[0] + work.result()[-1]


def receive_later(group: cd.Group, value: Array) -> Any:
    if group.rank == 0:
        sent = group.send(value, 1, async_op=True)
        return own_share(group, value) if sent.result() is None else 0.0
    ended = threading.Event()
    work = group.recv(async_op=True)
    work.add_done_callback(lambda _: ended.set())
    assert ended.wait(20), "nobody has called back"
    return work.result()[0] * 3


def join_again(group: cd.Group, value: Array) -> Any:
    group.rejoin(timeout=2)
    return group.all_reduce("sum", value)[0]


SCENES = {
    "sum": lambda group, value: group.all_reduce("sum", value)[0],
    "asynchronous sum": reduce_later,
    "callback": call_back,
    "receive": receive_later,
    "rejoin": join_again,
}


class Ranks:
    """Two ranks of a group, each in a session of its own."""

    def __init__(self, cluster: Any, pool: ThreadPoolExecutor, name: str) -> None:
        self._pool, self._lengths = pool, itertools.count(1)
        self.sessions = [cd.connect(cluster.address_of(rank, 2)) for rank in range(2)]
        self.groups: list[cd.Group] = self.both(
            lambda rank: self.sessions[rank].join(name, 2, rank=rank, timeout=20, options=SOON)
        )

    def both(self, act: Callable[[int], Any]) -> list[Any]:
        acting = [self._pool.submit(act, rank) for rank in range(2)]
        for one in as_completed(acting, 40):
            one.result()
        return [one.result() for one in acting]

    def play(self, scene: Callable[[cd.Group, Array], Any]) -> None:
        """Three steps, amid which something may fail; no result may be of different steps."""
        length = 2 * next(self._lengths)

        def step(rank: int, number: int, played: Callable[[cd.Group, Array], Any]) -> Any:
            try:
                return played(self.groups[rank], np.full(length, 10.0**number * (rank + 1))) / 10**number
            except cd.errors.DeadlineExceededError as error:
                assert scene is join_again and error.verdict is None, error  # for one that does not come
                return error
            except cd.errors.CollectiveError as error:
                assert not isinstance(error, cd.errors.InvalidArgumentError), error
                return error

        def act(rank: int) -> list[Any]:
            return [step(rank, 0, scene), step(rank, 1, SCENES["sum"]), step(rank, 2, SCENES["sum"])]

        told = self.both(act)
        assert all(isinstance(one, cd.errors.CollectiveError) or one == 3.0 for one in [*told[0], *told[1]]), told
        failed = [isinstance(of_rank[-1], cd.errors.CollectiveError) for of_rank in told]
        assert failed[0] == failed[1], told
        if failed[0]:
            self.both(self._recover)

    def _recover(self, rank: int) -> None:
        while True:  # once more where the other one has just given an earlier join up, and was lost by that
            self.groups[rank].rejoin(timeout=20)
            with contextlib.suppress(cd.errors.UnavailableError, cd.errors.AbortedError):
                self.groups[rank].all_reduce("sum", 1.0)
                return

    def close(self) -> None:
        for session in self.sessions:
            session.close()


COUNTS = {1: "one worker", 2: "two workers"}
CELLS = [
    pytest.param(workers, transport, scene, id=f"{scene}, {COUNTS[workers]}, {transport or 'shared memory'}")
    for workers, transport in ((1, ""), (2, "grpc"), (2, ""))
    for scene in SCENES
    if workers == 1 or transport or STRIDE == 1
]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("workers", "transport", "scene"), CELLS, indirect=["transport"])
def test_an_error_at_any_line_of_a_thread_is_told_to_its_callers(
    grown: Any, request: pytest.FixtureRequest, workers: int, transport: str, scene: str
) -> None:
    """At every STRIDE-th line, of whichever rank comes there first; COLLECTIVED_TEST_STRIDE=1: at each."""
    with ThreadPoolExecutor(2) as pool:
        ranks = Ranks(grown(workers), pool, request.node.name)
        lines: dict[Line, None] = {}
        for _ in range(3):
            with watch_threads(lambda frame, line: lines.setdefault((frame.f_code, line))):
                ranks.play(SCENES[scene])
        left = [line for line in lines if line[0].co_qualname not in LAST_RESORTS]
        for at, kind in zip(left[::STRIDE], itertools.cycle((OSError, MemoryError, Planted))):
            try:
                with watch_threads(Plant(at, kind("planted"))):
                    ranks.play(SCENES[scene])
            except Exception as error:
                pytest.fail(f"{kind.__name__} planted at {name_line(at)}: {error!r}", pytrace=False)
        ranks.close()
