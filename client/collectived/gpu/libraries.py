"""Arrays of CuPy, PyTorch, JAX and others on GPUs: seen as `DeviceArray`s, and made from them.

None of these libraries is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from collectived.gpu import dlpack
from collectived.gpu.array import LEGACY_STREAM, DeviceArray
from collectived.gpu.driver import get_cuda

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_JAX_ALIGNMENT = 16  # bytes


class _CudaInterfaceView:
    """A `DeviceArray` as CuPy and PyTorch are to see it, which know no bfloat16 by this protocol."""

    def __init__(self, array: DeviceArray, dtype: np.dtype[Any]) -> None:
        self._array = array
        self.__cuda_array_interface__ = array.interface(dtype)


def stream_of_cupy(device: int) -> int:
    """The handle of the caller's current stream on a GPU."""
    cuda = sys.modules["cupy"].cuda
    with cuda.Device(device):
        return int(cuda.get_current_stream().ptr) or LEGACY_STREAM


def from_cupy(value: Any) -> DeviceArray:
    """One that looks into `value`, or into a contiguous copy of it."""
    cupy = sys.modules["cupy"]
    value = cupy.ascontiguousarray(value)
    device = value.device.id
    stream = stream_of_cupy(device)
    return DeviceArray(get_cuda(), device, value.data.ptr, tuple(value.shape), np.dtype(value.dtype), value, stream)


def to_cupy(array: DeviceArray | NDArray[Any], device: int) -> Any:
    """A CuPy array that looks into `array`, which it keeps; of one on the host, a copy on that device."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        if array.dtype != _BFLOAT16:
            return cupy.asarray(array)
        bits = np.dtype(np.int16)
        seen = _CudaInterfaceView(array, bits) if isinstance(array, DeviceArray) else array.view(bits)
        return cupy.asarray(seen).view(_BFLOAT16)


def stream_of_torch(device: int) -> int:
    """The handle of the caller's current stream on a GPU."""
    return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream) or LEGACY_STREAM


def from_torch(tensor: Any) -> DeviceArray:
    """One that looks into a tensor on a GPU, or into a contiguous copy of it, without its gradient."""
    torch, cuda = sys.modules["torch"], get_cuda()
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dtype = _BFLOAT16 if tensor.dtype is torch.bfloat16 else np.dtype(str(tensor.dtype).removeprefix("torch."))
    device = tensor.device.index
    stream = stream_of_torch(device)
    return DeviceArray(cuda, device, tensor.data_ptr(), tuple(tensor.shape), dtype, tensor, stream)


def to_torch(array: DeviceArray | NDArray[Any], device: int) -> Any:
    """A tensor that looks into `array`, which it keeps; of one on the host, a copy on that device."""
    torch = sys.modules["torch"]
    bits = np.dtype(np.int16) if array.dtype == _BFLOAT16 else array.dtype
    where = torch.device("cuda", device)
    if isinstance(array, DeviceArray):
        made = torch.as_tensor(_CudaInterfaceView(array, bits), device=where)
    else:
        made = torch.from_numpy(np.ascontiguousarray(array).view(bits)).to(where)
    return made.view(torch.bfloat16) if array.dtype == _BFLOAT16 else made


def from_dlpack(value: Any) -> DeviceArray:
    """One that looks into an array of any library that speaks DLPack, once it is written.

    The array is asked for on the default stream, which waits for work that still writes it. No thread waits here.
    """
    capsule = value.__dlpack__(stream=LEGACY_STREAM)
    seen = dlpack.read(capsule)
    kind, device = seen.device
    if kind != dlpack.CUDA:
        raise TypeError(f"it lies on a device of DLPack's kind {kind}")
    if not seen.contiguous:
        raise TypeError("they do not lie side by side in row-major order, send a contiguous copy")
    return DeviceArray(get_cuda(), device, seen.address, seen.shape, seen.dtype, (value, capsule))


def to_jax(array: DeviceArray | NDArray[Any], device: int) -> Any:
    """A JAX array on that device, in memory of JAX's own, written when this returns.

    JAX launches reads of an array on streams of its own, and may let go of it before that is over: by
    then memory that is shared might hold another result. It reads nothing that does not begin at a multiple of 16
    bytes: such a leaf of a nest passes by the host. 64-bit types become 32-bit ones unless JAX has x64 enabled.
    """
    jax = sys.modules["jax"]
    if isinstance(array, DeviceArray) and array.address % _JAX_ALIGNMENT == 0:
        shared = dlpack.hand_over(array, jax.numpy.from_dlpack)
        return jax.numpy.array(shared, copy=True).block_until_ready()
    there = next(one for one in jax.local_devices(backend="gpu") if one.local_hardware_id == device)
    return jax.device_put(np.asarray(array), there)


def to_dlpack(take: Callable[[Any], Any] | None) -> Callable[[DeviceArray | NDArray[Any], int], Any]:
    """How results become arrays of a library that is known by its `from_dlpack` alone; as they are where it has none.

    Arrays on the host stay there.
    """

    def made(array: DeviceArray | NDArray[Any], _: int) -> Any:
        if take is None:
            return array
        return dlpack.hand_over(array, take) if isinstance(array, DeviceArray) else take(array)

    return made


def from_interface(value: Any) -> DeviceArray:
    """One that looks into an array that has `__cuda_array_interface__`, of version 3 or before."""
    told = value.__cuda_array_interface__
    shape, dtype, address = tuple(told["shape"]), np.dtype(told["typestr"]), told["data"][0]
    side_by_side = tuple(step * dtype.itemsize for step in dlpack.row_major_strides(shape))
    if told.get("mask") is not None:
        raise TypeError("some of them are masked")
    if 0 not in shape and told.get("strides") not in (None, side_by_side):
        raise TypeError("they do not lie side by side in row-major order, send a contiguous copy")
    cuda, stream = get_cuda(), told.get("stream") or LEGACY_STREAM
    device = cuda.find_allocation(address).device if address else 0
    return DeviceArray(cuda, device, address, shape, dtype, value, stream)
