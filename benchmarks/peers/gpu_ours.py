"""collectived itself, on one GPU of its worker."""

from __future__ import annotations

import os
from typing import Any

import collectived as cd
from benchmarks.gpu_rank import time_calls
from benchmarks.gpu_values import ITEM, count_wrong, fill
from benchmarks.peers import CUPY, OWNED, TORCH

HINT, DEVICE = "COLLECTIVED_BENCH_HINT", "COLLECTIVED_BENCH_DEVICE"  # variables that name both
_LIMIT = 25.0  # seconds for a collective, and for a join


class Sum:
    """Blocking sums of one array, whose results are memory of the session; each is let go of when the next is there."""

    def __init__(self, peer: Ours, nbytes: int, variant: str) -> None:
        self._peer = peer
        self._value = peer.make(nbytes // ITEM, variant)
        self._result: Any = None

    def measure(self, calls: int) -> list[float]:
        return time_calls(self._call, calls)

    def count_wrong(self) -> int:
        fill(self._value, self._peer.rank)
        self._call()
        return count_wrong(self._result, self._peer.size)

    def _call(self) -> None:
        self._result = None
        self._result = self._peer.group.all_reduce("sum", self._value)


class Ours:
    def __init__(self, hint: str = "AUTO", device: str = "GPU:0") -> None:
        """`hint`: the name of a `CommunicationImplementation`."""
        self.device = device
        self.session = cd.connect()
        implementation = cd.CommunicationImplementation[hint]
        options = cd.CommunicationOptions(implementation=implementation, timeout_seconds=_LIMIT)
        self.group = self.session.join(device=self.device, options=options, timeout=_LIMIT)
        self.rank, self.size = self.group.rank, self.group.size
        self.versions = {"collectived": cd.__version__}

    def make(self, count: int, variant: str) -> Any:
        """An array of so many float32 on the GPU."""
        if variant == TORCH:
            import torch

            return torch.empty(count, dtype=torch.float32, device="cuda")
        if variant == CUPY:
            import cupy

            self.versions["CuPy"] = cupy.__version__
            return cupy.empty(count, cupy.float32)
        assert variant == OWNED, variant
        return self.session.empty(count, device=self.device)

    def trial(self, nbytes: int, variant: str) -> Sum:
        return Sum(self, nbytes, variant)

    def close(self) -> None:
        self.group.leave()
        self.session.close()


def start() -> Ours:
    return Ours(os.environ.get(HINT, "AUTO"), os.environ.get(DEVICE, "GPU:0"))
