"""What goes wrong ends in a typed error that names the culprit, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.forked_process import ForkedProcess
from tests.waiting import settle

import collectived as cd
from collectived.grpc_alone.channel import GrpcChannel
from collectived.shared.segment_call import SegmentCall
from collectived.shared.segment_channel import SegmentChannel
from collectived_proto.types import unscoped_name
from collectived_runtime.engine.failure.reporter import DECIDE_ALONE_SECONDS
from collectived_runtime.transport.pool import MAX_IDLE_SECONDS

JOIN = """
import os, signal, sys, time
import numpy as np
import collectived as cd
session = cd.connect()
group = session.join(timeout=20)
print("joined", flush=True)
"""


def say(client: ForkedProcess, word: str) -> None:
    """Waits until a client has said this."""
    assert client.stdout
    line = client.stdout.readline().strip()
    if line != word:
        client.kill()
        raise AssertionError((line, client.communicate()[1]))


def go_on(client: ForkedProcess) -> None:
    assert client.stdin
    client.stdin.write("\n")
    client.stdin.flush()


def ended(client: ForkedProcess) -> tuple[int, str]:
    """Exit status and what it printed."""
    out, err = client.communicate(timeout=30)
    assert not err or client.returncode < 0, err
    return client.returncode, out


def descriptors(pid: int) -> list[str]:
    """What a process has open that concerns clients: memfds, sockets, process descriptors."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
        if "memfd" in target or "socket" in target or "pidfd" in target:
            found.append(target.split(":")[0])
    return sorted(found)


def held(pid: int) -> Counter[str]:
    """The same, counted, with the shared memory that it has mapped."""
    with open(f"/proc/{pid}/maps") as maps:
        regions = sum("memfd" in line for line in maps)
    return Counter(descriptors(pid)) + Counter(mapped=regions)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("timeout", [0.05, 0.5])
def test_a_rank_that_never_submits_ends_the_others_at_the_deadline_and_is_named(
    two_workers: Any, timeout: float, delays: Any
) -> None:
    def story() -> None:
        over = threading.Barrier(4)

        def body(group: cd.Group) -> Any:
            group.barrier()
            if group.rank == 2:
                over.wait(20)
                with pytest.raises(cd.errors.DeadlineExceededError):  # it comes too late, and hears the same verdict
                    group.all_reduce("sum", np.ones(3))
                return None
            begin = time.monotonic()
            with pytest.raises(cd.errors.DeadlineExceededError) as caught:
                group.all_reduce("sum", np.ones(3), options=cd.CommunicationOptions(timeout_seconds=timeout))
            end = time.monotonic()
            over.wait(20)
            return begin, end, caught.value

        results = two_workers.run(4, body)
        first = min(results[rank][0] for rank in (0, 1, 3))  # whose deadline ends it for all
        for rank in (0, 1, 3):
            begin, end, error = results[rank]
            assert timeout <= end - first
            assert end - begin <= timeout + 0.25 + 0.25 + delays.room  # what is promised, and a busy machine
            missing = [member.rank for member in error.missing]
            assert missing == [2] if timeout > 0.1 + delays.room else 2 in missing  # others may be late as well
            assert all(fact in str(error) for fact in ("rank 2", f"within {timeout} s", "test_typed_errors.py")), str(
                error
            )
            assert error.rejoin and error.code == cd.errors.Code.DEADLINE_EXCEEDED
            assert error.op == "all_reduce(sum)"
            answered = delays.room <= DECIDE_ALONE_SECONDS - 0.02  # who is not decides alone
            assert error.decided_by == "coordinator" or not answered

    delays.hold(story)


