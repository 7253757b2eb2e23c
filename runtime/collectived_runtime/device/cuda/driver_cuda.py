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
from collectived_runtime.device.cuda import compiler, kernels
from collectived_runtime.device.cuda.driver import CudaError, Device, FoldSpec

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


class DriverCuda:
    """A `Cuda`.

    Raises:
        CudaError: there is no driver, or no GPU that this process may use.
    """

    def __init__(self) -> None:
        self._gpus: dict[int, _Gpu] = {}
        self._allocations: dict[int, _Allocation] = {}
        self._device_of: dict[int, int] = {}  # of streams
        self._kernels: dict[tuple[int, FoldSpec, int, int], Any] = {}  # int: device, sources, outputs
        self._lock = threading.RLock()  # over all four; memory may be freed wherever its last holder goes
        self._here = threading.local()  # the device whose context is current in a thread
        self._devices = tuple(_describe(number) for number in range(init_driver()))

    def devices(self) -> Sequence[Device]:
        return self._devices

    def set_device(self, device: int) -> None:
        self._make_current(device)

    def allocate(self, device: int, size: int) -> tuple[int, int]:
        self._make_current(device)
        wish = driver.CUmemAllocationProp()
        wish.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wish.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wish.location.id = device
        wish.requestedHandleTypes = POSIX_DESCRIPTOR
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        (page,) = call_driver("cuMemGetAllocationGranularity", wish, least)
        size = -(-max(1, size) // page) * page
        (handle,) = call_driver("cuMemCreate", size, wish, 0)
        try:
            address = map_allocation(handle, size, device)
        except CudaError:
            call_driver("cuMemRelease", handle)
            raise
        with self._lock:
            self._allocations[address] = _Allocation(handle, size)
        return address, size

    def export(self, address: int) -> int:
        (descriptor,) = call_driver(
            "cuMemExportToShareableHandle", self._allocations[address].handle, POSIX_DESCRIPTOR, 0
        )
        os.set_inheritable(int(descriptor), False)
        return int(descriptor)

    def free(self, address: int) -> None:
        with self._lock:
            allocation = self._allocations.pop(address)
        unmap_allocation(address, allocation.size)
        call_driver("cuMemRelease", allocation.handle)

    def open_memory(self, device: int, handle: bytes) -> tuple[int, int]:
        self._make_current(device)
        named = driver.CUipcMemHandle()
        ctypes.memmove(named.getPtr(), handle, len(handle))
        lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        (opened,) = call_driver("cuIpcOpenMemHandle", named, lazily)
        address = int(opened)
        try:
            found = find_allocation(address)
            if found.device != device:
                raise CudaError("cuIpcOpenMemHandle", -1, f"it lies on device {found.device} instead of {device}")
        except CudaError:
            call_driver("cuIpcCloseMemHandle", address)
            raise
        return address, found.address + found.size - address

    def close_memory(self, device: int, address: int) -> None:
        self._make_current(device)
        call_driver("cuIpcCloseMemHandle", address)

    def pin(self, size: int) -> int:
        self._make_current(next(iter(self._gpus), 0))
        portable = driver.CU_MEMHOSTALLOC_PORTABLE
        (address,) = call_driver("cuMemHostAlloc", max(1, size), portable)
        return int(address)

    def unpin(self, address: int) -> None:
        self._make_current(next(iter(self._gpus), 0))
        call_driver("cuMemFreeHost", address)

    def create_stream(self, device: int) -> int:
        self._make_current(device)
        (stream,) = call_driver("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        with self._lock:
            self._device_of[int(stream)] = device
        return int(stream)

    def destroy_stream(self, stream: int) -> None:
        with self._lock:
            self._device_of.pop(stream)
        call_driver("cuStreamDestroy", driver.CUstream(stream))

    def create_event(self, device: int) -> int:
        self._make_current(device)
        (event,) = call_driver("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        return int(event)

    def create_shared_event(self, device: int) -> tuple[int, bytes]:
        self._make_current(device)
        return create_ipc_event()

    def open_event(self, device: int, handle: bytes) -> int:
        self._make_current(device)
        return open_ipc_event(handle)

    def destroy_event(self, event: int) -> None:
        call_driver("cuEventDestroy", driver.CUevent(event))

    def record(self, event: int, stream: int) -> None:
        self._make_current(self._device_of[stream])
        call_driver("cuEventRecord", driver.CUevent(event), driver.CUstream(stream))

    def is_event_done(self, event: int) -> bool:
        return is_event_done(event)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._make_current(self._device_of[stream])
        if nbytes:
            call_driver("cuMemcpyAsync", target, source, nbytes, driver.CUstream(stream))

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        self._make_current(self._device_of[stream])
        call_driver("cuMemsetD8Async", address, 0, nbytes, driver.CUstream(stream))

    def fold(self, fold: FoldSpec, sources: Sequence[int], outs: Sequence[int], count: int, stream: int) -> None:
        if not count:
            return
        device = self._device_of[stream]
        self._make_current(device)
        kernel = self._kernel(device, fold, len(sources), len(outs))
        rows = (ctypes.c_uint64 * (len(sources) + len(outs)))(*sources, *outs)
        packs = count // kernels.pack_width(fold) if all(at % kernels.PACK_BYTES == 0 for at in rows) else 0
        arguments = (rows, ctypes.c_uint64(count), ctypes.c_uint64(packs), ctypes.c_double(fold.contributions))
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        threads = packs or count
        blocks = min(-(-threads // _THREADS), self._gpus[device].processors * _BLOCKS_PER_PROCESSOR)
        grid, block = (blocks, 1, 1), (_THREADS, 1, 1)
        call_driver("cuLaunchKernel", kernel, *grid, *block, 0, driver.CUstream(stream), ctypes.addressof(pointers), 0)

    def _kernel(self, device: int, fold: FoldSpec, sources: int, outs: int) -> Any:
        key = (device, fold, sources, outs)
        found = self._kernels.get(key)
        if found is None:
            try:
                source = kernels.generate_source(fold, sources, outs)
                code = compiler.compile_ptx(source, self._gpus[device].capability)
            except RuntimeError as error:
                raise CudaError("nvrtcCompileProgram", -1, str(error)) from None
            (module,) = call_driver("cuModuleLoadData", code)
            (found,) = call_driver("cuModuleGetFunction", module, kernels.KERNEL_NAME.encode())
            self._kernels[key] = found
        return found

    def _make_current(self, device: int) -> None:
        """Make a device current in this thread."""
        if getattr(self._here, "device", None) == device:
            return
        with self._lock:
            if device not in self._gpus:
                self._gpus[device] = _open(device)
        call_driver("cuCtxSetCurrent", self._gpus[device].context)
        self._here.device = device


def _open(device: int) -> _Gpu:
    (handle,) = call_driver("cuDeviceGet", device)
    context = retain_primary_context(device)
    attribute = driver.CUdevice_attribute
    major, minor, processors = (
        int(call_driver("cuDeviceGetAttribute", which, handle)[0])
        for which in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    )
    return _Gpu(handle, context, (major, minor), processors)


def _describe(number: int) -> Device:
    (handle,) = call_driver("cuDeviceGet", number)
    (name,) = call_driver("cuDeviceGetName", 128, handle)
    (total,) = call_driver("cuDeviceTotalMem", handle)
    (pci,) = call_driver("cuDeviceGetPCIBusId", 32, handle)
    return Device(number, get_uuid(number), _text(name), int(total), _text(pci))


def _text(data: bytes) -> str:
    return bytes(data).split(b"\0")[0].decode(errors="replace").strip()
