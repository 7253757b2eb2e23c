"""MultiWorkerMirroredStrategy: a process per replica, and the strategy that a thread is in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.e2e.conftest import Cluster

import collectived as tf

TRAINED = """
import numpy as np
import collectived as tf

options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1 << 20, timeout_seconds=30)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def step(batch, *, scale):
    assert tf.distribute.get_strategy() is strategy
    context = tf.distribute.get_replica_context()
    mine = context.replica_id_in_sync_group + 1.0
    return context.all_reduce("mean", mine * scale), np.full((1, 2), mine), batch


def report(*values):
    print(*values, flush=True)


mean, row, batch = strategy.run(step, args=(tf.PerReplica([7.0]),), kwargs={"scale": 2})
report(strategy.num_replicas_in_sync, mean, batch)
report(strategy.reduce("sum", {"row": row})["row"].tolist(), strategy.reduce("mean", tf.PerReplica([row])).tolist())
rank = tf.distribute.get_replica_context().replica_id_in_sync_group
uneven = np.arange(rank + 1.0)
report(strategy.reduce("sum", uneven, axis=0), strategy.reduce("mean", uneven, axis=0))
report(strategy.gather(row, axis=0).tolist())
report(strategy.experimental_local_results(row) == (row,), strategy.experimental_local_results(tf.PerReplica([1])))
report(strategy.extended.reduce_to("sum", row, "CPU:0").tolist())
report([one.tolist() for one in strategy.extended.batch_reduce_to("mean", [(row, row), (row, "CPU:0")])])
report(strategy.extended.broadcast_to(row).tolist(), strategy.reduce("mean", tf.Mirrored([3.0])))
with strategy.scope():
    assert tf.distribute.get_strategy() is strategy
assert tf.distribute.get_strategy() is not strategy
report(tf.distribute.get_strategy().num_replicas_in_sync)
"""
SAID = """
2 3.0 7.0
[[3.0, 3.0]] [[1.5, 1.5]]
1.0 0.3333333333333333
[[1.0, 1.0], [2.0, 2.0]]
True (1,)
[[3.0, 3.0]]
[[[1.5, 1.5]], [[1.5, 1.5]]]
[[1.0, 1.0]] 3.0
2
"""


def test_every_process_is_a_replica(two_workers: Cluster) -> None:
    clients = [two_workers.client(rank, 2, "multi-worker", TRAINED) for rank in range(2)]
    said = [client.communicate(timeout=60) for client in clients]
    assert [client.returncode for client in clients] == [0, 0], said
    assert [out.strip() for out, _ in said] == [SAID.strip()] * 2


def test_options_of_the_strategy_hold_for_its_calls(one_worker: Cluster) -> None:
    program = """
import collectived as tf

options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=0.3)
strategy = tf.distribute.MultiWorkerMirroredStrategy(options)
if strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group) == 0:
    try:
        strategy.reduce("sum", 1.0)
    except tf.errors.DeadlineExceededError as error:
        print("within 0.3 s" in str(error))
else:
    input()
"""
    clients = [one_worker.client(rank, 2, "strategy-options", program) for rank in range(2)]
    assert clients[0].stdout is not None and clients[0].stdout.readline() == "True\n"
    for client in clients:
        client.communicate("\n", timeout=60)
        assert client.returncode == 0


def test_arguments_that_make_no_sense_are_refused_at_once() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    two = tf.PerReplica([1.0, 2.0])
    calls: list[Callable[[], Any]] = [
        lambda: strategy.run(print, (two,)),
        lambda: strategy.reduce("sum", two),
        lambda: strategy.gather([two], 0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="a PerReplica of 2 components was given: a process has one replica"):
            call()
    with pytest.raises(ValueError, match="cross-device operations are sum and mean"):
        strategy.reduce("min", 1.0)
    with pytest.raises(ValueError, match="the sum of a Mirrored value"):
        strategy.reduce("sum", tf.Mirrored([1.0]))
    with pytest.raises(RuntimeError, match="inside of run"):
        strategy.run(lambda: strategy.run(lambda: None))
    with pytest.raises(TypeError, match="options must be CommunicationOptions"):
        tf.distribute.MultiWorkerMirroredStrategy(3)  # type: ignore[arg-type]


def test_a_mirrored_strategy_is_the_one_of_its_replicas_and_of_its_scope(one_worker: Cluster) -> None:
    with tf.connect(one_worker.addresses[0]) as session:
        strategy = tf.MirroredStrategy(
            ["/job:localhost/task:0/device:CPU:0", "/job:chief/device:CPU:1"], session=session
        )
        mine = strategy.run(lambda: tf.distribute.get_strategy() is strategy)
        assert strategy.experimental_local_results(mine) == (True, True)
        with strategy.scope():
            assert tf.distribute.get_strategy() is strategy
    assert isinstance(tf.distribute.get_strategy(), tf.MultiWorkerMirroredStrategy)


def test_asking_for_the_strategy_joins_nothing() -> None:
    asked = "import collectived as tf; print(type(tf.distribute.get_strategy()).__name__)"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert found.stdout == "MultiWorkerMirroredStrategy\n", found.stderr
