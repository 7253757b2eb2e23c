"""What fails in a rank's own process amid a collective never leaves it a step behind the others."""

from __future__ import annotations

import itertools
import linecache
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import collectived as cd

SOON = cd.CommunicationOptions(timeout_seconds=10)
OURS = ("/collectived/", "/collectived_proto/")
ASSIGNMENTS = {  # that allocate nothing, and finalizers
    f"{name}.{method}" for name in ("InputSlot", "MappedResult", "Block") for method in ("__init__", "__del__")
}
HARMLESS = ("try:", "if held:", "self._lock.release()")
Line = tuple[CodeType, int]


class Planted(Exception):
    """Stands for a defect of the library."""


def is_ours(frame: FrameType) -> bool:
    code = frame.f_code
    return any(part in code.co_filename for part in OURS) and code.co_qualname not in ASSIGNMENTS


def watch(act: Callable[[], Any], on_line: Callable[[FrameType, int], None]) -> Any:
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


class Ranks:
    """Two ranks of a group, each in a thread and session of its own, which join again when a generation is over."""

    def __init__(self, cluster: Any, pool: ThreadPoolExecutor, name: str) -> None:
        self._pool = pool
        self.sessions = [cd.connect(cluster.addresses[0]) for _ in range(2)]
        self.groups: list[cd.Group] = self.both(lambda rank: self.sessions[rank].join(name, 2, rank=rank, timeout=20))
        self._lengths = itertools.count(1)

    def both(self, act: Callable[[int], Any]) -> list[Any]:
        return [future.result(25) for future in [self._pool.submit(act, rank) for rank in range(2)]]

    def inject(self, on_line: Callable[[FrameType, int], None]) -> None:
        """Two steps, the first of which fails on rank 1; no sum may be of different steps."""
        length = next(self._lengths)  # a new one: every step is prepared too

        def step(rank: int, number: int) -> Any:
            value = np.full(length, 10.0**number * (rank + 1))
            try:
                return self.groups[rank].all_reduce("sum", value, SOON)[0] / 10**number
            except cd.errors.CollectiveError as error:
                assert not isinstance(error, cd.errors.DeadlineExceededError), error
                return error

        def steps(rank: int) -> list[Any]:
            if rank == 0:
                return [step(0, 1), step(0, 2)]
            state = self.groups[1]._channel.rank_state
            before = state.generation, state.next_instance
            try:
                found = [watch(lambda: step(1, 1), on_line)]
            except (OSError, MemoryError, Planted, KeyboardInterrupt):
                found = []
                if (state.generation, state.next_instance) == before and state.verdict is None:
                    found = [step(1, 1)]  # it is where it was
            return [*found, step(1, 2)]

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


@pytest.fixture
def ranks(one_worker: Any, request: pytest.FixtureRequest) -> Any:
    with ThreadPoolExecutor(2) as pool:
        made = Ranks(one_worker, pool, request.node.name)
        yield made
        made.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["", "grpc"], indirect=True)
def test_an_error_at_any_line_of_a_collective_shifts_no_sum(ranks: Ranks, transport: str) -> None:
    lines: dict[Line, None] = {}
    for _ in range(3):
        ranks.inject(lambda frame, number: lines.setdefault((frame.f_code, number)))
    kinds = itertools.cycle((OSError, MemoryError, KeyboardInterrupt, Planted))
    injected = set()
    for at in lines:
        left: list[BaseException] = [next(kinds)("planted")]

        def plant(frame: FrameType, number: int) -> None:
            if (frame.f_code, number) == at and left:  # noqa: B023
                injected.add(at)  # noqa: B023
                raise left.pop()  # noqa: B023

        try:
            ranks.inject(plant)
        except Exception as error:
            pytest.fail(f"planted at {at[0].co_filename}:{at[1]}, in {at[0].co_qualname}: {error!r}", pytrace=False)
    names = {code.co_qualname.rpartition(".")[2] for code, _ in injected}
    numbering = {"_register", "take_number"} if transport else {"make_buffers"}
    assert names >= {"_start", "_submit_value", "_submit", "submit", "_try_submit", "wait"} | numbering
    assert len(injected) > 0.75 * len(lines), "the others belong to a session's first call"
