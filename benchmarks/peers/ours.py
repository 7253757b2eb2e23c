"""collectived itself, under `collectived launch`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import collectived as cd
from benchmarks.cases import ALL_REDUCE, Array, Case
from benchmarks.peers import OWNED
from benchmarks.trial import Arrays, make_exchange


class Owned(Arrays):
    """Inputs in the worker's memory; the result is a view that the ranks of the host share."""

    def __init__(self, peer: Ours, case: Case) -> None:
        super().__init__(case, peer.rank, peer.size, empty=peer.session.empty)
        value = self.inputs[0] if case.tensors == 1 else self.inputs
        self._result: Any = None

        def call() -> None:
            self._result = peer.group.all_reduce("sum", value)

        self.call = call

    def fill(self, base: Array, factor: float) -> None:
        self._result = None
        super().fill(base, factor)

    def results(self) -> list[Array]:
        return self._result if isinstance(self._result, list) else [self._result]


class Ours:
    def __init__(self) -> None:
        self.session = cd.connect()
        self.group = self.session.join()
        self.rank, self.size = self.group.rank, self.group.size
        self.versions = {"collectived": cd.__version__, "numpy": np.__version__}

    def trial(self, case: Case, variant: str) -> Arrays:
        if variant == OWNED:
            return Owned(self, case)
        trial = Arrays(case, self.rank, self.size)
        inputs, outputs = trial.inputs, trial.outputs
        if case.tensors > 1:
            trial.call = lambda: self.group.all_reduce("sum", inputs, out=outputs)
        else:
            trial.call = self._one(case.operation, inputs[0], outputs[0])
        return trial

    def _one(self, operation: str, value: Array, out: Array) -> Callable[[], object]:
        group, neighbour = self.group, self.rank ^ 1

        calls: dict[str, Callable[[], object]] = {
            ALL_REDUCE: lambda: group.all_reduce("sum", value, out=out),
            "broadcast": lambda: group.broadcast(value, out=value),
            "all_gather": lambda: group.all_gather(value, out=out),
            "reduce_scatter": lambda: group.reduce_scatter("sum", value, out=out),
            "all_to_all": lambda: group.all_to_all(value, out=out),
            "gather": lambda: group.gather(value, out=out),
            "scatter": lambda: group.scatter(value, out=out),
            "send_recv": make_exchange(
                self.rank, lambda: group.send(value, neighbour), lambda: group.recv(neighbour, out=out)
            ),
            "barrier": lambda: group.barrier(),
        }
        return calls[operation]

    def rejoin(self, calls: int) -> list[float]:
        """Seconds to join a group name again whose last generation all ranks have just left."""
        times = []
        name = "again"
        self.session.join(name, self.size).leave()
        for _ in range(calls):
            self.group.barrier()
            begin = time.perf_counter()
            group = self.session.join(name, self.size)
            times.append(time.perf_counter() - begin)
            group.leave()
        return times

    def close(self) -> None:
        self.group.leave()
        self.session.close()


def start() -> Ours:
    return Ours()
