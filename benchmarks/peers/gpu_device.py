"""The GPU alone, timed by its own events: a large copy, and the kernel that folds the ranks of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu_environment import driver_version
from benchmarks.gpu_values import ITEM
from benchmarks.peers import COPY
from collectived_proto.ipc.cuda import call_driver
from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.cuda.driver import FoldSpec
from collectived_runtime.device.cuda.driver_cuda import DriverCuda


class Timed:
    """Work on buffers of one size, that many times."""

    def __init__(self, cuda: DriverCuda, buffers: int, nbytes: int) -> None:
        self._cuda = cuda
        self.nbytes = nbytes
        self.stream = cuda.create_stream(0)
        self._buffers: list[int] = []
        self._events = [call_driver("cuEventCreate", 0)[0] for _ in range(2)]  # with timing
        for _ in range(buffers):
            self._buffers.append(cuda.allocate(0, nbytes)[0])
            cuda.clear(self._buffers[-1], nbytes, self.stream)
        self.work: Callable[[list[int]], object] = lambda buffers: None

    def measure(self, calls: int) -> list[float]:
        begin, end = self._events
        stream, found = _stream(self.stream), []
        for _ in range(calls):
            call_driver("cuEventRecord", begin, stream)
            self.work(self._buffers)
            call_driver("cuEventRecord", end, stream)
            call_driver("cuEventSynchronize", end)
            found.append(float(call_driver("cuEventElapsedTime", begin, end)[0]) / 1000)
        return found

    def count_wrong(self) -> int:
        """Both are tested elsewhere."""
        return 0

    def __del__(self) -> None:
        call_driver("cuStreamSynchronize", _stream(self.stream))
        for event in self._events:
            call_driver("cuEventDestroy", event)
        for address in self._buffers:
            self._cuda.free(address)
        self._cuda.destroy_stream(self.stream)


class Device:
    rank, size = 0, 1

    def __init__(self) -> None:
        self._cuda = DriverCuda()
        (device, *_) = self._cuda.devices()
        (cuda,) = call_driver("cuDriverGetVersion")
        self.versions = {
            "GPU": f"{device.name}, {device.total_bytes / (1 << 30):.0f} GiB",
            "driver": driver_version(Path("/proc/driver/nvidia/version")),
            "CUDA": f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}",
        }
        self._cuda.set_device(0)

    def trial(self, nbytes: int, variant: str) -> Timed:
        kind, _, ranks = variant.partition(" ")
        if kind == COPY:
            made = Timed(self._cuda, 2, nbytes)
            made.work = lambda buffers: self._cuda.copy(buffers[1], buffers[0], nbytes, made_stream)
        else:
            count = int(ranks)
            spec = FoldSpec(ReduceOp.SUM, DType.FLOAT32, DType.FLOAT32, count, widen=True, finish=True)
            made = Timed(self._cuda, 2 * count, nbytes)
            made.work = lambda at: self._cuda.fold(spec, at[:count], at[count:], nbytes // ITEM, made_stream)
        made_stream = made.stream
        return made

    def close(self) -> None: ...


def _stream(handle: int) -> object:
    from cuda.bindings import driver

    return driver.CUstream(handle)


def start() -> Device:
    return Device()
