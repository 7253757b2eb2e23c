"""Replica contexts of processes and of threads, and MirroredStrategy on the devices of real workers."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import collectived as cd

CPUS = ["CPU:0", "CPU:1", "CPU:2"]


@pytest.fixture(scope="module")
def sessions() -> Iterator[dict[str, cd.Session]]:
    """One per transport, so that groups are joined once."""
    opened: dict[str, cd.Session] = {}
    yield opened
    for session in opened.values():
        session.close()


@pytest.fixture
def here(two_workers: Any, sessions: dict[str, cd.Session], transport: str) -> cd.Session:
    """A session with the first of two workers."""
    if transport not in sessions:
        sessions[transport] = cd.connect(two_workers.addresses[0])
    return sessions[transport]


def own_sum(parts: list[Any]) -> Any:
    return functools.reduce(np.add, parts)


OPERATIONS: dict[str, Callable[[cd.Session], cd.CrossDeviceOps | None]] = {
    "default": lambda session: None,
    "hierarchical": lambda session: cd.HierarchicalCopyAllReduce(2, session=session),
    "nccl": lambda session: cd.NcclAllReduce(session=session),
    "multi-worker": lambda session: cd.MultiWorkerAllReduce(["/job:worker/task:0"], 0, "xring", session=session),
    "one device": lambda session: cd.ReductionToOneDevice(session=session),
    "own accumulation": lambda session: cd.ReductionToOneDevice(accumulation_fn=own_sum, session=session),
}


@pytest.fixture(params=OPERATIONS)
def strategy(request: pytest.FixtureRequest, here: cd.Session) -> cd.MirroredStrategy:
    return cd.MirroredStrategy(CPUS, OPERATIONS[request.param](here), session=here)


def test_every_device_runs_the_function_as_a_replica_in_a_thread_of_its_own(strategy: cd.MirroredStrategy) -> None:
    meeting = threading.Barrier(3)

    def replica(x: Any, *, nest: Any) -> Any:
        meeting.wait(10)
        context = cd.get_replica_context()
        return context.replica_id_in_sync_group, context.num_replicas_in_sync, threading.get_ident(), x, nest["y"][0]

    y = cd.PerReplica([10, 20, 30])
    with strategy.scope() as same:
        found = strategy.run(replica, (cd.PerReplica(["a", "b", "c"], CPUS),), {"nest": {"y": [y]}})
    assert same is strategy and strategy.num_replicas_in_sync == 3
    ids, counts, threads, letters, numbers = found
    assert ids.values == (0, 1, 2) and counts.values == (3, 3, 3) and len(set(threads.values)) == 3
    assert letters.values == ("a", "b", "c") and numbers.values == (10, 20, 30)
    assert [device[-5:] for device in ids.devices] == CPUS


def test_replicas_reduce_nests_by_the_operation_of_the_strategy(strategy: cd.MirroredStrategy) -> None:
    def replica() -> Any:
        me = cd.get_replica_context().replica_id_in_sync_group
        value = {"w": [np.full((2, 2), me, np.float32), None], "b": (np.arange(3) * me, float(me))}
        context = cd.get_replica_context()
        options = cd.CommunicationOptions(timeout_seconds=30)
        return context.all_reduce("sum", value, options), context.all_reduce(cd.ReduceOp.MEAN, value["b"][0])

    for _ in range(3):
        summed, mean = strategy.run(replica)
        assert all(part.tolist() == [[3, 3], [3, 3]] for part in summed["w"][0].values) and summed["w"][1] is None
        assert all(part.tolist() == [0, 3, 6] for part in summed["b"][0].values) and summed["b"][1].values == (3.0,) * 3
        assert all(part.tolist() == [0, 1, 2] and part.dtype == np.float64 for part in mean.values)
        arrays = [*summed["w"][0].values, *summed["b"][0].values, *mean.values]
        assert not any(np.shares_memory(one, other) for n, one in enumerate(arrays) for other in arrays[:n])


def test_a_replica_that_raises_ends_the_others_and_its_error_is_raised(strategy: cd.MirroredStrategy) -> None:
    others: list[BaseException] = []

    def replica() -> Any:
        context = cd.get_replica_context()
        if context.replica_id_in_sync_group == 1:
            raise KeyError("the loss is NaN")
        try:
            context.all_reduce("sum", 1.0)
        except cd.errors.AbortedError as error:
            others.append(error)
            raise

    with pytest.raises(KeyError, match="the loss is NaN"):
        strategy.run(replica)
    assert len(others) == 2 and all("KeyError: 'the loss is NaN' (test_replicas.py:" in str(error) for error in others)
    assert strategy.run(lambda: cd.get_replica_context().all_reduce("sum", 1)).values == (3, 3, 3)


def test_replicas_that_differ_are_told_apart(strategy: cd.MirroredStrategy) -> None:
    def replica() -> Any:
        me = cd.get_replica_context().replica_id_in_sync_group
        return cd.get_replica_context().all_reduce("sum", [np.ones(3)] * (2 if me == 1 else 1))

    with pytest.raises(ValueError, match="1"):
        strategy.run(replica)
    assert strategy.run(lambda: cd.get_replica_context().all_reduce("mean", 1)).values == (1.0,) * 3


def test_a_replica_that_does_not_come_is_named_at_the_deadline(here: cd.Session) -> None:
    strategy = cd.MirroredStrategy(CPUS, cd.HierarchicalCopyAllReduce(session=here))
    late = threading.Event()

    def replica() -> Any:
        context = cd.get_replica_context()
        if context.replica_id_in_sync_group == 2:
            assert late.wait(20)
        try:
            context.all_reduce("sum", 1, cd.CommunicationOptions(timeout_seconds=0.3))
        except cd.errors.DeadlineExceededError as error:
            late.set()
            return [member.rank for member in error.missing]

    assert [missing.values for missing in strategy.run(replica)] == [(2, 2, 2)]
    assert strategy.run(lambda: cd.get_replica_context().all_reduce("sum", 1)).values == (3, 3, 3)


def test_sparse_and_dense_gradients_of_replicas(strategy: cd.MirroredStrategy) -> None:
    def replica() -> Any:
        me = cd.get_replica_context().replica_id_in_sync_group
        rows = cd.IndexedSlices(np.full((me, 2), me, np.float32), np.arange(me), (5, 2))
        return cd.get_replica_context().all_reduce("mean", [rows, np.full(2, me), {"x": rows}])

    rows, dense, nested = strategy.run(replica)
    assert all(part.tolist() == [1, 1] for part in dense.values)
    for found in (*rows.values, *nested["x"].values):
        assert found.indices.tolist() == [0, 0, 1] and found.dense_shape == (5, 2)
        assert np.allclose(found.values, [[1 / 3, 1 / 3], [2 / 3, 2 / 3], [2 / 3, 2 / 3]])


def test_a_replica_takes_results_as_they_come(here: cd.Session) -> None:
    strategy = cd.MirroredStrategy(CPUS, session=here)

    def replica() -> Any:
        context, seen = cd.get_replica_context(), {}
        value = {"a": np.ones(100), "b": [np.ones(50, np.float32), np.ones(10)]}
        options = cd.CommunicationOptions(bytes_per_pack=64)
        for path, leaf in context.all_reduce("sum", value, options, async_op=True).as_completed():
            seen[str(path)] = leaf.sum()
        return list(seen.items())

    for _ in range(2):
        found = strategy.run(replica)
        for replica_number in range(3):
            items = dict((path.values[replica_number], total.values[replica_number]) for path, total in found)
            assert items == {"('a',)": 300, "('b', 0)": 150, "('b', 1)": 30}


def test_an_accumulation_of_ones_own_has_no_work(here: cd.Session) -> None:
    strategy = cd.MirroredStrategy(CPUS, OPERATIONS["own accumulation"](here))
    with pytest.raises(ValueError, match="async_op is not offered with ReductionToOneDevice"):
        strategy.run(lambda: cd.get_replica_context().all_reduce("sum", 1, async_op=True))


def test_a_replica_has_no_replicas(here: cd.Session) -> None:
    strategy = cd.MirroredStrategy(CPUS, session=here)
    with pytest.raises(RuntimeError, match="inside of run"):
        strategy.run(lambda: strategy.run(lambda: 1))


def test_replicas_that_return_different_structures_are_an_error(here: cd.Session) -> None:
    strategy = cd.MirroredStrategy(CPUS, session=here)
    with pytest.raises(ValueError, match=r"replica 1 returned \[\*\], replica 0 \[\]"):
        strategy.run(lambda: [1] * cd.get_replica_context().replica_id_in_sync_group)


def test_one_device_gives_bare_values(here: cd.Session) -> None:
    strategy = cd.MirroredStrategy(session=here)
    assert strategy.num_replicas_in_sync == 1  # no GPU here, so CPU:0
    assert strategy.run(lambda x: [x, cd.get_replica_context().all_reduce("mean", 3)], (1,)) == [1, 3.0]
    assert strategy.reduce("sum", 5) == 5


def test_what_replicas_returned_is_reduced_to_one_array(strategy: cd.MirroredStrategy) -> None:
    value = cd.PerReplica([np.arange(2) + replica for replica in range(3)])
    assert strategy.reduce("sum", value).tolist() == [3, 6]
    mean, (loss,) = strategy.reduce("mean", [value, (cd.PerReplica([1.0, 2.0, 6.0]),)])
    assert mean.tolist() == [1, 2] and loss == 3.0


def test_along_an_axis_the_mean_counts_elements(strategy: cd.MirroredStrategy) -> None:
    parts = [np.array([[1, 2], [3, 4]], np.int32), np.array([[5, 6]], np.int32), np.zeros((0, 2), np.int32)]
    value = cd.PerReplica(parts)
    summed, mean = strategy.reduce("sum", value, axis=0), strategy.reduce("mean", value, axis=0)
    assert summed.tolist() == [9, 12] and summed.dtype == np.int32
    assert mean.tolist() == [3, 4] and mean.dtype == np.float64
    half = cd.PerReplica([np.full((2000, 1), 60, np.float16)] * 3)
    assert strategy.reduce("mean", half, axis=0).tolist() == [60]
    assert strategy.reduce("mean", np.array([1.0, 2.0]), axis=0) == 1.5
    for axis, wrong in ((1, cd.PerReplica([np.ones(3)])), (0, cd.PerReplica([cd.IndexedSlices([1.0], [0])]))):
        with pytest.raises(ValueError, match=f"axis {axis} cannot be reduced along"):
            strategy.reduce("sum", wrong, axis=axis)


def test_along_an_axis_a_mean_of_wide_integers_does_not_overflow(strategy: cd.MirroredStrategy) -> None:
    for large in (np.int64(2**62), np.int64(-(2**63)), np.uint64(2**64 - 2**11)):
        parts = [np.full((length, 2), large) for length in (3, 1, 2)]
        for value in (cd.PerReplica(parts), parts[0]):
            mean = strategy.reduce("mean", value, axis=0)
            assert mean.tolist() == [float(large)] * 2 and mean.dtype == np.float64
    narrow = strategy.reduce("mean", cd.PerReplica([np.full(3, 100, np.int8)] * 3), axis=0)
    assert narrow == 100 and narrow.dtype == np.float32
    mixed = cd.PerReplica([np.ones(2, np.int64), np.ones(2, np.int32), np.ones(2, np.int64)])
    with pytest.raises(ValueError, match="component 1 has dtype int32, component 0 has int64"):
        strategy.reduce("mean", mixed, axis=0)


def test_values_that_are_the_same_on_all_replicas(strategy: cd.MirroredStrategy) -> None:
    array, extended = np.ones(3), strategy.extended
    bare = extended.reduce_to("mean", array, "CPU:0")
    assert bare.tolist() == [1] * 3 and not np.shares_memory(bare, array)
    assert not np.shares_memory(strategy.reduce("mean", {"x": array})["x"], array)
    assert extended.reduce_to("mean", 7, "CPU:0") == 7
    with pytest.raises(TypeError, match="the value is a str"):
        extended.reduce_to("mean", "text", "CPU:0")
    assert extended.reduce_to("sum", 0, "CPU:0") == 0 and extended.reduce_to("mean", 0.0, "CPU:0") == 0.0
    with pytest.raises(ValueError, match="the sum over 3 replicas of a value that is the same on all of them"):
        extended.reduce_to("sum", array, "CPU:0")
    with pytest.raises(ValueError, match="the same on all of them"):
        strategy.reduce("sum", 5)
    mirrored = cd.Mirrored([array] * 3)
    mean = extended.reduce_to("mean", mirrored, "CPU:0")
    assert isinstance(mean, cd.Mirrored) and mean.devices == mirrored.devices
    parts = [*mean.values, array]
    assert all(part.tolist() == [1] * 3 for part in mean.values)
    assert not any(np.shares_memory(one, other) for n, one in enumerate(parts) for other in parts[:n])
    with pytest.raises(ValueError, match="sum of a Mirrored value"):
        extended.reduce_to("sum", mirrored, "CPU:0")
    with pytest.raises(ValueError, match="sum and mean, got max"):
        extended.reduce_to("max", array, "CPU:0")


def test_the_sum_over_one_replica_is_copied_to_the_destinations(here: cd.Session) -> None:
    extended, array = cd.MirroredStrategy(["CPU:1"], session=here).extended, np.ones(3)
    found = extended.reduce_to("sum", array, cd.PerReplica([0, 0]))
    assert [part.tolist() for part in found.values] == [[1, 1, 1]] * 2
    assert not any(np.shares_memory(part, array) for part in found.values)
    with pytest.raises(ValueError, match="destinations must be"):
        extended.reduce_to("sum", array, ["CPU:0"])


def test_the_operations_of_a_strategy_reach_its_devices(strategy: cd.MirroredStrategy) -> None:
    extended, value = strategy.extended, cd.PerReplica([np.full(2, replica) for replica in range(3)])
    options = cd.CommunicationOptions(bytes_per_pack=1)
    assert extended.reduce_to("sum", value, value, options).primary.tolist() == [3, 3]
    assert extended.reduce_to("sum", value, "CPU:1", options).tolist() == [3, 3]
    both = extended.batch_reduce_to("mean", [(value, value), (value, "CPU:0")], options)
    assert both[0].primary.tolist() == [1, 1] and both[1].tolist() == [1, 1]
    assert extended.reduce_to("mean", value, "CPU:1", experimental_hints=options).tolist() == [1, 1]
    assert extended.batch_reduce_to("mean", [(value, "CPU:0")], experimental_hints=options)[0].tolist() == [1, 1]
    everywhere = extended.broadcast_to(np.ones(2))
    assert [device[-5:] for device in everywhere.devices] == CPUS
    assert extended.broadcast_to(np.ones(2), "CPU:0").tolist() == [1, 1]
    assert extended.broadcast_to(3) == 3 and extended.broadcast_to(2.5, "CPU:0") == 2.5


def test_replicas_on_several_workers(here: cd.Session) -> None:
    strategy = cd.MirroredStrategy([*CPUS, "/task:1/cpu:0"], session=here)
    assert strategy.run(lambda: cd.get_replica_context().all_reduce("sum", 1)).values == (4,) * 4


def test_strategies_run_side_by_side(here: cd.Session) -> None:
    strategies = [cd.MirroredStrategy(CPUS, session=here) for _ in range(4)]
    found: list[Any] = []

    def run(strategy: cd.MirroredStrategy) -> None:
        for _ in range(5):
            found.append(strategy.run(lambda: cd.get_replica_context().all_reduce("sum", 1)).values)

    threads = [threading.Thread(target=run, args=(strategy,)) for strategy in strategies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [(3, 3, 3)] * 20


PROCESS = """
import sys, numpy as np, collectived as tf
context = tf.distribute.get_replica_context()
assert tf.distribute.get_replica_context() is context
me = context.replica_id_in_sync_group
value = {"a": [np.full(3, me), None], "b": (float(me), np.ones((2, 2), np.float16))}
summed = context.all_reduce("SUM", value, tf.CommunicationOptions(timeout_seconds=20))
print(me, context.num_replicas_in_sync, summed["a"][0].tolist(), summed["a"][1], summed["b"][0])
"""


def outputs(cluster: Any, group: str, program: str, size: int = 2) -> list[list[str]]:
    processes = [cluster.client(rank, size, group, program) for rank in range(size)]
    found = [process.communicate(timeout=40) for process in processes]
    assert [(process.returncode, err) for process, (_, err) in zip(processes, found, strict=True)] == [(0, "")] * size
    return [out.splitlines() for out, _ in found]


def test_a_process_is_a_replica_of_the_group_that_its_environment_names(two_workers: Any) -> None:
    for rank, (line,) in enumerate(outputs(two_workers, "by environment", PROCESS)):
        assert line == f"{rank} 2 [1, 1, 1] None 1.0"


GATHERING = """
import numpy as np, collectived as tf
context = tf.distribute.get_replica_context()
me = context.replica_id_in_sync_group
print(context.all_gather(np.full((2, me + 1), me), 1).tolist())
"""


def test_replicas_gather_along_an_axis(two_workers: Any) -> None:
    assert outputs(two_workers, "gathering", GATHERING) == [["[[0, 1, 1], [0, 1, 1]]"]] * 2


FAILING = """
import sys, collectived as tf
options = tf.CommunicationOptions(timeout_seconds=0.3)
first = tf.distribute.get_replica_context()
if first.replica_id_in_sync_group == 1:
    sys.stdin.readline()  # until the other one has waited in vain
