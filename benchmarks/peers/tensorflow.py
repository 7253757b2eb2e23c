"""TensorFlow's RING: `MultiWorkerMirroredStrategy` over gRPC, one worker per rank, `TF_CONFIG` set by the runner."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

import numpy as np

from benchmarks.cases import Array, Case, fill


class TensorFlow:
    def __init__(self) -> None:
        self._tf: Any = importlib.import_module("tensorflow")
        cluster = json.loads(os.environ["TF_CONFIG"])
        self.rank, self.size = cluster["task"]["index"], len(cluster["cluster"]["worker"])
        experimental = self._tf.distribute.experimental
        options = experimental.CommunicationOptions(implementation=experimental.CommunicationImplementation.RING)
        self._strategy = self._tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        self.versions = {"tensorflow": str(self._tf.__version__)}

    def trial(self, case: Case, variant: str) -> Constants:
        return Constants(self._tf, self._strategy, self.rank, case)

    def close(self) -> None:
        # Its servers do not come to an end by themselves.
        os._exit(0)


class Constants:
    """Constants of TensorFlow in, tensors out, by one compiled function: many go into one call of it."""

    in_place = False

    def __init__(self, tf: Any, strategy: Any, rank: int, case: Case) -> None:
        self._tf, self._rank, self._case = tf, rank, case
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        reduce_op = tf.distribute.ReduceOp.SUM

        def replica(values: list[Any]) -> Any:
            # An argument of a function lies on no device in particular and is refused; its identity lies on one.
            placed = [tf.identity(value) for value in values]
            return tf.distribute.get_replica_context().all_reduce(reduce_op, placed)

        self._step = tf.function(lambda values: strategy.run(replica, args=(values,)))

    def fill(self, base: Array, factor: float) -> None:
        array = np.empty(self._case.count, np.float32)
        fill(array, base, self._rank, factor)
        self._inputs = [self._tf.constant(array) for _ in range(self._case.tensors)]
        self._outputs = []

    def call(self) -> None:
        self._outputs = self._step(self._inputs)

    def results(self) -> list[Array]:
        return [output.numpy() for output in self._outputs]


def start() -> TensorFlow:
    return TensorFlow()
