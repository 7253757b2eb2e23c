"""What goes wrong while ranks of several workers bring small values to segments: one verdict for all, in time.

The segment only says that nothing completes any more. Why is said by the coordinator, or by the workers together.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.forked_process import ForkedProcess
from tests.waiting import settle

import collectived as cd

pytestmark = pytest.mark.timeout(150)
ROUNDS = 4
COLLECTIVES = {"small": 1, "moved": 7}  # of a step
SMALL, LARGE = 100, 1_200_000  # elements: by the segment, and over the doorbell

PROGRAM = """
import json, sys, time
import numpy as np
import collectived as cd

def move(number):
    size = group.size
    root = number % size
    mine = group.rank == root
    assert group.broadcast(np.full(9, number if mine else -1), root=root).tolist() == [number] * 9
    assert group.broadcast(np.full(9, number) if mine else None, root=root).tolist() == [number] * 9
    assert group.all_gather(np.full(2, number)).tolist() == [number] * (2 * size)
    gathered = group.gather(np.full(2, number), root=root)
    assert gathered is None if not mine else gathered.tolist() == [number] * (2 * size)
    assert group.scatter(np.full(size, number), root=root).tolist() == [number]
    assert group.all_to_all(np.full(size, number)).tolist() == [number] * size
    assert group.reduce_scatter("sum", np.full(size, number)).tolist() == [number * size]

def step(number):
    size = group.size
    if moved:
        move(number)
    elif mixed and number % 3 == 2:
        gathered = group.all_gather(np.full(600_000, number), async_op=True)  # too large for a tick
        assert group.all_reduce("sum", np.full(9, number), async_op=True).result().tolist() == [number * size] * 9
        assert np.array_equal(gathered.result(), np.full(600_000 * size, number))
    else:
        assert group.all_reduce("sum", np.full(9, number)).tolist() == [number * size] * 9

session = cd.connect()
group = session.join(timeout=40)
group.barrier()
print("ready", flush=True)
what = sys.stdin.readline().split()
mixed, moved, most, number = what[0] == "mixed", what[0] == "moved", int(what[1]), 0
try:
    while number < most:
        step(number)
        number += 1
    print(json.dumps([number, None]), flush=True)
    sys.stdin.readline()
    step(number)
except KeyboardInterrupt:
    print(json.dumps([number, time.monotonic()]), flush=True)
except cd.errors.CollectiveError as error:
    verdict = error.verdict
    missing = [member.rank for member in error.missing]
    told = str(error).partition(" (decided by")[0]  # each worker may have to decide for itself
    print(json.dumps([number, [error.code, missing, told, verdict and verdict.from_instance]]), flush=True)
