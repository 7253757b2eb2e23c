"""A thread closes the session while another one waits in it: that one hears so at once, and no other rank minds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.waiting import settle

import collectived as cd
from collectived_proto.types import unscoped_name

PROMPT = 0.1  # seconds
_names = itertools.count()


@pytest.fixture
def pair(one_worker: Any) -> Iterator[Callable[[], tuple[cd.Session, cd.Group, cd.Group]]]:
    """Makes a session of its own, its group, and the same group as the other rank holds it."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:

        def make() -> tuple[cd.Session, cd.Group, cd.Group]:
            name = f"closing-{next(_names)}"
            mine, theirs = (stack.enter_context(cd.connect(one_worker.addresses[0])) for _ in range(2))
            other = pool.submit(theirs.join, name, 2, rank=1, timeout=20)
            return mine, mine.join(name, 2, rank=0, timeout=20), other.result(20)

        yield make


def in_flight(cluster: Any, group: cd.Group) -> bool:
    """Whether something of this group waits in the worker."""
    return any(
        group_loop.in_flight
        for row in cluster.status().workers
        for group_loop in row.lanes
        if group_loop.generation == group.generation
    )


def left(cluster: Any, group: cd.Group) -> list[int]:
    """Ranks that have left this group, as far as the worker knows."""
    same = [known for known in cluster.status().groups if known.generation == group.generation]
    return [member.rank for known in same for member in known.left]


def forming(cluster: Any, name: str) -> bool:
    """Whether somebody waits in a join of that name."""
    return (name, "forming") in [(unscoped_name(group.name), group.state) for group in cluster.status().groups]


def waiting_for_part(cluster: Any, group: cd.Group) -> int:
    """How many ranks wait for a part of this group."""
    known = cluster.status().groups
    return sum(len(one.members) for one in known if one.state == "forming" and f"{group.name}/" in one.name)


async def awaited(work: cd.Work[Any]) -> Any:
    return await work


WAITS: dict[str, Callable[[cd.Session, cd.Group], Any]] = {
    "barrier": lambda _, group: group.barrier(),
    "all_reduce": lambda _, group: group.all_reduce("sum", np.ones(1000), cd.CommunicationOptions(timeout_seconds=30)),
    "recv": lambda _, group: group.recv(1),
    "result": lambda _, group: group.barrier(async_op=True).result(),
    "result within a time": lambda _, group: group.barrier(async_op=True).result(30),
    "exception": lambda _, group: _raise(group.barrier(async_op=True).exception()),
    "wait for several": lambda _, group: cd.wait([group.barrier(async_op=True) for _ in range(3)]),
    "as_completed": lambda _, group: list(group.all_reduce("sum", [1.0], async_op=True).as_completed()),
    "await": lambda _, group: asyncio.run(awaited(group.barrier(async_op=True))),
    "join": lambda session, group: session.join(f"lonely-{group.name}", 2, rank=0),
    "rejoin": lambda _, group: group.rejoin(),
}


def _raise(error: BaseException | None) -> None:
    assert error is not None
    raise error


def closed_amid(cluster: Any, pair: Any, use: str) -> float:
    """Seconds from the beginning of `close` until the thread that waits has its error, which is right."""
    session, group, other = pair()
    heard: list[float] = []
    generation = group.generation

    def wait() -> None:
        try:
            WAITS[use](session, group)
        finally:
            heard.append(time.monotonic())

    with ThreadPoolExecutor(1) as pool:
        waiting: Future[None] = pool.submit(wait)
        if use == "rejoin":
            settle(lambda: forming(cluster, group.name))
        elif use == "join":
            settle(lambda: forming(cluster, f"lonely-{group.name}"))
        elif use == "recv":
            settle(lambda: bool(group._channel._calls))
        else:
            settle(lambda: in_flight(cluster, other))
        began = time.monotonic()
        session.close()
        with pytest.raises(cd.errors.CancelledError, match="the session with worker 0 was closed") as caught:
            waiting.result(10)
    assert caught.value.verdict is None and not caught.value.rejoin
    assert generation == other.generation
    with pytest.raises(cd.errors.FailedPreconditionError, match="has left|is closed"):
        group.barrier()
    return heard[0] - began


