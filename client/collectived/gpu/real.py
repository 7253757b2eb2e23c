"""The driver itself, by `cuda-bindings`."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

from collectived_proto.local.cuda import (
    POSIX_DESCRIPTOR,
    asked,
    begin,
    described,
    mapped,
    opened_event,
    over,
    primary_context,
    shared_event,
    unmapped,
    uuid,
)
from collectived_proto.local.gpu import HANDLE_BYTES, Allocation


class RealCuda:
    """A `Cuda`.

    Raises:
        CudaError: there is no driver, or no GPU that this process may use.
    """

    def __init__(self) -> None:
        self._uuids = tuple(uuid(number) for number in range(begin()))
        self._contexts: dict[int, Any] = {}
        self._lock = threading.Lock()

    def devices(self) -> Sequence[str]:
        return self._uuids

    def map(self, device: int, descriptor: int, size: int) -> int:
        before = self._enter(device)
        try:
            (handle,) = asked("cuMemImportFromShareableHandle", descriptor, POSIX_DESCRIPTOR)
            try:
                return mapped(handle, size, device)
            finally:
                asked("cuMemRelease", handle)  # the mapping keeps the memory
        finally:
            os.close(descriptor)
            asked("cuCtxSetCurrent", before)

    def unmap(self, device: int, address: int, size: int) -> None:
        before = self._enter(device)
        try:
            asked("cuCtxSynchronize")
            unmapped(address, size)
        finally:
            asked("cuCtxSetCurrent", before)

    def allocation(self, address: int) -> Allocation:
        (before,) = asked("cuCtxGetCurrent")
        if int(before):
            return described(address)
        self._enter(next(iter(self._contexts), 0))  # this thread has none
        try:
            return described(address)
        finally:
            asked("cuCtxSetCurrent", before)

    def handle(self, device: int, address: int) -> bytes:
        before = self._enter(device)
        try:
            (handle,) = asked("cuIpcGetMemHandle", address)
            return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
        finally:
            asked("cuCtxSetCurrent", before)

    def copy(self, device: int, target: int, source: int, nbytes: int, stream: int) -> None:
        before = self._enter(device)
        try:
            if nbytes:
                asked("cuMemcpyAsync", target, source, nbytes, driver.CUstream(stream))
        finally:
            asked("cuCtxSetCurrent", before)

    def stream(self, device: int) -> int:
        before = self._enter(device)
        try:
            (stream,) = asked("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            return int(stream)
        finally:
            asked("cuCtxSetCurrent", before)

    def end_stream(self, stream: int) -> None:
        asked("cuStreamDestroy", driver.CUstream(stream))

    def event(self, device: int) -> tuple[int, bytes]:
        before = self._enter(device)
        try:
            return shared_event()
        finally:
            asked("cuCtxSetCurrent", before)

    def open_event(self, device: int, handle: bytes) -> int:
        before = self._enter(device)
        try:
            return opened_event(handle)
        finally:
            asked("cuCtxSetCurrent", before)

    def end_event(self, event: int) -> None:
        asked("cuEventDestroy", driver.CUevent(event))

    def record(self, device: int, event: int, stream: int) -> None:
        before = self._enter(device)
        try:
            asked("cuEventRecord", driver.CUevent(event), driver.CUstream(stream))
        finally:
            asked("cuCtxSetCurrent", before)

    def wait(self, device: int, event: int, stream: int) -> None:
        before = self._enter(device)
        try:
            asked("cuStreamWaitEvent", driver.CUstream(stream), driver.CUevent(event), 0)
        finally:
            asked("cuCtxSetCurrent", before)

    def over(self, event: int) -> bool:
        return over(event)

    def synchronize(self, device: int, stream: int) -> None:
        before = self._enter(device)
        try:
            asked("cuStreamSynchronize", driver.CUstream(stream))
        finally:
            asked("cuCtxSetCurrent", before)

    def _enter(self, device: int) -> Any:
        """Makes a device current; the caller's context, which is to be current again afterwards."""
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = primary_context(device)
        (before,) = asked("cuCtxGetCurrent")
        asked("cuCtxSetCurrent", self._contexts[device])
        return before
