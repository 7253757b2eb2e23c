"""Large values of the only ranks of their workers: their carriers send and receive them where they lie."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import Cluster
from tests.e2e.faults.test_faults_amid_small_reductions import kill
from tests.forked_process import ForkedProcess
from tests.waiting import settle

import collectived as cd
from collectived.shared.spanning_channel import SpanningChannel

SECONDS = 40.0
ROWS = (5 << 20) // 4 + 3  # float32, of more than goes by a segment; divided by no number of ranks here

CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda group, value, **more: group.all_reduce("sum", value, **more),
    "mean": lambda group, value, **more: group.all_reduce("mean", value, **more),
    "reduce": lambda group, value, **more: group.reduce("max", value, root=1, **more),
    "broadcast": lambda group, value, **more: group.broadcast(value, 1, **more),
}


def get_progress(group: cd.Group) -> tuple[int, int]:
    """Bytes sent and received by this rank's carrier in this generation."""
    channel = group._channel
    assert isinstance(channel, SpanningChannel)
    carrier = channel._carrier
    if carrier is None or carrier.generation != group.generation:
        return 0, 0
    return carrier.core.progress()


def begin_lending(group: cd.Group) -> None:
    """Has all ranks get a carrier."""
    value = np.ones(ROWS, np.float32)
    for _ in range(50):
        group.all_reduce("sum", value, timeout=SECONDS)
        channel: Any = group._channel
        channel.poll()
        if group.all_reduce("min", int(channel._carrier is not None), timeout=SECONDS):
            return
    raise AssertionError("no carrier")


def make_value(group: cd.Group) -> Any:
    return np.random.default_rng(group.rank).standard_normal(ROWS).astype(np.float32)


def get_cluster(request: pytest.FixtureRequest, workers: int) -> Cluster:
    cluster: Cluster = request.getfixturevalue({2: "two_workers", 3: "three_workers", 4: "four_workers"}[workers])
    return cluster


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_the_bits_are_those_that_workers_bring(
    request: pytest.FixtureRequest, workers: int, call: Callable[..., Any]
) -> None:
    """An asynchronous call may not lend, for its caller may write its arrays when it has returned."""

    def body(group: cd.Group) -> list[bool]:
        value = make_value(group)
        before = value.copy()
        begin_lending(group)
        brought = call(group, value, async_op=True, timeout=SECONDS).result()
        carried = get_progress(group)
        new = call(group, value, timeout=SECONDS)
        if brought is None:
            assert [new, call(group, value), call(group, value)] == [None] * 3
            assert get_progress(group)[0] - carried[0] > 3 * ROWS * 4
            return [np.array_equal(value, before)]
        out = np.full_like(brought, np.nan)
        assert call(group, value, out=out, timeout=SECONDS) is out
        same = [np.array_equal(value, before)]
        assert call(group, value, out=value, timeout=SECONDS) is value  # where it lies
        assert sum(get_progress(group)) - sum(carried) > 3 * ROWS * 4  # each time it sends or receives all of it
        return same + [np.array_equal(one, brought) for one in (new, out, value)]

    for same in get_cluster(request, workers).run(workers, body):
        assert all(same)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float64", "complex64", "float16", "bool"])
def test_values_of_every_dtype(two_workers: Cluster, dtype: str) -> None:
    """float16 is folded in float32, so its worker folds it; a broadcast is carried all the same."""

    def body(group: cd.Group) -> None:
        begin_lending(group)
        value = (np.arange(6 << 20) % 7 + group.rank).astype(dtype)
        for _ in range(2):
            if dtype != "bool":
                assert np.array_equal(group.all_reduce("sum", value, timeout=SECONDS), 2 * (value - group.rank) + 1)
            before = get_progress(group)
            got = group.broadcast(value, root=1, timeout=SECONDS)
            assert np.array_equal(got, (np.arange(6 << 20) % 7 + 1).astype(dtype))
            assert sum(get_progress(group)) - sum(before) >= value.nbytes

    two_workers.run(2, body)


def test_asynchronous_calls_that_lend(two_workers: Cluster) -> None:
    """Several in flight, of a caller that leaves its arrays alone until they have ended."""

    def body(group: cd.Group) -> None:
        group.lends_inputs = True
        begin_lending(group)
        before = get_progress(group)
        values = [np.full(ROWS, number + group.rank, np.float32) for number in range(5)]
        works = [group.all_reduce("sum", value, out=value, async_op=True, timeout=SECONDS) for value in values]
        for number, (work, value) in enumerate(zip(works, values, strict=True)):
            assert work.result() is value and (value == 2 * number + 1).all()
        assert sum(get_progress(group)) - sum(before) > 5 * ROWS * 4

    two_workers.run(2, body)