@pytest.mark.timeout(150)
def test_the_earliest_deadline_of_any_rank_ends_the_instance_for_all(two_workers: Any, delays: Any) -> None:
    def story() -> None:
        over = threading.Barrier(4)

        def body(group: cd.Group) -> Any:
            begin = time.monotonic()
            if group.rank:
                timeout = 0.3 if group.rank == 3 else 600
                with pytest.raises(cd.errors.DeadlineExceededError, match="within 0.3 s"):
                    group.all_reduce("sum", 1.0, options=cd.CommunicationOptions(timeout_seconds=timeout))
            elapsed = time.monotonic() - begin
            over.wait(20)
            return elapsed

        for elapsed in two_workers.run(4, body)[1:]:
            assert 0.2 < elapsed < 1.0 + delays.room

    delays.hold(story)


@pytest.mark.parametrize("cluster", ["one_worker", "two_workers"])
def test_a_deadline_behind_what_waits_ends_it_and_tells_after_how_long(
    request: pytest.FixtureRequest, cluster: str, delays: Any
) -> None:
    def story() -> None:
        told = threading.Event()

        def body(group: cd.Group) -> float | None:
            if group.rank == 2:
                told.wait(60)
                return None
            works = [group.all_reduce("sum", 1.0, async_op=True, timeout=50) for _ in range(3)]
            with pytest.raises(cd.errors.DeadlineExceededError) as raised:
                group.all_reduce("sum", 1.0, timeout=1.0 if group.rank == 0 else 50)
            told.set()
            for work in works:
                assert work.exception() is not None
            assert [member.rank for member in raised.value.missing] == [2]
            within = re.search(r"did not complete within ([0-9.]+) s", str(raised.value))
            assert within, str(raised.value)
            return float(within[1])

        found = request.getfixturevalue(cluster).run(3, body)
        assert found[0] == found[1] and 1.0 <= found[0] < 1.0 + 0.25 + delays.room

    delays.hold(story)


def test_a_call_that_has_ended_does_not_end_another_of_the_same_number(one_worker: Any) -> None:
    """Numbers begin anew in a later generation, in which a thread may still look after an earlier call."""
    looked = threading.Event()

    def body(group: cd.Group) -> float:
        earlier = group.all_reduce("sum", 1.0, async_op=True)
        earlier.result()
        if group.rank:
            looked.wait(20)
            group.barrier()
            return 0.0
        later = group.barrier(async_op=True)
        channel, ended, pending = group._channel, earlier._calls[0], later._calls[0]
        ended.instance = pending.instance
        if isinstance(channel, SegmentChannel):
            assert isinstance(ended, SegmentCall)
            with channel.mutex:
                channel._end_call(ended, None)
        elif isinstance(channel, GrpcChannel):
            assert channel._on_rpc_error(ended, MemoryError()) is None
        assert channel._calls[pending.instance] is pending and not pending.complete
        looked.set()
        later.result(timeout=20)
        return 1.0

    assert one_worker.run(2, body) == [1.0, 0.0]


