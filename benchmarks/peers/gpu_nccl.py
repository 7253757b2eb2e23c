"""Raw NCCL as nccl-tests measures it: through the binding that workers use, launch and wait for the stream.

The unique id goes from rank 0 to the others by a file in the folder that the runner gives all ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.gpu_rank import time_calls
from benchmarks.gpu_values import ITEM, count_wrong, fill
from collectived.gpu.array import DeviceArray
from collectived.gpu.driver import get_cuda
from collectived_runtime.device.cuda.driver import Cuda
from collectived_runtime.device.nccl.interface import Nccl, NcclBuffers, NcclDataType, NcclOperation

_LIMIT = 30.0  # seconds until the id is there


class Sum:
    """Sums from one buffer into another."""

    def __init__(self, peer: RawNccl, nbytes: int) -> None:
        self._peer = peer
        self._count = nbytes // ITEM
        self._addresses: list[int] = []
        for _ in range(2):
            self._addresses.append(peer.cuda.allocate(0, nbytes)[0])

    def measure(self, calls: int) -> list[float]:
        return time_calls(self._call, calls)

    def count_wrong(self) -> int:
        source, target = (self._view(address) for address in self._addresses)
        fill(source, self._peer.rank)
        self._call()
        return count_wrong(target, self._peer.size)

    def _view(self, address: int) -> DeviceArray:
        return DeviceArray(get_cuda(), 0, address, (self._count,), np.dtype(np.float32), self)

    def _call(self) -> None:
        peer, (source, target) = self._peer, self._addresses
        buffers = NcclBuffers(source, target, self._count, NcclDataType.FLOAT32)
        peer.nccl.all_reduce(buffers, NcclOperation.SUM, peer.communicator, peer.stream)
        peer.synchronize(peer.stream)

    def __del__(self) -> None:
        for address in self._addresses:
            self._peer.cuda.free(address)


class RawNccl:
    """One rank of a communicator on GPU 0.

    Args:
        synchronize: returns when what is on a stream is done.
        id_file: where rank 0 puts the unique id.
    """

    def __init__(
        self, cuda: Cuda, nccl: Nccl, synchronize: Callable[[int], object], rank: int, size: int, id_file: Path
    ) -> None:
        self.cuda, self.nccl, self.synchronize = cuda, nccl, synchronize
        self.rank, self.size = rank, size
        self.versions = {f"NCCL by {nccl.name}": format_version(nccl.version())}
        cuda.set_device(0)
        if rank == 0:
            fresh = id_file.with_suffix(".new")
            fresh.write_bytes(nccl.create_unique_id())
            fresh.rename(id_file)
        self.communicator = nccl.init(size, read_when_there(id_file), rank, blocking=True)
        self.stream = cuda.create_stream(0)

    def trial(self, nbytes: int, variant: str) -> Sum:
        return Sum(self, nbytes)

    def close(self) -> None:
        self.nccl.destroy(self.communicator)


def read_when_there(file: Path) -> bytes:
    """The text that another process writes there.

    Raises:
        TimeoutError: it does not.
    """
    end = time.monotonic() + _LIMIT
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"rank 0 has put no unique id into {file} within {_LIMIT:g} s")
        time.sleep(0.01)
    return file.read_bytes()


def format_version(number: int) -> str:
    """`2.28.9` of 22809. Pure."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def start() -> RawNccl:
    from cuda.bindings import driver

    from collectived_proto.ipc.cuda import call_driver
    from collectived_runtime.device.cuda.driver_cuda import DriverCuda
    from collectived_runtime.device.nccl.binding import load_binding

    def synchronize(stream: int) -> None:
        call_driver("cuStreamSynchronize", driver.CUstream(stream))

    environment = os.environ
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    nccl = load_binding(environment.get("COLLECTIVED_NCCL", "").replace("auto", ""))
    return RawNccl(DriverCuda(), nccl, synchronize, rank, size, Path(environment["TMPDIR"]) / "unique-id")