@pytest.mark.parametrize("use", WAITS)
def test_a_thread_that_waits_hears_within_a_tenth_of_a_second_that_its_session_was_closed(
    one_worker: Any, pair: Any, use: str, delays: Any
) -> None:
    def close() -> None:
        assert closed_amid(one_worker, pair, use) < PROMPT + delays.room

    delays.hold(close)


def test_what_was_submitted_completes_for_the_others_and_what_comes_then_says_who_has_left(
    one_worker: Any, pair: Any
) -> None:
    session, group, other = pair()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group.all_reduce, "sum", 1.0)
        settle(lambda: in_flight(one_worker, other))
        session.close()
        assert isinstance(waiting.exception(10), cd.errors.CancelledError)
    assert other.all_reduce("sum", 2.0) == 3.0
    with pytest.raises(cd.errors.AbortedError) as caught:
        other.all_reduce("sum", 2.0)
    assert [member.rank for member in caught.value.missing] == [0]


@pytest.mark.parametrize("value", [1.0, None])
def test_whoever_leaves_after_the_other_has_left_hears_of_no_failure(one_worker: Any, pair: Any, value: Any) -> None:
    """None: a rank that takes what comes, whose first tick was the last."""
    session, group, other = pair()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(other.broadcast, value)
        group.broadcast(1.0)
        assert taken.result(10) == 1.0
    group.leave()
    settle(lambda: left(one_worker, other) == [0])
    other.leave()


def test_threads_that_go_on_calling_while_the_session_is_closed_all_come_to_an_end(one_worker: Any, pair: Any) -> None:
    session, group, other = pair()
    going = threading.Barrier(5)

    def call(use: Callable[[], Any]) -> BaseException:
        use()
        going.wait(20)
        try:
            while True:
                use()
        except cd.errors.CollectiveError as error:
            return error

    uses: list[Callable[[], Any]] = [
        lambda: session.empty(1 << 16),
        lambda: session.join("alone", 1).leave(),
        lambda: group.send(1.0, 0, tag=1, async_op=True) and group.recv(0, tag=1),
        lambda: group.send([1.0], 0, tag=2, async_op=True) and group.recv(0, tag=2),
    ]
    with ThreadPoolExecutor(len(uses)) as pool:
        calling = [pool.submit(call, use) for use in uses]
        going.wait(20)
        session.close()
        ended = {type(one.result(10)) for one in calling}
    assert ended <= {cd.errors.CancelledError, cd.errors.FailedPreconditionError}


