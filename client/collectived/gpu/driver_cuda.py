"""The driver itself, by `cuda-bindings`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from cuda.bindings import driver

from collectived_proto.ipc.cuda import (
    POSIX_DESCRIPTOR,
    call_driver,
    create_ipc_event,
    find_allocation,
    get_uuid,
    init_driver,
    is_event_done,
    map_allocation,
    open_ipc_event,
    retain_primary_context,
    unmap_allocation,
)
from collectived_proto.ipc.gpu import HANDLE_BYTES, Allocation


class ClientDriverCuda:
    """A `Cuda`.

    Raises:
        CudaError: there is no driver, or no GPU that this process may use.
    """

    def __init__(self) -> None:
        self._uuids = tuple(get_uuid(number) for number in range(init_driver()))
        self._contexts: dict[int, Any] = {}
        self._lock = threading.Lock()

    def device_uuids(self) -> Sequence[str]:
        return self._uuids

    def map(self, device: int, descriptor: int, size: int) -> int:
        with self._use_device(device):
            try:
                (handle,) = call_driver("cuMemImportFromShareableHandle", descriptor, POSIX_DESCRIPTOR)
                try:
                    return map_allocation(handle, size, device)
                finally:
                    call_driver("cuMemRelease", handle)  # the mapping keeps the memory
            finally:
                os.close(descriptor)

    def unmap(self, device: int, address: int, size: int) -> None:
        with self._use_device(device):
            call_driver("cuCtxSynchronize")
            unmap_allocation(address, size)

    def find_allocation(self, address: int) -> Allocation:
        (before,) = call_driver("cuCtxGetCurrent")
        if int(before):
            return find_allocation(address)
        with self._use_device(next(iter(self._contexts), 0)):  # this thread has none
            return find_allocation(address)

    def get_ipc_handle(self, device: int, address: int) -> bytes:
        with self._use_device(device):
            (handle,) = call_driver("cuIpcGetMemHandle", address)
            return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def copy(self, device: int, target: int, source: int, nbytes: int, stream: int) -> None:
        with self._use_device(device):
            if nbytes:
                call_driver("cuMemcpyAsync", target, source, nbytes, driver.CUstream(stream))

    def create_stream(self, device: int) -> int:
        with self._use_device(device):
            (stream,) = call_driver("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            return int(stream)

    def destroy_stream(self, stream: int) -> None:
        call_driver("cuStreamDestroy", driver.CUstream(stream))

    def create_event(self, device: int) -> tuple[int, bytes]:
        with self._use_device(device):
            return create_ipc_event()

    def open_event(self, device: int, handle: bytes) -> int:
        with self._use_device(device):
            return open_ipc_event(handle)

    def destroy_event(self, event: int) -> None:
        call_driver("cuEventDestroy", driver.CUevent(event))

    def record_event(self, device: int, event: int, stream: int) -> None:
        with self._use_device(device):
            call_driver("cuEventRecord", driver.CUevent(event), driver.CUstream(stream))

    def wait_event(self, device: int, event: int, stream: int) -> None:
        with self._use_device(device):
            call_driver("cuStreamWaitEvent", driver.CUstream(stream), driver.CUevent(event), 0)

    def is_event_done(self, event: int) -> bool:
        return is_event_done(event)

    def synchronize(self, device: int, stream: int) -> None:
        with self._use_device(device):
            call_driver("cuStreamSynchronize", driver.CUstream(stream))

    @contextlib.contextmanager
    def _use_device(self, device: int) -> Iterator[None]:
        """Make a device current, and the caller's context again afterwards."""
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = retain_primary_context(device)
        (before,) = call_driver("cuCtxGetCurrent")
        call_driver("cuCtxSetCurrent", self._contexts[device])
        try:
            yield
        finally:
            call_driver("cuCtxSetCurrent", before)