sys.stdin.readline()
session.close()
"""


class Ranks:
    """Two client processes on each worker, which do one step after another."""

    def __init__(self, cluster: Any, group: str, how: str, steps: int) -> None:
        self.size = 2 * len(cluster.addresses)
        self.processes = [cluster.client(rank, self.size, group, PROGRAM) for rank in range(self.size)]
        assert [process.stdout.readline() for process in self.processes] == ["ready\n"] * self.size
        for process in self.processes:
            self.tell(process, f"{how} {steps}")

    def tell(self, process: ForkedProcess, line: str = "") -> None:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()

    def hear(self, *but: int) -> list[Any]:
        """Steps that a rank has done, and what has ended them, of all ranks but those."""
        found = []
        for rank in sorted(set(range(self.size)) - set(but)):
            out = self.processes[rank].stdout
            assert out is not None
            line = out.readline()
            found.append(json.loads(line) if line else self.processes[rank].communicate()[1])
        return found


@contextlib.contextmanager
def ranks(cluster: Any, group: str, how: str = "small", steps: int = 1 << 60) -> Iterator[Ranks]:
    made = Ranks(cluster, group, how, steps)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.communicate()


def kill(cluster: Any, daemon: Any) -> None:
    """Kill a daemon, and remove the sockets that nobody serves any more."""
    daemon.process.kill()
    daemon.process.wait()
    for path in list(cluster.folder.glob("*.sock")):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            if probe.connect_ex(str(path)):
                path.unlink()


@pytest.fixture(params=[2, 3], ids=["two workers", "three workers"])
def workers(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue({2: "two_workers", 3: "three_workers"}[request.param])


def check_agreement(found: list[Any]) -> Any:
    """All were told the same, and no rank is more than a step ahead; returns that."""
    told = [verdict for _, verdict in found]
    assert all(verdict == told[0] for verdict in told), found
    steps = [number for number, _ in found]
    assert max(steps) - min(steps) <= 1, found
    return told[0]


@pytest.mark.parametrize("how", ["small", "mixed", "moved"])
def test_survivors_of_a_kill_at_any_moment_agree(workers: Any, how: str) -> None:
    chance = random.Random(f"{how}{len(workers.addresses)}")
    for number in range(ROUNDS):
        with ranks(workers, f"kill-{how}-{len(workers.addresses)}-{number}", how) as started:
            victim = chance.randrange(started.size)
            time.sleep(chance.random() * 0.2)
            started.processes[victim].kill()
            code, missing, text, _ = check_agreement(started.hear(victim))
            assert (code, missing) == (cd.errors.Code.UNAVAILABLE, [victim]) and f"rank {victim}" in text


@pytest.mark.parametrize("how", ["small", "moved"])
@pytest.mark.parametrize("steps", [0, 3], ids=["first", "later"])
def test_ranks_that_wait_hear_of_a_kill(workers: Any, steps: int, how: str) -> None:
    with ranks(workers, f"kill-waiting-{how}-{steps}-{len(workers.addresses)}", how, steps) as started:
        victim = started.size - 1
        assert started.hear() == [[steps, None]] * started.size
        for process in started.processes[:victim]:
            started.tell(process)
        time.sleep(0.1)
        started.processes[victim].kill()
        code, missing, _, first = check_agreement(started.hear(victim))
        assert (code, missing, first) == (cd.errors.Code.UNAVAILABLE, [victim], COLLECTIVES[how] * steps + 1)


@pytest.mark.parametrize("how", ["small", "mixed", "moved"])
def test_ctrl_c_is_raised_at_once_and_told_to_all(workers: Any, how: str, delays: Any) -> None:
    def story() -> None:
        with ranks(workers, f"ctrl-c-{how}-{time.monotonic()}", how) as started:
            victim, other = started.processes[started.size - 2], started.processes[0]
            other.send_signal(signal.SIGSTOP)
            time.sleep(0.3)  # then the victim waits for it: outside of a call Ctrl-C is its program's own
            pressed = time.monotonic()
            victim.send_signal(signal.SIGINT)
            heard = json.loads(victim.stdout.readline())[1]
            other.send_signal(signal.SIGCONT)
            code, missing, text, _ = check_agreement(started.hear(started.size - 2))
            assert code == cd.errors.Code.ABORTED and missing == [started.size - 2]
            assert f"interrupted on rank {started.size - 2}" in text
            assert heard - pressed < 0.1 + delays.room

    delays.hold(story)


def test_ranks_of_the_other_workers_agree_when_a_worker_is_killed(make_cluster: Any) -> None:
    cluster = make_cluster(3)
    with ranks(cluster, "worker-killed", "mixed") as started:
        time.sleep(0.2)
        kill(cluster, cluster.workers[2])
        rest, own = started.hear(4, 5), started.hear(0, 1, 2, 3)
        code, missing, _, _ = check_agreement(rest)
        assert code == cd.errors.Code.UNAVAILABLE and missing == [4, 5]
        assert all(verdict[0] == cd.errors.Code.UNAVAILABLE for _, verdict in own)


def test_ranks_of_a_stopped_worker_end_in_time(make_cluster: Any, delays: Any) -> None:
    cluster, timeout, together = make_cluster(2), 0.5, threading.Barrier(4)

    def body(group: cd.Group) -> float:
        group.barrier()
        together.wait(20)  # ranks of worker 1 may be in the group's barrier yet, which they leave by their worker
        if group.rank == 0:
            cluster.workers[1].process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        began = time.monotonic()
        with pytest.raises(cd.errors.DeadlineExceededError):
            group.all_reduce("sum", 1.0, timeout=timeout)
        took = time.monotonic() - began
        if group.rank == 3:
            cluster.workers[1].process.send_signal(signal.SIGCONT)
        return took - timeout

    def story() -> None:
        found = cluster.run(4, body)
        assert max(found) < 0.25 + delays.room, found

    try:
        delays.hold(story)
    finally:
        cluster.workers[1].process.send_signal(signal.SIGCONT)


def test_a_verdict_that_reaches_a_worker_late_is_the_same_for_all(make_cluster: Any) -> None:
    cluster = make_cluster(2)
    with ranks(cluster, "slow", steps=2) as started:
        assert started.hear() == [[2, None]] * 4
        for rank in (0, 2, 3):
            started.tell(started.processes[rank])
        time.sleep(0.2)
        stopped = cluster.coordinator.process, cluster.workers[1].process
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        started.processes[1].kill()
        time.sleep(3.0)
        for process in stopped:
            process.send_signal(signal.SIGCONT)
        code, missing, _, first = check_agreement(started.hear(1))
        assert (code, missing, first) == (cd.errors.Code.UNAVAILABLE, [1], 3)


def test_small_reductions_go_on_while_the_coordinator_is_away(make_cluster: Any) -> None:
    cluster = make_cluster(2)
    with ranks(cluster, "away", "mixed", 2) as started:
        assert started.hear() == [[2, None]] * 4
        kill(cluster, cluster.coordinator)
        for process in started.processes:
            started.tell(process)
            started.tell(process)
        for process in started.processes:
            assert process.wait(20) == 0, process.communicate()


SUBMITS_AND_WAITS = """
import sys, collectived as cd
session = cd.connect()
group = session.join(timeout=40)
group.barrier()
work = group.all_reduce("sum", 1.0, async_op=True)
print("submitted", flush=True)
sys.stdin.readline()
"""


def test_what_a_killed_rank_had_submitted_completes_and_what_others_have_in_their_queues_names_it(workers: Any) -> None:
    """Who has more in flight than it knows before its worker does that this cannot complete."""
    size, name = 2 * len(workers.addresses), f"killed-{len(workers.addresses)}"
    last, killed = size - 1, threading.Event()

    def body(rank: int) -> tuple[str, list[int]]:
        with (
            cd.connect(workers.address_of(rank, size)) as session,
            session.join(name, size, rank=rank, timeout=40) as group,
        ):
            group.barrier()
            if rank == last:
                assert killed.wait(30)
            first, second = (group.all_reduce("sum", 1.0, async_op=True) for _ in range(2))
            with pytest.raises(cd.errors.UnavailableError) as raised:
                second.result()
            return str(first.result()), [member.rank for member in raised.value.missing]

    with workers.client(1, size, name, SUBMITS_AND_WAITS) as client, ThreadPoolExecutor(size) as pool:
        others = [pool.submit(body, rank) for rank in range(size) if rank != 1]
        assert client.stdout.readline() == "submitted\n"
        time.sleep(0.1)
        workers.coordinator.process.send_signal(signal.SIGSTOP)  # so that the verdict comes after they have asked
        client.kill()
        time.sleep(0.3)
        workers.coordinator.process.send_signal(signal.SIGCONT)
        killed.set()
        assert [one.result(60) for one in others] == [(str(float(size)), [1])] * (size - 1)


def test_a_rank_that_leaves_is_missed_by_what_comes_after_it_and_by_nothing_before(workers: Any) -> None:
    size = 2 * len(workers.addresses)
    last, left = size - 1, threading.Event()

    def body(group: cd.Group) -> str:
        group.barrier()
        if group.rank == last:
            left.wait(20)
        first = group.all_reduce("sum", 1.0, async_op=True)
        if group.rank == 1:  # it leaves when the first is complete
            left.set()
            return str(first.result())
        second = group.all_reduce("sum", 2.0, async_op=True)
        with pytest.raises(cd.errors.CollectiveError, match="rank 1 has left|rank 1 .* left") as raised:
            second.result()
        assert [member.rank for member in raised.value.missing] == [1]
        return str(first.result())

    assert workers.run(size, body) == [str(float(size))] * size


def test_a_session_that_closes_with_much_in_flight_spoils_nothing_that_was_complete(workers: Any) -> None:
    size = 2 * len(workers.addresses)

    def body(group: cd.Group) -> list[Any]:
        works = [group.all_reduce("sum", float(step), async_op=True) for step in range(50)]
        works += [group.all_gather(np.ones(1), async_op=True)]
        return [float(work.result()) for work in works[:50]]

    assert workers.run(size, body) == [[float(size * step) for step in range(50)]] * size


@pytest.mark.parametrize("other", ["dtype", "operation", "moves", "way"])
@pytest.mark.parametrize("culprit", [1, -1], ids=["beside others", "on the last worker"])
def test_a_mismatch_is_told_to_all_and_the_group_goes_on(workers: Any, other: str, culprit: int) -> None:
    size = 2 * len(workers.addresses)

    def use(group: cd.Group) -> None:
        differs = group.rank == culprit % size
        if differs and other in ("moves", "way"):
            group.all_gather(np.ones(SMALL if other == "moves" else LARGE), timeout=30)
        elif differs and other == "operation":
            group.all_reduce("max", np.ones(SMALL), timeout=30)
        else:
            group.all_reduce("sum", np.ones(SMALL, np.int32 if differs else np.float64), timeout=30)

    def body(group: cd.Group) -> tuple[str, tuple[int, ...]]:
        for step in range(3):
            assert group.all_reduce("sum", float(step)) == size * step
        with pytest.raises(cd.errors.InvalidArgumentError) as raised:
            use(group)
        for count in (SMALL, LARGE, SMALL):
            assert np.all(group.all_reduce("sum", np.ones(count, np.float32)) == size)
        assert group.all_gather(np.ones(1)).shape == (size,)
        return str(raised.value).split(" at ")[0], tuple(member.rank for member in raised.value.differing)

    found = workers.run(size, body)
    assert len(set(found)) == 1 and found[0][1] == (culprit % size,), found


def test_a_deadline_behind_what_goes_over_the_doorbell_holds(workers: Any, delays: Any) -> None:
    """A small reduction waits for its turn in the segment; when its time is over, what is open before it has failed."""
    size = 2 * len(workers.addresses)

    def story() -> None:
        done = threading.Event()

        def body(group: cd.Group) -> Any:
            group.barrier()
            if group.rank == size - 1:
                done.wait(60)
                return None
            gathered = group.all_gather(np.ones(LARGE), async_op=True)
            begun = time.monotonic()
            with pytest.raises(cd.errors.DeadlineExceededError) as raised:
                group.all_reduce("sum", 1.0, timeout=1.0 if group.rank == 0 else 50)
            took = time.monotonic() - begun
            with pytest.raises(cd.errors.DeadlineExceededError):
                gathered.result()
            if group.rank == 0:
                done.set()
            return took, [member.rank for member in raised.value.missing]

        found = [one for one in workers.run(size, body) if one is not None]
        assert all(took < 1.25 + 0.25 + delays.room and missing == [size - 1] for took, missing in found), found

    delays.hold(story)


def test_status_names_who_has_not_come_to_a_small_reduction(workers: Any) -> None:
    with ranks(workers, "status", steps=1) as started:
        assert started.hear() == [[1, None]] * started.size
        for process in started.processes[1:]:
            started.tell(process)

        def is_waiting() -> bool:
            [group] = [one for one in workers.status().groups if one.name.endswith("/status") and one.state == "ready"]
            return [rank for one in group.in_flight for rank in one.missing] == [0]

        settle(is_waiting)
        started.tell(started.processes[0])
