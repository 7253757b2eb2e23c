"""A rank that fails while it rejoins or splits its group keeps nobody waiting, and can go on with the others."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import pytest
from tests.e2e.faults.planting import STRIDE, Line, OnLine, Plant, Planted, find_position, name_line, watch

import collectived as cd

JOIN_SECONDS = 1.0
SOON = cd.CommunicationOptions(timeout_seconds=7)  # less than the worker waits for a client that does not come
PAIRS = 4  # play side by side
PROCESS_ERRORS = (OSError, MemoryError, KeyboardInterrupt, Planted)


class Pair:
    """Two ranks of a group, each in a session of its own."""

    def __init__(self, cluster: Any, name: str) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.sessions = [cd.connect(cluster.address_of(rank, 2)) for rank in range(2)]
        self.groups: list[cd.Group] = self.both(
            lambda rank: self.sessions[rank].join(name, 2, rank=rank, timeout=20, options=SOON)
        )

    def both(self, act: Callable[[int], Any]) -> list[Any]:
        acting = [self.pool.submit(act, rank) for rank in range(2)]
        for one in as_completed(acting, 25):
            one.result()  # the first error is the cause of the other
        return [one.result() for one in acting]

    def rejoin(self) -> None:
        """Both together; neither is in the way of the other, whatever has happened before."""

        def enter(rank: int) -> Any:
            while True:  # once more where the other one has just given an earlier join up, and was lost by that
                self.groups[rank].rejoin(timeout=20)
                with contextlib.suppress(cd.errors.UnavailableError, cd.errors.AbortedError):
                    return self.groups[rank].all_reduce("sum", 1.0)

        assert self.both(enter) == [2.0, 2.0]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.pool.shutdown()


def add(group: cd.Group) -> Any:
    """The sum of a group of two, or its error, which is not that time has run out."""
    try:
        return group.all_reduce("sum", 1.0)
    except cd.errors.CollectiveError as error:
        assert not isinstance(error, cd.errors.DeadlineExceededError), error
        return error


def rejoin(pair: Pair, on_line: OnLine) -> None:
    """Rank 1 may fail; then rank 0 waits for it as for one that does not come, or hears that it was there."""

    def act(rank: int) -> Any:
        group = pair.groups[rank]
        try:
            if rank:
                watch(lambda: group.rejoin(timeout=JOIN_SECONDS), on_line)
            else:
                group.rejoin(timeout=JOIN_SECONDS)
        except (*PROCESS_ERRORS, cd.errors.CollectiveError) as error:
            return error
        return add(group)

    first, second = pair.both(act)
    assert (first == 2.0) == (second == 2.0), (first, second)
    if first != 2.0:
        pair.rejoin()


def split(pair: Pair, on_line: OnLine) -> None:
    """Rank 1 may fail; rank 0 hears of it soon, and the group has ended for both, or for neither."""

    def act(rank: int) -> Any:
        group = pair.groups[rank]
        before, found = find_position(group), None
        try:
            part = watch(lambda: group.split(0), on_line) if rank else group.split(0)
        except PROCESS_ERRORS:
            part = group.split(0) if find_position(group) == before else None  # it is where it was
        except cd.errors.CollectiveError as error:
            assert not isinstance(error, cd.errors.DeadlineExceededError), error
            part = None
        if part is not None:
            found = add(part)
            part.leave()
        return found, add(group)

    (first, whole), (second, other) = pair.both(act)
    assert (first == 2.0) == (second == 2.0), (first, second)
    assert (whole == 2.0) == (other == 2.0), (whole, other)
    if whole != 2.0:
        pair.rejoin()


CELLS = [
    pytest.param(act, workers, transport, id=f"{act.__name__}, {workers}, {transport or 'shared memory'}")
    for number, (act, workers, transport) in enumerate(
        itertools.product((rejoin, split), ("one_worker", "two_workers"), ("", "grpc"))
    )
    if STRIDE == 1 or number in (0, 3, 5, 6)  # `make test` plays each of both with each worker and transport once
]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("act", "workers", "transport"), CELLS, indirect=["transport"])
def test_an_error_at_a_line_keeps_nobody_waiting(
    request: pytest.FixtureRequest, workers: str, transport: str, act: Callable[[Pair, OnLine], None]
) -> None:
    """At every STRIDE-th line that it comes to; COLLECTIVED_TEST_STRIDE=1 (`make test-lines`): at each."""
    cluster = request.getfixturevalue(workers)
    numbers, own = itertools.count(), threading.local()
    pairs: list[Pair] = []

    def get_pair() -> Pair:
        if not hasattr(own, "pair"):
            own.pair = Pair(cluster, f"{request.node.name}-{next(numbers)}")
            pairs.append(own.pair)
        pair: Pair = own.pair
        return pair

    lines: dict[Line, None] = {}
    act(get_pair(), lambda frame, line: lines.setdefault((frame.f_code, line)))
    assert len(lines) > 100

    def fail(number: int, at: Line) -> None:
        try:
            act(get_pair(), Plant(at, PROCESS_ERRORS[number // STRIDE % 4]("planted")))
        except BaseException as error:
            raise AssertionError(name_line(at)) from error

    with ThreadPoolExecutor(PAIRS) as pool:
        for failing in [pool.submit(fail, *one) for one in list(enumerate(lines))[::STRIDE]]:
            failing.result(500)
    for pair in pairs:
        pair.close()
    gc.collect()  # closes what was just being opened, and warns of it


AMID_A_SPLIT = """
import sys, collectived as cd, numpy as np
session = cd.connect()
group = session.join()
group.all_gather(np.array([[0, 0, 1]]))  # as a split begins
print("there", flush=True)
sys.stdin.readline()
END
"""


@pytest.mark.parametrize("transport", ["", "grpc"], indirect=True)
@pytest.mark.parametrize(
    ("ends", "told"),
    [("os.kill(os.getpid(), 9)", cd.errors.UnavailableError), ("group.abort('enough')", cd.errors.AbortedError)],
    ids=["is killed", "aborts"],
)
def test_a_rank_that_ends_amid_a_split_is_not_waited_for(
    two_workers: Any, request: pytest.FixtureRequest, transport: str, ends: str, told: type[cd.errors.CollectiveError]
) -> None:
    """Without a deadline, and with the verdict of the group that is split on each rank that waits for its part."""
    name = request.node.name
    program = AMID_A_SPLIT.replace("END", f"import os\n{ends}\nsys.stdin.readline()")
    other = two_workers.client(2, 3, name, program)
    try:

        def wait_for_the_part(rank: int) -> Any:
            with cd.connect(two_workers.address_of(rank, 3)) as session:
                group = session.join(name, 3, rank=rank, timeout=20)
                with pytest.raises(told) as caught:
                    group.split(0)
                with pytest.raises(told) as again:
                    group.barrier()
                assert again.value.verdict == caught.value.verdict and caught.value.rejoin
                return [member.rank for member in caught.value.missing]

        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(wait_for_the_part, rank) for rank in range(2)]
            assert other.stdout.readline() == "there\n"
            time.sleep(0.2)  # until they wait
            other.stdin.write("\n")
            other.stdin.flush()
            assert [one.result(10) for one in waiting] == [[2], [2]]
    finally:
        other.kill()
        other.communicate()
