"""A rank that fails while it enters a group, which is complete by then, keeps nobody waiting."""

from __future__ import annotations

import contextlib
import errno
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
from tests.e2e.faults.planting import STRIDE, Line, Plant, Planted, name_line, watch

import collectived as cd

NO_DESCRIPTOR = OSError(errno.EMFILE, "too many open files")
TYPED = cd.errors.ResourceExhaustedError
JOIN_SECONDS = 3.0
SOON_SECONDS = 7.0  # less than the worker waits for a client that does not come, which is 10


def fail_in(function: str, error: BaseException) -> Any:
    """A trace function by which the first line of that function of ours raises."""

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            sys.settrace(None)
            raise error
        return line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        return line if code.co_qualname == function and "/collectived" in code.co_filename else None

    return trace


@pytest.mark.parametrize("transport", ["", "grpc"], indirect=True)
@pytest.mark.parametrize(
    ("function", "error", "raised"),
    (
        ("PreparedCallCache.__init__", NO_DESCRIPTOR, TYPED),
        ("Group.__init__", MemoryError(), TYPED),
        ("Session._register_group", KeyboardInterrupt(), KeyboardInterrupt),
    ),
)
def test_a_rank_that_cannot_enter_gives_its_place_up(
    one_worker: Any, request: pytest.FixtureRequest, transport: str, function: str, error: Any, raised: Any
) -> None:
    worker, name = one_worker.addresses[0], request.node.name
    with ThreadPoolExecutor(1) as pool, cd.connect(worker) as session, cd.connect(worker) as failing:

        def wait_for_the_other() -> None:
            with session.join(name, 2, rank=0, timeout=20) as group:
                group.all_reduce("sum", 1.0, cd.CommunicationOptions(timeout_seconds=30))

        waiting = pool.submit(wait_for_the_other)
        sys.settrace(fail_in(function, error))
        try:
            with pytest.raises(raised) as caught:
                failing.join(name, 2, rank=1, timeout=20)
        finally:
            sys.settrace(None)
        assert error is not NO_DESCRIPTOR or "RLIMIT_NOFILE" in str(caught.value)
        with pytest.raises((cd.errors.UnavailableError, cd.errors.AbortedError)) as told:
            waiting.result(25)  # while the session of the one that failed goes on
        assert [member.rank for member in told.value.missing] == [1]
        again = pool.submit(lambda: session.join(name, 2, rank=0, timeout=20))
        assert failing.join(name, 2, rank=1, timeout=20).generation == again.result(20).generation


def join_amid(cluster: Any, name: str, on_line: Callable[[FrameType, int], None]) -> BaseException | None:
    """Two ranks join and sum; a line of the join of rank 1 may raise. Then rank 0 hears of it, or all goes well.

    Returns:
        What the join of rank 1 raised.
    """
    with (
        ThreadPoolExecutor(1) as pool,
        cd.connect(cluster.addresses[0]) as waiting,
        cd.connect(cluster.addresses[-1]) as failing,
    ):

        def wait_for_the_other() -> bool:
            try:
                group = waiting.join(name, 2, rank=0, timeout=JOIN_SECONDS)
            except cd.errors.DeadlineExceededError:
                return False  # the other one failed before its worker knew
            try:
                return bool(group.all_reduce("sum", 1.0, timeout=SOON_SECONDS) == 2.0)
            except cd.errors.DeadlineExceededError as error:
                raise AssertionError("nobody told it") from error
            except cd.errors.CollectiveError:
                return False

        told = pool.submit(wait_for_the_other)
        group, raised = None, None
        try:
            group = watch(lambda: failing.join(name, 2, rank=1, timeout=JOIN_SECONDS), on_line)
        except (OSError, MemoryError, Planted, KeyboardInterrupt, cd.errors.CollectiveError) as error:
            raised = error
        if group is not None:
            with contextlib.suppress(cd.errors.CollectiveError):
                group.all_reduce("sum", 1.0, timeout=SOON_SECONDS)
        told.result(25)
        return raised


@pytest.mark.timeout(500)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", ["one_worker", "two_workers"])
@pytest.mark.parametrize("transport", ["", "grpc"], indirect=True)
def test_an_error_at_a_line_of_a_join_keeps_nobody_waiting(request: Any, workers: str, transport: str) -> None:
    """At every STRIDE-th line that a join comes to; COLLECTIVED_TEST_STRIDE=1 (`make test-lines`): at each."""
    cluster = request.getfixturevalue(workers)
    lines: dict[Line, None] = {}

    def record(frame: FrameType, line: int) -> None:
        lines.setdefault((frame.f_code, line))

    join_amid(cluster, f"{request.node.name}-all", record)
    assert len(lines) > 100
    asked = [code.co_qualname for code, _ in lines].index("WorkerClient.join")  # before that its own arguments fail it

    def fail(number: int, at: Line) -> None:
        plant = Plant(at, (OSError, MemoryError, KeyboardInterrupt, Planted)[number // STRIDE % 4]("planted"))
        try:
            raised = join_amid(cluster, f"{request.node.name}-{number}", plant)
        except BaseException as error:
            raise AssertionError(name_line(at)) from error
        is_typed = not isinstance(raised, (OSError, MemoryError))
        assert is_typed or number < asked, f"{raised!r} at {name_line(at)}"

    with ThreadPoolExecutor(4) as pool:
        for failing in [pool.submit(fail, *one) for one in list(enumerate(lines))[::STRIDE]]:
            failing.result(400)
    gc.collect()  # closes what was just being opened, and warns of it


CRAMPED = """
import resource, sys, collectived as cd
with cd.connect() as session:
    most = 1 << 30  # less than the segment of a group needs, with room for letters
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        session.join()
    except cd.errors.CollectiveError as error:
        print(type(error).__name__, error, flush=True)
    sys.stdin.readline()  # the others are told although its session goes on
"""


def test_a_rank_that_has_no_room_for_the_segment_says_so(one_worker: Any, request: pytest.FixtureRequest) -> None:
    cramped = one_worker.client(1, 2, request.node.name, CRAMPED)
    try:
        with (
            pytest.raises(cd.errors.ResourceExhaustedError) as told,
            cd.connect(one_worker.addresses[0]) as session,
            session.join(request.node.name, 2, rank=0, timeout=20) as group,
        ):
            group.barrier(timeout=20)
        assert [member.rank for member in told.value.missing] == [1]
        said = cramped.stdout.readline()
        assert said.startswith("ResourceExhaustedError") and "Cannot allocate memory" in said
    finally:
        cramped.kill()
        cramped.communicate()
