"""The driver itself, by `cuda-bindings`; kernels are compiled by NVRTC when they are first needed.

Imported only where a worker is to offer GPUs. Each device is used through its primary context, which CUDA's run-time
library, CuPy and NCCL share.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
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
from collectived_runtime.device.cuda import compiler, kernels
from collectived_runtime.device.cuda.driver import CudaError, Device, Fold

_THREADS = 256  # of a block
_BLOCKS_PER_PROCESSOR = 8


@dataclass(slots=True)
class _Allocation:
    handle: Any
    size: int


@dataclass(slots=True)
class _Gpu:
    handle: Any
    context: Any
    capability: tuple[int, int]
    processors: int


class RealCuda:
    """A `Cuda`.

    Raises:
        CudaError: there is no driver, or no GPU that this process may use.
    """

    def __init__(self) -> None:
        self._gpus: dict[int, _Gpu] = {}
        self._allocations: dict[int, _Allocation] = {}
        self._device_of: dict[int, int] = {}  # of streams
        self._kernels: dict[tuple[int, Fold, int], Any] = {}
        self._lock = threading.RLock()  # over all four; memory may be freed wherever its last holder goes
        self._here = threading.local()  # the device whose context is current in a thread
        self._devices = tuple(_describe(number) for number in range(begin()))

    def devices(self) -> Sequence[Device]:
        return self._devices

    def use(self, device: int) -> None:
        self._use(device)

    def allocate(self, device: int, size: int) -> tuple[int, int]:
        self._use(device)
        wish = driver.CUmemAllocationProp()
        wish.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wish.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wish.location.id = device
        wish.requestedHandleTypes = POSIX_DESCRIPTOR
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        (page,) = asked("cuMemGetAllocationGranularity", wish, least)
        size = -(-max(1, size) // page) * page
        (handle,) = asked("cuMemCreate", size, wish, 0)
        try:
            address = mapped(handle, size, device)
        except CudaError:
            asked("cuMemRelease", handle)
            raise
        with self._lock:
            self._allocations[address] = _Allocation(handle, size)
        return address, size

    def export(self, address: int) -> int:
        (descriptor,) = asked("cuMemExportToShareableHandle", self._allocations[address].handle, POSIX_DESCRIPTOR, 0)
        os.set_inheritable(int(descriptor), False)
        return int(descriptor)

    def free(self, address: int) -> None:
        with self._lock:
            allocation = self._allocations.pop(address)
        unmapped(address, allocation.size)
        asked("cuMemRelease", allocation.handle)

    def open_memory(self, device: int, handle: bytes) -> tuple[int, int]:
        self._use(device)
        named = driver.CUipcMemHandle()
        ctypes.memmove(named.getPtr(), handle, len(handle))
        lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        (opened,) = asked("cuIpcOpenMemHandle", named, lazily)
        address = int(opened)
        try:
            found = described(address)
            if found.device != device:
                raise CudaError("cuIpcOpenMemHandle", -1, f"it lies on device {found.device} instead of {device}")
        except CudaError:
            asked("cuIpcCloseMemHandle", address)
            raise
        return address, found.address + found.size - address

    def close_memory(self, device: int, address: int) -> None:
        self._use(device)
        asked("cuIpcCloseMemHandle", address)

    def pin(self, size: int) -> int:
        self._use(next(iter(self._gpus), 0))
        portable = driver.CU_MEMHOSTALLOC_PORTABLE
        (address,) = asked("cuMemHostAlloc", max(1, size), portable)
        return int(address)

    def unpin(self, address: int) -> None:
        self._use(next(iter(self._gpus), 0))
        asked("cuMemFreeHost", address)

    def stream(self, device: int) -> int:
        self._use(device)
        (stream,) = asked("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        with self._lock:
            self._device_of[int(stream)] = device
        return int(stream)

    def end_stream(self, stream: int) -> None:
        with self._lock:
            self._device_of.pop(stream)
        asked("cuStreamDestroy", driver.CUstream(stream))

    def event(self, device: int) -> int:
        self._use(device)
        (event,) = asked("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        return int(event)

    def shared_event(self, device: int) -> tuple[int, bytes]:
        self._use(device)
        return shared_event()

    def open_event(self, device: int, handle: bytes) -> int:
        self._use(device)
        return opened_event(handle)

    def end_event(self, event: int) -> None:
        asked("cuEventDestroy", driver.CUevent(event))

    def record(self, event: int, stream: int) -> None:
        self._use(self._device_of[stream])
        asked("cuEventRecord", driver.CUevent(event), driver.CUstream(stream))

    def over(self, event: int) -> bool:
        return over(event)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._use(self._device_of[stream])
        if nbytes:
            asked("cuMemcpyAsync", target, source, nbytes, driver.CUstream(stream))

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        self._use(self._device_of[stream])
        asked("cuMemsetD8Async", address, 0, nbytes, driver.CUstream(stream))

    def fold(self, fold: Fold, sources: Sequence[int], out: int, count: int, stream: int) -> None:
        if not count:
            return
        device = self._device_of[stream]
        self._use(device)
        kernel = self._kernel(device, fold, len(sources))
        at = (ctypes.c_uint64 * len(sources))(*sources)
        arguments = (at, ctypes.c_uint64(out), ctypes.c_uint64(count), ctypes.c_double(fold.contributions))
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        blocks = min(-(-count // _THREADS), self._gpus[device].processors * _BLOCKS_PER_PROCESSOR)
        grid, block = (blocks, 1, 1), (_THREADS, 1, 1)
        asked("cuLaunchKernel", kernel, *grid, *block, 0, driver.CUstream(stream), ctypes.addressof(pointers), 0)

    def _kernel(self, device: int, fold: Fold, count: int) -> Any:
        key = (device, fold, count)
        found = self._kernels.get(key)
        if found is None:
            try:
                code = compiler.compiled(kernels.source(fold, count), self._gpus[device].capability)
            except RuntimeError as error:
                raise CudaError("nvrtcCompileProgram", -1, str(error)) from None
            (module,) = asked("cuModuleLoadData", code)
            (found,) = asked("cuModuleGetFunction", module, kernels.NAME.encode())
            self._kernels[key] = found
        return found

    def _use(self, device: int) -> None:
        """Makes a device current in this thread."""
        if getattr(self._here, "device", None) == device:
            return
        with self._lock:
            if device not in self._gpus:
                self._gpus[device] = _open(device)
        asked("cuCtxSetCurrent", self._gpus[device].context)
        self._here.device = device


def _open(device: int) -> _Gpu:
    (handle,) = asked("cuDeviceGet", device)
    context = primary_context(device)
    attribute = driver.CUdevice_attribute
    major, minor, processors = (
        int(asked("cuDeviceGetAttribute", which, handle)[0])
        for which in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    )
    return _Gpu(handle, context, (major, minor), processors)


def _describe(number: int) -> Device:
    (handle,) = asked("cuDeviceGet", number)
    (name,) = asked("cuDeviceGetName", 128, handle)
    (total,) = asked("cuDeviceTotalMem", handle)
    (pci,) = asked("cuDeviceGetPCIBusId", 32, handle)
    return Device(number, uuid(number), _text(name), int(total), _text(pci))


def _text(data: bytes) -> str:
    return bytes(data).split(b"\0")[0].decode(errors="replace").strip()
