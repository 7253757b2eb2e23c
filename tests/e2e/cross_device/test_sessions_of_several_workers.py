"""One client on the devices of several workers: what it joins, keeps, loses, finds again and closes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived.cross_device.device_sessions import get_device_sessions

WORKERS = [f"/job:worker/replica:0/task:{task}" for task in range(3)]


def value(count: int, workers: int = 1) -> cd.PerReplica:
    """Different on every replica; the devices are in turn on so many workers."""
    devices = [f"{WORKERS[index % workers]}/device:CPU:{index // workers}" for index in range(count)]
    return cd.PerReplica([np.arange(3) + replica for replica in range(count)], devices)


def summed(given: cd.PerReplica) -> Any:
    return np.sum(given.values, axis=0)


def test_a_group_that_failed_is_joined_again_at_the_next_call(three_workers: Any) -> None:
    with cd.connect(three_workers.addresses[0]) as session:
        ops, given = cd.HierarchicalCopyAllReduce(session=session), value(3, 2)
        ops.reduce("sum", given, given)
        (ranks,) = get_device_sessions(session)._ranks_by_devices.values()
        ranks.groups[1].abort("for this test")
        assert np.array_equal(ops.reduce("sum", given, given).primary, summed(given))
        (again,) = get_device_sessions(session)._ranks_by_devices.values()
        assert ranks.is_over and not again.is_over and all(group not in session._resources for group in ranks.groups)


def test_an_interrupt_between_two_ranks_submissions_ends_the_group_so_that_no_step_is_shifted(
    three_workers: Any,
) -> None:
    with cd.connect(three_workers.addresses[0]) as session:
        ops, given = cd.HierarchicalCopyAllReduce(session=session), value(2, 2)
        ops.reduce("sum", given, given)
        (ranks,) = get_device_sessions(session)._ranks_by_devices.values()

        def submit(group: cd.Group, options: cd.CommunicationOptions) -> cd.Work[Any]:
            group.all_reduce("sum", 1.0, options, async_op=True)
            raise KeyboardInterrupt  # before its work is anywhere

        with pytest.raises(KeyboardInterrupt):
            ranks.run_collective(submit, cd.CommunicationOptions(timeout_seconds=20))
        assert ranks.is_over
        assert np.array_equal(ops.reduce("sum", given, given).primary, summed(given))


def test_the_same_devices_are_joined_once_and_others_apart(three_workers: Any) -> None:
    with cd.connect(three_workers.addresses[0]) as session:
        for _ in range(3):
            for ops in (cd.NcclAllReduce(session=session), cd.HierarchicalCopyAllReduce(session=session)):
                ops.reduce("sum", value(2), value(2))
                ops.reduce("sum", value(3, 2), value(3, 2))
        held = get_device_sessions(session)._ranks_by_devices.values()
        assert sorted(len(ranks.groups) for ranks in held) == [2, 3]
        names = [ranks.groups[0].name for ranks in held]
        assert len(set(names)) == 2 and all(f"-{os.getpid()}-" in name for name in names)


def test_a_session_that_is_closed_takes_the_groups_and_the_other_sessions_with_it(three_workers: Any) -> None:
    before = [row.sessions for row in three_workers.status().workers]
    with cd.connect(three_workers.addresses[0]) as session:
        ops, given = cd.NcclAllReduce(session=session), value(3, 3)
        ops.reduce("sum", given, given)
        held = get_device_sessions(session)
        groups = [group for ranks in held._ranks_by_devices.values() for group in ranks.groups]
        others = [other for other in held._sessions.values() if other is not session]
        assert [row.sessions for row in three_workers.status().workers][:3] == [count + 1 for count in before[:3]]
    assert len(others) == 2 and all(other._unusable_reason for other in others)
    assert all(group._unusable_reason for group in groups)
    with pytest.raises(cd.errors.FailedPreconditionError, match="is closed"):
        ops.reduce("sum", given, given)


@contextlib.contextmanager
def stopped(worker: Any) -> Iterator[None]:
    """A worker that answers nobody, and closes nothing."""
    worker.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def pausing(make_cluster: Any) -> Any:
    """Two workers that tests may stop for a while."""
    return make_cluster(2)


def test_one_deadline_bounds_a_call_whose_worker_is_stopped_wherever_it_waits(pausing: Any, delays: Any) -> None:
    options, given = cd.CommunicationOptions(timeout_seconds=0.5), value(2, 2)
    with cd.connect(pausing.addresses[0]) as session:
        ops = cd.HierarchicalCopyAllReduce(session=session)
        to_one = cd.ReductionToOneDevice(session=session)

        def too_late(kind: cd.CrossDeviceOps, value: cd.PerReplica, wanted: Any) -> None:
            began = time.monotonic()
            with pytest.raises(cd.errors.DeadlineExceededError):
                kind.batch_reduce("sum", [(value, wanted)] * 3, options)
            assert time.monotonic() - began < 2 + delays.room  # seconds: 0.5, a grace of 0.25, and connecting

        with stopped(pausing.workers[1]):
            too_late(ops, given, given)  # no session with that worker yet
            assert np.array_equal(ops.reduce("sum", value(2), value(2), options).primary, summed(value(2)))
        assert np.array_equal(ops.reduce("sum", given, given).primary, summed(given))
        with stopped(pausing.workers[1]):
            too_late(ops, value(4, 2), "CPU:0")  # a session, but no group over these devices
            too_late(to_one, value(3, 2), value(3, 2))
            too_late(ops, given, given)  # a group that runs
        for again in (given, value(3, 2), value(4, 2)):
            assert np.array_equal(ops.reduce("sum", again, again).primary, summed(again))


def test_a_deadline_bounds_the_wait_for_another_thread_too(pausing: Any) -> None:
    given, short = value(2, 2), cd.CommunicationOptions(timeout_seconds=0.5)
    with cd.connect(pausing.addresses[0]) as session, ThreadPoolExecutor(1) as pool:
        ops = cd.HierarchicalCopyAllReduce(session=session)
        ops.reduce("sum", given, given)
        with stopped(pausing.workers[1]):
            long = pool.submit(ops.reduce, "sum", given, given)  # without a time limit
            with pytest.raises(cd.errors.DeadlineExceededError):
                ops.reduce("sum", given, given, short)
                ops.reduce("sum", given, given, short)  # whichever of the two came first
        with contextlib.suppress(cd.errors.DeadlineExceededError):  # the short one's, if that came first
            long.result(30)


def test_the_default_of_the_environment_is_a_deadline_too(pausing: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLLECTIVED_TIMEOUT", "0.5")
    with (
        cd.connect(pausing.addresses[0]) as session,
        stopped(pausing.workers[1]),
        pytest.raises(cd.errors.DeadlineExceededError, match=r"has not answered within 0\.\d"),
    ):
        cd.NcclAllReduce(session=session).reduce("sum", value(2, 2), value(2, 2))


def test_a_session_that_cannot_leave_says_whose_groups_they_are(two_workers: Any) -> None:
    with cd.connect(two_workers.addresses[0]) as session:
        cd.NcclAllReduce(session=session).reduce("sum", value(2), value(2))
        assert [group.name.startswith("cross-device") for group in session._resources] == [True] * 3


def test_a_worker_that_is_lost_is_an_error_the_others_go_on_and_its_successor_is_found(make_cluster: Any) -> None:
    cluster = make_cluster(2)
    with cd.connect(cluster.addresses[0]) as session:
        ops, given = cd.HierarchicalCopyAllReduce(session=session), value(2, 2)
        ops.reduce("sum", given, given)
        cluster.workers[1].close()
        for _ in range(2):
            with pytest.raises(cd.errors.CollectiveError):
                ops.reduce("sum", given, given)
        assert np.array_equal(ops.reduce("sum", value(2), value(2)).primary, summed(value(2)))
        lost = cluster.workers[1]
        cluster.workers[1] = type(lost)(*lost.arguments)
        assert cluster.workers[1].wait_ready()["address"] == cluster.addresses[1]
        assert np.array_equal(ops.reduce("sum", given, given).primary, summed(given))


DEFAULT_SESSION = """
import os, sys, numpy as np, collectived as tf
value = tf.PerReplica([np.ones(2), np.ones(2)])
ops = tf.distribute.HierarchicalCopyAllReduce()
parents = tf.distribute.NcclAllReduce(session=tf.connect())
print(ops.reduce("sum", value, "CPU:0"), flush=True)
child = os.fork()
if not child:
    print(ops.reduce("mean", value, "CPU:0"), flush=True)
    try:
        parents.reduce("sum", value, value)
    except tf.errors.FailedPreconditionError:
        os._exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ops.reduce("sum", value, value).primary)
