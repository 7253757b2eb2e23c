"""A rank that fails while it enters a group, which is complete by then, keeps nobody waiting."""

from __future__ import annotations

import errno
import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

import collectived as cd

NO_DESCRIPTOR = OSError(errno.EMFILE, "too many open files")
TYPED = cd.errors.ResourceExhaustedError


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