def test_one_rank_lends_and_another_does_not(two_workers: Cluster) -> None:
    def body(group: cd.Group) -> None:
        begin_lending(group)
        before = get_progress(group)
        for number in range(4):
            value = np.full(ROWS, number, np.float32)
            taken = group.all_reduce("sum", value, async_op=group.rank == 1, timeout=SECONDS)
            assert ((taken.result() if group.rank else taken) == 2 * number).all()
        assert (get_progress(group) == before) == (group.rank == 1)

    two_workers.run(2, body)


def test_a_plan_that_no_carrier_knows_takes_the_value_as_the_carrier_copies_it(two_workers: Cluster) -> None:
    options = cd.CommunicationOptions(compression="bfloat16", timeout_seconds=SECONDS)

    def body(group: cd.Group) -> None:
        begin_lending(group)
        before = get_progress(group)
        for number in range(3):
            value = np.full(ROWS, number + group.rank, np.float32)
            assert (group.all_reduce("sum", value, options, out=value) == 2 * number + 1).all()
        assert get_progress(group) == before

    two_workers.run(2, body)


def test_small_and_large_values_in_turn(two_workers: Cluster) -> None:
    """They go over the same links: by the ranks' segment, by the workers, and by the carriers."""

    def body(group: cd.Group) -> None:
        begin_lending(group)
        large, middle = np.full(ROWS, 1, np.float32), np.full(300_000, 2, np.float32)
        for number in range(30):
            assert group.all_reduce("sum", float(number), timeout=SECONDS) == 2 * number
            assert (group.all_reduce("sum", large, timeout=SECONDS) == 2).all()
            assert (group.broadcast(middle + group.rank, root=0, timeout=SECONDS) == 2).all()
            assert (group.all_gather(large[: ROWS // 2], timeout=SECONDS) == 1).all()

    two_workers.run(2, body)


@pytest.mark.parametrize("workers", [2, 3])
def test_values_that_differ_are_refused_and_nothing_is_written(request: pytest.FixtureRequest, workers: int) -> None:
    def body(group: cd.Group) -> cd.errors.CollectiveError:
        begin_lending(group)
        value = make_value(group)[: ROWS - (group.rank == 1)]
        before = value.copy()
        with pytest.raises(cd.errors.InvalidArgumentError) as caught:
            group.all_reduce("sum", value, out=value, timeout=SECONDS)
        assert np.array_equal(value, before)
        assert caught.value.out_intact
        begin_lending(group)  # in the next generation, with other carriers
        assert (group.all_reduce("sum", np.ones(ROWS, np.float32), timeout=SECONDS) == workers).all()
        return caught.value

    for error in get_cluster(request, workers).run(workers, body):
        assert [member.rank for member in error.differing] == [1] or workers == 2


def test_nothing_is_written_after_an_abort(two_workers: Cluster) -> None:
    """The other rank never comes: this one's carrier has sent what it could, and waits."""
    ended = threading.Event()

    def body(group: cd.Group) -> None:
        begin_lending(group)
        if group.rank == 1:
            assert ended.wait(SECONDS)
            with pytest.raises(cd.errors.AbortedError, match="enough"):
                group.barrier(timeout=SECONDS)
            return
        value = np.ones(ROWS, np.float32)
        group.lends_inputs = True
        work = group.all_reduce("sum", value, out=value, async_op=True, timeout=SECONDS)
        group.abort("enough")
        with pytest.raises(cd.errors.AbortedError, match="enough"):
            work.result()
        value[:] = 3
        ended.set()

    two_workers.run(2, body)


def test_no_descriptor_or_thread_is_left(two_workers: Cluster) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def body(group: cd.Group) -> None:
        begin_lending(group)

    two_workers.run(2, body)
    settle(two_workers.quiet)
    before = count()
    for _ in range(3):
        two_workers.run(2, body)
    settle(lambda: count() <= before)


def test_a_rank_that_closes_its_session_amid_a_value_has_left_before_it(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(2)
    closing = threading.Event()

    def body(session: cd.Session, group: cd.Group) -> Any:
        begin_lending(group)
        value = np.ones(ROWS, np.float32)
        if group.rank == 1:
            assert closing.wait(SECONDS)
            time.sleep(0.3)
            with pytest.raises(cd.errors.AbortedError, match="rank 0 .* left the group") as caught:
                group.all_reduce("sum", value, timeout=SECONDS)
            return [member.rank for member in caught.value.missing]

        calls = group._channel._calls

        def close() -> None:
            settle(lambda: calls)  # it is submitted
            closing.set()
            session.close()

        thread = threading.Thread(target=close)
        thread.start()
        with pytest.raises(cd.errors.CancelledError):
            group.all_reduce("sum", value, timeout=SECONDS)
        thread.join()
        return [0]

    assert cluster.run_sessions(2, body) == [[0], [0]]


def test_a_rank_that_is_killed_before_its_turn_ends_what_it_lends(make_cluster: Any) -> None:
    """Its workers carry out the instance before; of the second one it has a part itself."""
    cluster: Cluster = make_cluster(2)
    program = PROGRAM.partition("number = 0")[0] + KILLED_AHEAD
    late, victim = (cluster.client(rank, 2, "ahead", program) for rank in range(2))
    assert [read_line(one) for one in (late, victim)] == ["ready\n"] * 2
    assert read_line(victim) == "ahead\n"
    victim.kill()
    assert late.stdin is not None
    late.stdin.write("go\n")
    late.stdin.flush()
    assert json.loads(read_line(late)) == [1, True]
    for one in (late, victim):
        one.communicate()


KILLED_AHEAD = """
import time
group.lends_inputs = True
while not (group._channel.poll() or group._channel._carrier):
    group.all_reduce("sum", value, out=out)
for number in range(8):  # both have a carrier now
    group.all_reduce("sum", value, out=out)
print("ready", flush=True)
if group.rank == 1:
    first = group.all_gather(value[:100_000 + group.rank], async_op=True)
    second = group.all_reduce("sum", value, out=out, async_op=True)
    print("ahead", flush=True)
    time.sleep(60)
sys.stdin.readline()
first = group.all_gather(value[:100_000 + group.rank])
try:
    group.all_reduce("sum", value, out=out, timeout=40)
except cd.errors.CollectiveError as error:
    print(json.dumps([error.missing[0].rank, len(first) == 200_001]), flush=True)
"""

PROGRAM = """
import json, sys
import numpy as np
import collectived as cd

session = cd.connect()
group = session.join(timeout=40)
value, out = np.ones(6 << 20, np.float32), np.empty(6 << 20, np.float32)
number = 0
try:
    while True:
        group.all_reduce("sum", value, out=out, timeout={timeout})
        assert out.min() == out.max() == group.size
        number += 1
        if number == 4:
            carrier = group._channel._carrier
            print("going" if carrier and carrier.core.progress()[0] else "no carrier", flush=True)
except cd.errors.CollectiveError as error:
    print(json.dumps([error.code, [member.rank for member in error.missing], str(error)]), flush=True)
    sys.stdin.readline()
session.close()
"""


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_amid_a_value_is_named(
    make_cluster: Any, workers: int, how: signal.Signals
) -> None:
    cluster: Cluster = make_cluster(workers)
    program = PROGRAM.format(timeout=40 if how is signal.SIGKILL else 5)
    for number in range(3):
        processes = [cluster.client(rank, workers, f"lent {number}", program) for rank in range(workers)]
        assert [read_line(process) for process in processes] == ["going\n"] * workers
        victim = processes[number % workers]
        victim.send_signal(how)
        for process in processes:
            if process is not victim:
                code, missing, text = json.loads(read_line(process))
                assert missing == [number % workers], (code, text)
        victim.kill()
        for process in processes:
            process.communicate()


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_that_is_killed_amid_a_value_ends_all_calls(make_cluster: Any, workers: int) -> None:
    """Its rank has the connection still, and lets go of it."""
    cluster: Cluster = make_cluster(workers)
    processes = [cluster.client(rank, workers, "killed", PROGRAM.format(timeout=40)) for rank in range(workers)]
    assert [read_line(process) for process in processes] == ["going\n"] * workers
    kill(cluster, cluster.workers[1])
    for process in processes:
        _, missing, text = json.loads(read_line(process))
        assert missing == [1] or "is lost" in text, text
        process.communicate()


def read_line(process: ForkedProcess) -> str:
    assert process.stdout is not None
    return process.stdout.readline() or process.communicate()[1]
