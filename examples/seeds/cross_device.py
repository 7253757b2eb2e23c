"""Cross-device operations of a MirroredStrategy, chosen by hand; `import collectived as tf` is all that was changed:

    collectived launch --clients 1 -- python examples/seeds/cross_device.py

One process, one thread per device; every operation must lead to the same weights.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

import collectived as tf

STEPS, PER_REPLICA = 60, 16
DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2"]
TRUE_WEIGHTS = np.array([[2.0], [-1.0], [0.5]])


class SGD:
    """Plain gradient descent on arrays, with the interface of the seeds' optimizers."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], experimental_aggregate_gradients: bool = True
    ) -> None:
        grads, variables = zip(*grads_and_vars, strict=True)
        if experimental_aggregate_gradients:
            grads = tf.distribute.get_replica_context().all_reduce("sum", grads)
        for grad, variable in zip(grads, variables, strict=True):
            variable -= self.learning_rate * grad


def batch(step: int, replica: int) -> tuple[Any, Any]:
    x = np.random.default_rng([step, replica]).standard_normal((PER_REPLICA, 3))
    return x, x @ TRUE_WEIGHTS + 0.25


def train(cross_device_ops: tf.CrossDeviceOps) -> None:
    strategy = tf.distribute.MirroredStrategy(devices=DEVICES, cross_device_ops=cross_device_ops)
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        optimizer = SGD(0.1)
        vars = [strategy.extended.broadcast_to(np.zeros(shape)) for shape in ((3, 1), (1,))]

    def replica_step(step: int, vars: list[Any]) -> float:
        x, y = batch(step, tf.distribute.get_replica_context().replica_id_in_sync_group)
        errors = x @ vars[0] + vars[1] - y
        scaled = errors * 2 / (PER_REPLICA * replicas)
        optimizer.apply_gradients(zip([x.T @ scaled, scaled.sum(axis=0)], vars, strict=True))
        return float((errors**2).mean())

    for step in range(STEPS):
        losses = strategy.run(replica_step, args=(step, vars))
    loss = strategy.reduce(tf.distribute.ReduceOp.MEAN, losses)
    assert all(np.array_equal(weights, vars[0].primary) for weights in vars[0].values)
    weights, bias = np.round(vars[0].primary.ravel(), 6), vars[1].primary[0]
    print(f"{type(cross_device_ops).__name__}: weights {weights} bias {bias:.6f} loss {loss:.2e}")


if __name__ == "__main__":
    train(tf.distribute.HierarchicalCopyAllReduce(num_packs=2))
    train(tf.distribute.NcclAllReduce())
    train(tf.distribute.ReductionToOneDevice(accumulation_fn=sum))
