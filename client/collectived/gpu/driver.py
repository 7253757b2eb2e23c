"""The seam to CUDA: what a client asks of it, in raw integers.

A client copies between its own arrays and memory of its worker; the work itself is the worker's. `driver_cuda.py`
speaks to the driver, and is imported at the first array on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from collectived_proto.ipc.gpu import Allocation as Allocation
from collectived_proto.ipc.gpu import CudaError as CudaError

INSTALL_HINT = "pip install 'collectived[cuda12]', or [cuda13] for CUDA 13"


class Cuda(Protocol):
    """Devices are numbered as in this process, streams are the driver's handles. Every method may raise CudaError."""

    def device_uuids(self) -> Sequence[str]:
        """UUIDs of the GPUs that this process may use."""

    def map(self, device: int, descriptor: int, size: int) -> int:
        """The address of memory that a worker has handed over; the descriptor is taken over."""

    def unmap(self, device: int, address: int, size: int) -> None:
        """Lets go of it, after what this process has under way on the device."""

    def find_allocation(self, address: int) -> Allocation:
        """The allocation of this process in which an address lies."""

    def get_ipc_handle(self, device: int, address: int) -> bytes:
        """The handle of 64 bytes by which another process can open an exportable allocation, which begins there."""

    def copy(self, device: int, target: int, source: int, nbytes: int, stream: int) -> None:
        """Between any memories of device and host, after what is on the stream.

        Ordinary memory of the host has been read when this returns; pinned memory has not.
        """

    def create_stream(self, device: int) -> int:
        """A new stream, whose work waits for that of no other one."""

    def destroy_stream(self, stream: int) -> None:
        """After what is on it."""

    def create_event(self, device: int) -> tuple[int, bytes]:
        """A new event, and the handle of 64 bytes by which another process may wait for it."""

    def open_event(self, device: int, handle: bytes) -> int:
        """The event of the worker that this handle of 64 bytes names. The first time it may wait for the device."""

    def destroy_event(self, event: int) -> None: ...

    def record_event(self, device: int, event: int, stream: int) -> None:
        """The event is over when all work that is on the stream now is done."""

    def wait_event(self, device: int, event: int, stream: int) -> None:
        """Make later work on the stream wait for the event, as it was recorded last until now."""

    def is_event_done(self, event: int) -> bool:
        """Whether it is, without waiting."""

    def synchronize(self, device: int, stream: int) -> None:
        """Returns when all work that is on the stream is done."""


_lock = threading.Lock()
_cuda: Cuda | None = None


def get_cuda() -> Cuda:
    """The interface through which this process uses GPUs.

    Raises:
        CudaError: there is no driver, or the bindings are not installed.
    """
    global _cuda
    with _lock:
        if _cuda is None:
            try:
                from collectived.gpu.driver_cuda import ClientDriverCuda
            except ImportError as error:
                raise CudaError("import cuda.bindings", -1, f"{error}: {INSTALL_HINT}") from None
            _cuda = ClientDriverCuda()
        return _cuda


def set_cuda(cuda: Cuda | None) -> None:
    """From here on this process speaks to GPUs by `cuda`; None: by the driver, as it would have."""
    global _cuda
    _cuda = cuda