"""


def test_the_default_session_is_forgotten_in_a_forked_child_and_ends_without_noise(two_workers: Any) -> None:
    process = two_workers.client(0, 1, "unused", DEFAULT_SESSION)
    out, err = process.communicate(timeout=40)
    assert (out.splitlines(), err) == (["[2. 2.]", "[1. 1.]", "child 7 [2. 2.]"], "")
    assert process.returncode == 0


WORKER_COMES_BACK = """
import sys, threading, numpy as np, collectived as tf
value = tf.PerReplica([np.ones(2), np.ones(2)])
ops = tf.distribute.HierarchicalCopyAllReduce()
found = []
threads = [threading.Thread(target=lambda: found.append(ops.reduce("sum", value, value))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(found), flush=True)
sys.stdin.readline()
print(ops.reduce("sum", value, value).primary)
"""


def test_the_default_session_is_one_for_all_threads_and_a_new_one_when_its_worker_was_lost(make_cluster: Any) -> None:
    cluster = make_cluster(1)
    process = cluster.client(0, 1, "unused", WORKER_COMES_BACK)
    assert process.stdout.readline() == "4\n"
    assert [row.sessions for row in cluster.status().workers] == [1]
    lost = cluster.workers[0]
    lost.close()
    cluster.workers[0] = type(lost)(*lost.arguments)
    cluster.workers[0].wait_ready()
    assert process.communicate("go on\n", timeout=30) == ("[2. 2.]\n", "") and process.returncode == 0


OVER_TWO_WORKERS = """
import numpy as np, collectived as tf
devices = ["CPU:0", "/task:1/cpu:0"]
value = tf.PerReplica([np.ones(2), np.ones(2)], devices)
print(tf.distribute.NcclAllReduce().reduce("sum", value, value).devices)
"""


def test_a_client_with_sessions_to_several_workers_ends_without_noise(two_workers: Any) -> None:
    process = two_workers.client(0, 1, "unused", OVER_TWO_WORKERS)
    out, err = process.communicate(timeout=40)
    assert "task:1" in out and process.returncode == 0
    assert err == ""


def test_nccl_on_cpus_is_the_ring_and_the_worker_says_so_once(
    make_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, given = make_cluster(1), value(2)
    with caplog.at_level(logging.INFO, "collectived"), cd.connect(cluster.addresses[0]) as session:
        for _ in range(2):
            ops = cd.NcclAllReduce(session=session)
            ops.batch_reduce("sum", [(given, given)]), ops.reduce("mean", given, given)
    assert caplog.records == []  # who reads the job's log reads the worker's words
    cluster.close()
    (said,) = [line for line in cluster.log.splitlines() if "NCCL" in line]
    assert "the hint NCCL falls back to RING" in said
