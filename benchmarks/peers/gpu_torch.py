"""PyTorch's own backend of NCCL: `all_reduce` in place, and a wait for the current stream."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_rank import time_calls
from benchmarks.gpu_values import ITEM, count_wrong, fill

_LIMIT = timedelta(seconds=30)


class Sum:
    def __init__(self, peer: Torch, nbytes: int) -> None:
        self._peer = peer
        self._tensor = torch.empty(nbytes // ITEM, dtype=torch.float32, device=peer.device)

    def measure(self, calls: int) -> list[float]:
        return time_calls(self._call, calls)

    def count_wrong(self) -> int:
        fill(self._tensor, self._peer.rank)
        self._call()
        wrong = count_wrong(self._tensor, self._peer.size)
        self._tensor.zero_()  # sums of sums stay what they are
        return wrong

    def _call(self) -> None:
        dist.all_reduce(self._tensor)
        if self._tensor.is_cuda:
            torch.cuda.current_stream().synchronize()


class Torch:
    """One rank of the default process group."""

    def __init__(self, backend: str = "nccl", device: str = "cuda:0") -> None:
        self.device = torch.device(device)
        chosen: dict[str, Any] = {}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            chosen["device_id"] = self.device
        dist.init_process_group(backend, timeout=_LIMIT, **chosen)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.versions = {"torch": torch.__version__}
        if backend == "nccl":
            self.versions["NCCL of torch"] = ".".join(map(str, torch.cuda.nccl.version()))

    def trial(self, nbytes: int, variant: str) -> Sum:
        return Sum(self, nbytes)

    def close(self) -> None:
        dist.destroy_process_group()


def start() -> Torch:
    return Torch(os.environ.get("COLLECTIVED_BENCH_BACKEND", "nccl"), os.environ.get("COLLECTIVED_BENCH_ON", "cuda:0"))