@pytest.mark.parametrize("forks", [0, 2])
@pytest.mark.parametrize("workers", ["one_worker", "two_workers"])
def test_a_killed_client_ends_the_others_within_a_second_and_leaves_nothing(
    workers: str, forks: int, request: pytest.FixtureRequest, delays: Any
) -> None:
    cluster = request.getfixturevalue(workers)
    daemons = [worker.process.pid for worker in cluster.workers]
    cluster.run(2, lambda group: group.all_reduce("sum", np.ones(1 << 20, np.float32)))  # threads that help stay
    before = [held(pid) for pid in daemons]

    def list_left() -> list[str]:
        return [one for pid, then in zip(daemons, before, strict=True) for one in held(pid) - then]

    name = f"killed-{forks}"
    victim = cluster.client(
        1,
        2,
        name,
        JOIN
        + f"""
array = session.empty((1 << 20,), np.float32)
group.all_reduce("sum", array)
children = []
for _ in range({forks}):
    children.append(os.fork())
    if not children[-1]:
        signal.pause()
print(" ".join(map(str, children)) or "none", flush=True)
signal.pause()
""",
    )
    survivor = cluster.client(
        0,
        2,
        name,
        JOIN
        + """
array = session.empty((1 << 20,), np.float32)
group.all_reduce("sum", array)
try:
    print("waiting", flush=True)
    group.all_reduce("sum", array)
except cd.errors.UnavailableError as error:
    print("error", time.clock_gettime(time.CLOCK_MONOTONIC), [m.rank for m in error.missing], error, flush=True)
""",
    )
    children: list[int] = []
    try:
        say(survivor, "joined")
        say(victim, "joined")
        assert victim.stdout
        children = [int(word) for word in victim.stdout.readline().split() if word.isdigit()]
        assert len(children) == forks
        say(survivor, "waiting")
        killed_at = time.clock_gettime(time.CLOCK_MONOTONIC)
        victim.kill()
        status, out = ended(survivor)
        _, at, missing, *text = out.split(maxsplit=3)
        assert status == 0 and float(at) - killed_at <= 1.0 + delays.room and missing == "[1]"
        assert "rank 1" in text[0] and str(victim.pid) in text[0]
        settle(lambda: all(children and "memfd" in one for one in list_left()))  # what these have mapped counts on
        while children:
            os.kill(children.pop(), signal.SIGKILL)
        settle(lambda: not list_left())
    finally:
        victim.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)
        victim.communicate()


@pytest.mark.parametrize("workers", ["one_worker", "two_workers"])
def test_what_a_client_had_fully_submitted_completes_after_its_death(
    workers: str, request: pytest.FixtureRequest
) -> None:
    cluster = request.getfixturevalue(workers)
    victim = cluster.client(
        1,
        2,
        "submitted",
        JOIN
        + """
work = group.all_reduce("sum", np.full(1000, 2.0), async_op=True)
print("submitted", flush=True)
signal.pause()
""",
    )
    survivor = cluster.client(
        0,
        2,
        "submitted",
        JOIN
        + """
sys.stdin.readline()
print(group.all_reduce("sum", np.full(1000, 1.0))[0], flush=True)
try:
    group.all_reduce("sum", np.full(1000, 1.0))
except cd.errors.UnavailableError as error:
    print([m.rank for m in error.missing], flush=True)
""",
    )
    say(victim, "joined")
    say(survivor, "joined")
    say(victim, "submitted")
    # Over gRPC it is submitted when all of it has come.
    settle(lambda: any(group_loop.in_flight for worker in cluster.status().workers for group_loop in worker.lanes))
    victim.kill()
    victim.communicate()
    go_on(survivor)
    assert ended(survivor) == (0, "3.0\n[1]\n")


def test_an_exception_in_the_block_aborts_the_group_with_its_text(two_workers: Any) -> None:
    def body(group: cd.Group) -> Any:
        group.barrier()
        if group.rank == 1:
            raise ValueError("loss is NaN")
        with pytest.raises(cd.errors.AbortedError) as caught:
            group.all_reduce("sum", 1.0)
        raise caught.value

    for rank, error in enumerate(errors_of(two_workers, 4, body)):
        if rank == 1:
            assert isinstance(error, ValueError)
        else:
            assert isinstance(error, cd.errors.AbortedError)
            assert "rank 1" in str(error) and "ValueError: loss is NaN (test_typed_errors.py:" in str(error)


