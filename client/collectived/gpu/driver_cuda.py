"""The driver itself, by `cuda-bindings`."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
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
        before = self._make_current(device)
        try:
            (handle,) = call_driver("cuMemImportFromShareableHandle", descriptor, POSIX_DESCRIPTOR)
            try:
                return map_allocation(handle, size, device)
            finally:
                call_driver("cuMemRelease", handle)  # the mapping keeps the memory
        finally:
            os.close(descriptor)
            call_driver("cuCtxSetCurrent", before)

    def unmap(self, device: int, address: int, size: int) -> None:
        before = self._make_current(device)
        try:
            call_driver("cuCtxSynchronize")
            unmap_allocation(address, size)
        finally:
            call_driver("cuCtxSetCurrent", before)

    def find_allocation(self, address: int) -> Allocation:
        (before,) = call_driver("cuCtxGetCurrent")
        if int(before):
            return find_allocation(address)
        self._make_current(next(iter(self._contexts), 0))  # this thread has none
        try:
            return find_allocation(address)
        finally:
            call_driver("cuCtxSetCurrent", before)

    def get_ipc_handle(self, device: int, address: int) -> bytes:
        before = self._make_current(device)
        try:
            (handle,) = call_driver("cuIpcGetMemHandle", address)
            return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
        finally:
            call_driver("cuCtxSetCurrent", before)

    def copy(self, device: int, target: int, source: int, nbytes: int, stream: int) -> None:
        before = self._make_current(device)
        try:
            if nbytes:
                call_driver("cuMemcpyAsync", target, source, nbytes, driver.CUstream(stream))
        finally:
            call_driver("cuCtxSetCurrent", before)

    def create_stream(self, device: int) -> int:
        before = self._make_current(device)
        try:
            (stream,) = call_driver("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            return int(stream)
        finally:
            call_driver("cuCtxSetCurrent", before)

    def destroy_stream(self, stream: int) -> None:
        call_driver("cuStreamDestroy", driver.CUstream(stream))

    def create_event(self, device: int) -> tuple[int, bytes]:
        before = self._make_current(device)
        try:
            return create_ipc_event()
        finally:
            call_driver("cuCtxSetCurrent", before)

    def open_event(self, device: int, handle: bytes) -> int:
        before = self._make_current(device)
        try:
            return open_ipc_event(handle)
        finally:
            call_driver("cuCtxSetCurrent", before)

    def destroy_event(self, event: int) -> None:
        call_driver("cuEventDestroy", driver.CUevent(event))

    def record_event(self, device: int, event: int, stream: int) -> None:
        before = self._make_current(device)
        try:
            call_driver("cuEventRecord", driver.CUevent(event), driver.CUstream(stream))
        finally:
            call_driver("cuCtxSetCurrent", before)

    def wait_event(self, device: int, event: int, stream: int) -> None:
        before = self._make_current(device)
        try:
            call_driver("cuStreamWaitEvent", driver.CUstream(stream), driver.CUevent(event), 0)
        finally:
            call_driver("cuCtxSetCurrent", before)

    def is_event_done(self, event: int) -> bool:
        return is_event_done(event)

    def synchronize(self, device: int, stream: int) -> None:
        before = self._make_current(device)
        try:
            call_driver("cuStreamSynchronize", driver.CUstream(stream))
        finally:
            call_driver("cuCtxSetCurrent", before)

    def _make_current(self, device: int) -> Any:
        """Makes a device current; the caller's context, which is to be current again afterwards."""
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = retain_primary_context(device)
        (before,) = call_driver("cuCtxGetCurrent")
        call_driver("cuCtxSetCurrent", self._contexts[device])
        return before