def test_whoever_waits_for_its_part_hears_that_a_session_was_closed_amid_the_split(
    one_worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"closing-{next(_names)}"
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        sessions = [stack.enter_context(cd.connect(one_worker.addresses[0])) for _ in range(3)]
        joins = [pool.submit(one.join, name, 3, rank=rank, timeout=20) for rank, one in enumerate(sessions)]
        groups = [join.result(20) for join in joins]
        splits = [pool.submit(group.split, 7) for group in groups[:2]]
        groups[2].all_gather(np.array([[7, 0, 1]]))  # as `split` does, and no more: the others wait for this one
        settle(lambda: waiting_for_part(one_worker, groups[0]) == 2)
        sessions[0].close()
        assert isinstance(splits[0].exception(10), cd.errors.CancelledError)
        told = splits[1].exception(10)
        assert isinstance(told, cd.errors.AbortedError) and "was closed during this call" in str(told)
        assert [member.rank for member in told.missing] == [0]
        with pytest.raises(cd.errors.AbortedError):
            groups[2].barrier()
    assert "on leaving group" not in caplog.text


FORMS = [np.ones(3, np.float32), np.ones((2, 2)), np.arange(5)]


def exchange(group: cd.Group, step: int) -> None:
    if group.rank == 0:
        group.send(FORMS[step % 3], 1)
    else:
        group.recv(0)


def spread(group: cd.Group, step: int) -> None:
    group.broadcast(FORMS[step % 3] if group.rank == 0 else None)


def add(group: cd.Group, step: int) -> None:
    group.all_reduce("sum", FORMS[0])


@pytest.mark.parametrize("closes", [0, 1])
@pytest.mark.parametrize("use", [exchange, spread, add])
def test_a_session_is_closed_amid_calls_that_come_again_from_their_line(
    pair: Any, use: Callable[[cd.Group, int], None], closes: int
) -> None:
    """The core runs them, and may be about to look at what has come when its segment is unmapped."""

    def call(group: cd.Group, going: threading.Event) -> BaseException:
        try:
            for step in itertools.count():
                use(group, step)
                if step == 20:  # all lines and forms have come before
                    going.set()
        except cd.errors.CollectiveError as error:
            return error
        raise AssertionError

    for _ in range(5):
        session, group, other = pair()
        groups = (group, other) if closes == 0 else (other, group)
        going = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            calling = [pool.submit(call, one, going) for one in groups]
            assert going.wait(20)
            session.close()
            mine, theirs = (calling[place].result(10) for place in (closes, 1 - closes))
        assert isinstance(mine, (cd.errors.CancelledError, cd.errors.FailedPreconditionError)), mine
        assert isinstance(theirs, (cd.errors.AbortedError, cd.errors.UnavailableError)), theirs


@pytest.mark.parametrize("is_known", [False, True], ids=["the first", "one that comes again"])
@pytest.mark.parametrize("use", [exchange, spread, add])
@pytest.mark.parametrize(
    ("end", "told"),
    [("close", cd.errors.CancelledError), ("leave", cd.errors.FailedPreconditionError)],
)
def test_the_handler_of_a_signal_ends_the_call_that_it_interrupts(
    one_worker: Any, pair: Any, use: Callable[[cd.Group, int], None], is_known: bool, end: str, told: type
) -> None:
    """It runs in the thread that waits, which therefore cannot be waited for."""
    session, group, other = pair()
    handled: list[bool] = []

    def handle(number: int, frame: object) -> None:
        session.close() if end == "close" else group.leave()
        handled.append(True)

    def wait(step: int) -> None:
        if use is add:
            add(group, step)
        else:
            group.recv(1) if use is exchange else group.broadcast(None, 1)

    def answer(step: int) -> None:
        if use is add:
            add(other, step)
        else:
            other.send(FORMS[0], 0) if use is exchange else other.broadcast(FORMS[0], 1)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with ThreadPoolExecutor(1) as pool:
            for step in range(3 if is_known else 0):
                answered = pool.submit(answer, step)
                wait(step)
                answered.result(10)
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # by then it waits
        with pytest.raises(told):
            wait(3)  # its lines are those of `wait` above
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled


@pytest.mark.parametrize("nbytes", [1 << 20, 16 << 20])
def test_a_value_that_is_given_back_does_not_count_for_others(pair: Any, one_worker: Any, nbytes: int) -> None:
    """A call that is cancelled gives its array back at once, although another, behind it, is still in flight."""
    session, group, other = pair()
    value = np.full(nbytes, 5, np.uint8)

    def send() -> None:
        with pytest.raises(cd.errors.CancelledError):
            group.broadcast(value, root=0)
        value[:] = 9  # it is the caller's again

    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(send)
        settle(lambda: in_flight(one_worker, group))
        group.barrier(async_op=True)
        closing = pool.submit(session.close)
        sending.result(20)
        with contextlib.suppress(cd.errors.CollectiveError):
            assert np.all(other.broadcast(np.zeros(nbytes, np.uint8), root=0) == 5)
        with contextlib.suppress(cd.errors.CollectiveError):
            other.barrier()
        closing.result(20)