def errors_of(cluster: Any, size: int, body: Any) -> list[BaseException | None]:
    """What each rank of a group raised."""
    raised: list[BaseException | None] = [None] * size

    def noted(group: cd.Group) -> None:
        try:
            body(group)
        except BaseException as error:
            raised[group.rank] = error
            raise

    with pytest.raises(BaseException):  # noqa: B017 - the first of those that `raised` holds
        cluster.run(size, noted)
    return raised


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (np.ones(4, np.float32), "float32[4]"),
        (np.ones(3, np.float64), "float64[3]"),
        ([np.ones(3, np.float32), None], "None"),
    ],
    ids=["shape", "dtype", "structure"],
)
@pytest.mark.parametrize("workers", ["one_worker", "two_workers", "four_workers"])
def test_ranks_that_differ_are_told_who_and_how_and_the_group_goes_on(
    workers: str, odd: Any, text: str, request: pytest.FixtureRequest
) -> None:
    usual = [np.ones(3, np.float32), np.ones(2)] if isinstance(odd, list) else np.ones(3, np.float32)
    cluster = request.getfixturevalue(workers)

    def body(group: cd.Group) -> Any:
        if group.rank == 2:
            cluster.await_arrivals(group, 3)
        with pytest.raises(cd.errors.InvalidArgumentError) as caught:
            group.all_reduce("sum", odd if group.rank == 2 else usual)
        assert group.all_reduce("sum", 1.0) == 4.0
        return caught.value

    for error in cluster.run(4, body):
        assert str(error).startswith("rank 2 differs: ") and text in str(error)
        assert [member.rank for member in error.differing] == [2] and not error.rejoin


@pytest.mark.parametrize("ahead", [0, 3], ids=["one at a time", "with more in flight"])
@pytest.mark.parametrize("workers", ["one_worker", "two_workers"])
def test_after_ranks_differed_numbers_last_calls_and_lines_go_on(
    workers: str, ahead: int, request: pytest.FixtureRequest
) -> None:
    def body(group: cd.Group) -> Any:
        for _ in range(5):
            group.all_reduce("sum", 1.0)
        works = [group.all_reduce("sum", np.ones(3 + (group.rank == 2)), async_op=True)]
        works += [group.all_reduce("sum", 1.0, async_op=True) for _ in range(ahead if group.rank < 2 else 0)]
        for work in works:
            with pytest.raises(cd.errors.InvalidArgumentError) as differed:
                work.wait()
        assert differed.value.instance == 5
        if group.rank == 3:
            heard.wait(30)
            return None
        with pytest.raises(cd.errors.DeadlineExceededError) as late:
            group.all_reduce("max", 1.0, options=cd.CommunicationOptions(timeout_seconds=0.3))
        heard.wait(30)
        return late.value

    heard = threading.Barrier(4)
    *errors, _ = request.getfixturevalue(workers).run(4, body)
    for error in errors:
        assert error.instance == 6
        assert [(member.rank, member.last_op, member.last_instance) for member in error.missing] == [
            (3, "all_reduce(sum)", 4)
        ]
        assert "it last did all_reduce(sum) #5 at test_typed_errors.py" in str(error)


def test_different_operations_are_told_apart(two_workers: Any) -> None:
    def body(group: cd.Group) -> Any:
        if group.rank == 0:
            two_workers.await_arrivals(group, 3)
        with pytest.raises(cd.errors.InvalidArgumentError) as caught:
            if group.rank == 0:
                group.all_reduce("mean", 1.0)
            else:
                group.all_reduce("sum", 1.0)
        return caught.value

    for error in two_workers.run(4, body):
        assert str(error).startswith("rank 0 differs: ") and "mean" in str(error) and "sum" in str(error)


def test_joining_with_another_size_names_both_and_the_others_still_come_together(one_worker: Any) -> None:
    clients = [one_worker.client(0, 2, "sizes", JOIN + "print(group.size)")]
    settle(lambda: "sizes" in forming(one_worker))
    with cd.connect(one_worker.addresses[0]) as session, pytest.raises(cd.errors.InvalidArgumentError) as caught:
        session.join("sizes", 3, timeout=5)
    clients.append(one_worker.client(1, 2, "sizes", JOIN + "print(group.size)"))
    for client in clients:
        assert ended(client) == (0, "joined\n2\n")
    assert "3" in str(caught.value) and "2" in str(caught.value)


