"""Gloo, as `torch.distributed` has it, over the loopback."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from benchmarks.cases import ALL_REDUCE, Case
from benchmarks.trial import Arrays, make_exchange


class Gloo:
    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._dist.init_process_group("gloo")
        self.versions = {"torch": str(self._torch.__version__)}

    def trial(self, case: Case, variant: str) -> Arrays:
        """Tensors that are summed in place. Many are put together by Gloo itself."""
        trial = Arrays(case, self.rank, self.size, in_place=case.operation == ALL_REDUCE)
        inputs, outputs = ([self._torch.from_numpy(one) for one in arrays] for arrays in (trial.inputs, trial.outputs))
        trial.call = self._many(inputs) if case.tensors > 1 else self._one(case.operation, inputs[0], outputs[0])
        return trial

    def _many(self, tensors: list[Any]) -> Callable[[], object]:
        return lambda: self._dist.all_reduce_coalesced(tensors)

    def _one(self, operation: str, value: Any, out: Any) -> Callable[[], object]:
        dist, is_root, neighbour = self._dist, self.rank == 0, self.rank ^ 1
        gathered = list(out.chunk(self.size)) if operation == "gather" and is_root else None
        pieces = list(value.chunk(self.size)) if operation == "scatter" and is_root else None

        calls: dict[str, Callable[[], object]] = {
            ALL_REDUCE: lambda: dist.all_reduce(value),
            "broadcast": lambda: dist.broadcast(value, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(out, value),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, value),
            "all_to_all": lambda: dist.all_to_all_single(out, value),
            "gather": lambda: dist.gather(value, gathered),
            "scatter": lambda: dist.scatter(out, pieces),
            "send_recv": make_exchange(
                self.rank, lambda: dist.send(value, neighbour), lambda: dist.recv(out, neighbour)
            ),
            "barrier": lambda: dist.barrier(),
        }
        return calls[operation]

    def close(self) -> None:
        self._dist.destroy_process_group()


def start() -> Gloo:
    return Gloo()
