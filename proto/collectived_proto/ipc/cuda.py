"""CUDA's driver by `cuda-bindings`, as far as both sides of shared memory need it. Imported where there are GPUs."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver

from collectived_proto.ipc.gpu import Allocation, CudaError, uuid_text

_NOT_READY = 600
_EVENT_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
POSIX_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def call_driver(name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a function of the driver and return its results.

    Raises:
        CudaError: it refuses.
    """
    code, *found = getattr(driver, name)(*arguments)
    if int(code):
        raise make_error(name, int(code))
    return tuple(found)


def make_error(name: str, code: int) -> CudaError:
    try:
        text = driver.CUresult(code).name
    except ValueError:
        text = "an error that these bindings do not know"
    return CudaError(name, code, text)


def init_driver() -> int:
    """Load the driver; how many GPUs this process may use.

    Raises:
        CudaError: there is no driver, or no GPU.
    """
    try:
        call_driver("cuInit", 0)
    except CudaError:
        raise
    except Exception as error:  # its library is loaded at the first call
        raise CudaError("cuInit", -1, str(error)) from None
    return int(call_driver("cuDeviceGetCount")[0])


def retain_primary_context(device: int) -> Any:
    """The context that CUDA's run-time library and what is built on it use too."""
    return call_driver("cuDevicePrimaryCtxRetain", call_driver("cuDeviceGet", device)[0])[0]


def get_uuid(device: int) -> str:
    (found,) = call_driver("cuDeviceGetUuid", call_driver("cuDeviceGet", device)[0])
    return uuid_text(bytes(found.bytes))


_POINTER_ATTRIBUTES = [
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
]


def find_allocation(address: int) -> Allocation:
    """The allocation in which an address lies.

    Raises:
        CudaError: in none on a GPU; of what it does not know the driver says that it begins nowhere.
    """
    (found,) = call_driver("cuPointerGetAttributes", len(_POINTER_ATTRIBUTES), _POINTER_ATTRIBUTES, address)
    identity, base, size, device, exportable = map(int, found)
    if not base:
        raise CudaError("cuPointerGetAttributes", 1, f"{address:#x} is no memory of a GPU")
    return Allocation(identity, base, size, device, bool(exportable))


def map_allocation(handle: Any, size: int, device: int) -> int:
    """Address space for an allocation, which a device may then read and write."""
    (address,) = call_driver("cuMemAddressReserve", size, 0, 0, 0)
    try:
        call_driver("cuMemMap", address, size, 0, handle, 0)
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            call_driver("cuMemSetAccess", address, size, [access], 1)
        except CudaError:
            call_driver("cuMemUnmap", address, size)
            raise
    except CudaError:
        call_driver("cuMemAddressFree", address, size)
        raise
    return int(address)


def unmap_allocation(address: int, size: int) -> None:
    call_driver("cuMemUnmap", address, size)
    call_driver("cuMemAddressFree", address, size)


def create_ipc_event() -> tuple[int, bytes]:
    """A new event on the current device, and the handle by which another process opens it."""
    flags = driver.CUevent_flags
    (event,) = call_driver("cuEventCreate", flags.CU_EVENT_DISABLE_TIMING | flags.CU_EVENT_INTERPROCESS)
    (handle,) = call_driver("cuIpcGetEventHandle", event)
    return int(event), ctypes.string_at(handle.getPtr(), _EVENT_HANDLE_BYTES)


def open_ipc_event(handle: bytes) -> int:
    """The event of another process that this handle names. It may take until the device is idle."""
    named = driver.CUipcEventHandle()
    ctypes.memmove(named.getPtr(), handle, _EVENT_HANDLE_BYTES)
    (event,) = call_driver("cuIpcOpenEventHandle", named)
    return int(event)


def is_event_done(event: int) -> bool:
    """Whether what was recorded last has been reached.

    Raises:
        CudaError: work on the device has failed.
    """
    code = int(driver.cuEventQuery(driver.CUevent(event))[0])
    if code not in (0, _NOT_READY):
        raise make_error("cuEventQuery", code)
    return not code