def test_a_rank_taken_twice_is_refused_and_names_who_has_it(one_worker: Any) -> None:
    first = one_worker.client(0, 2, "twice", JOIN)
    with cd.connect(one_worker.addresses[0]) as session:
        settle(lambda: "twice" in forming(one_worker))
        with pytest.raises(cd.errors.CollectiveError, match="rank 0 of group 'twice' is taken by.*pid") as caught:
            session.join("twice", 2, rank=0, timeout=5)
        assert str(first.pid) in str(caught.value)
        with session.join("twice", 2, rank=1, timeout=5):
            assert ended(first) == (0, "joined\n")


def forming(cluster: Any) -> list[str]:
    """Names of the groups that are forming, as status tells them."""
    return [unscoped_name(group.name) for group in cluster.status().groups if group.state == "forming"]


def test_a_join_that_times_out_says_who_is_here_and_is_withdrawn(one_worker: Any) -> None:
    with cd.connect(one_worker.addresses[0]) as session:
        with pytest.raises(cd.errors.DeadlineExceededError, match="1 of 2"):
            session.join("lonely", 2, timeout=0.2)
        settle(lambda: "lonely" not in forming(one_worker))


@pytest.mark.timeout(120)
def test_a_job_that_simply_ends_raises_no_alarm_a_hundred_times(make_cluster: Any, transport: str) -> None:
    here = make_cluster(2)

    def body(group: cd.Group) -> None:
        group.all_reduce("sum", np.ones(100))
        group.broadcast(1.0, root=group.size - 1)
        for _ in range(group.rank):
            os.sched_yield()

    for _ in range(100 if transport == "shared memory" else 25):
        here.run(4, body)
    here.close()
    assert here.log == ""


ROUNDS = 10


@pytest.mark.timeout(200)
def test_threads_and_descriptors_of_a_worker_do_not_grow_with_collectives_or_timeouts(
    make_cluster: Any, transport: str
) -> None:
    two_workers = make_cluster(2)  # of which no earlier test has left what is still to be closed
    pids = [worker.process.pid for worker in two_workers.workers]

    def counts() -> list[tuple[int, int]]:
        return [(len(os.listdir(f"/proc/{pid}/task")), len(descriptors(pid))) for pid in pids]

    seen: list[list[tuple[int, int]]] = []

    def body(group: cd.Group) -> None:
        for round_ in range(4):
            for _ in range(250 if transport == "shared memory" else 50):
                group.all_reduce("sum", np.ones(50), options=cd.CommunicationOptions(timeout_seconds=5))
            group.barrier()
            if group.rank == 0 and round_:
                seen.append(counts())
            group.barrier()

    two_workers.run(4, body)
    assert seen[0] == seen[1] == seen[2]

    over = threading.Barrier(4)

    def failing(group: cd.Group) -> None:
        if group.rank:
            with pytest.raises(cd.errors.DeadlineExceededError):
                group.all_reduce("sum", 1.0, options=cd.CommunicationOptions(timeout_seconds=0.05))
        over.wait(20)

    two_workers.run(4, failing)
    settled = counts()
    for _ in range(ROUNDS):
        two_workers.run(4, failing)
    settle(  # a pool may start its second thread late; one more thread a round is a leak
        lambda: all(
            now[0] < then[0] + ROUNDS and now[1] <= then[1] for now, then in zip(counts(), settled, strict=True)
        ),
        MAX_IDLE_SECONDS + 20,  # for so long a link more may rest
    )


def test_a_forked_child_may_not_use_the_session_and_may_connect_again(one_worker: Any) -> None:
    parent = one_worker.client(
        0,
        1,
        "forked",
        JOIN
        + """
child = os.fork()
if child == 0:
    try:
        group.all_reduce("sum", 1.0)
    except cd.errors.FailedPreconditionError as error:
        print("child:", "connect" in str(error), flush=True)
    with cd.connect() as mine, mine.join("of the child", 1, rank=0) as alone:
        print(alone.all_reduce("sum", 2.0), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(group.all_reduce("sum", 1.0), flush=True)
""",
    )
    assert ended(parent) == (0, "joined\nchild: True\n2.0\n1.0\n")
