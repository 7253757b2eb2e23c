"""Packs by hint, as programs of r2.3 asked for them; `import collectived as tf` is all that was changed:

    collectived launch --clients 2 -- python examples/seeds/hints.py

Each replica has the gradients of its share of every batch; their sum is that of the whole batch.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

import collectived as tf

STEPS, PER_REPLICA = 60, 16
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


def main() -> None:
    context = tf.distribute.get_replica_context()
    replica, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    hints = tf.distribute.experimental.CollectiveHints(bytes_per_pack=50 * 1024 * 1024)
    optimizer = SGD(0.1)
    vars = [np.zeros((3, 1)), np.zeros(1)]
    for step in range(STEPS):
        x, y = batch(step, replica)
        errors = (x @ vars[0] + vars[1] - y) * 2 / (PER_REPLICA * replicas)
        grads = [x.T @ errors, errors.sum(axis=0)]
        grads = tf.distribute.get_replica_context().all_reduce("sum", grads, experimental_hints=hints)
        optimizer.apply_gradients(zip(grads, vars, strict=True), experimental_aggregate_gradients=False)
    print(f"replica {replica} of {replicas}: weights {np.round(vars[0].ravel(), 6)} bias {vars[1][0]:.6f}")


if __name__ == "__main__":
    main()