assert tf.distribute.get_replica_context() is first  # nothing has been told here
try:
    first.all_reduce("sum", 1, options)
except tf.errors.DeadlineExceededError as error:
    print([member.rank for member in error.missing], flush=True)
assert tf.distribute.get_replica_context() is not first
print(tf.distribute.get_replica_context().all_reduce("sum", 1))
"""


def test_after_a_failure_that_was_told_a_new_context_joins_again(two_workers: Any) -> None:
    waiting, late = (two_workers.client(rank, 2, "failing", FAILING) for rank in range(2))
    said = waiting.stdout.readline()
    found = [late.communicate("go on\n", timeout=40), waiting.communicate(timeout=40)]
    assert said == "[1]\n" and found == [("[1]\n2\n", ""), ("2\n", "")]


FORKING = """
import os, collectived as tf
context = tf.distribute.get_replica_context()
print(context.all_reduce("sum", 1), flush=True)
child = os.fork()
if not child:
    try:
        context.all_reduce("sum", 1)
    except tf.errors.FailedPreconditionError as error:
        print("in the child:", type(error).__name__, flush=True)
    os._exit(tf.distribute.get_replica_context() is context)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), context.all_reduce("sum", 1))
"""


def test_a_forked_child_has_a_context_of_its_own(two_workers: Any) -> None:
    expected = ["2", "in the child: FailedPreconditionError", "0 2"]
    assert outputs(two_workers, "forking", FORKING) == [expected] * 2


INTERRUPTED = """
import threading, collectived as tf
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
def replica():
    context = tf.distribute.get_replica_context()
    if context.replica_id_in_sync_group == 1:
        print("waiting", flush=True)
        threading.Event().wait()
    context.all_reduce("sum", 1)
try:
    strategy.run(replica)
except KeyboardInterrupt:
    print("interrupted", strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", 1)).values)
"""


def test_ctrl_c_ends_a_run_whose_replicas_wait(two_workers: Any) -> None:
    process = two_workers.client(0, 1, "unused", INTERRUPTED)
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("interrupted (2, 2)\n", "")
    assert process.returncode == 0
