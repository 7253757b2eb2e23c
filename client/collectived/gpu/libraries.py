"""Arrays of CuPy and PyTorch on GPUs: seen as `DeviceArray`s, and made from them. Neither library is imported here."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from collectived.gpu.array import LEGACY_STREAM, DeviceArray
from collectived.gpu.driver import binding

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


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
    return DeviceArray(binding(), device, value.data.ptr, tuple(value.shape), np.dtype(value.dtype), value, stream)


def to_cupy(array: DeviceArray | NDArray[Any], device: int) -> Any:
    """A CuPy array that looks into `array`, which it keeps; of one on the host, a copy on that device."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cupy.asarray(array)


def stream_of_torch(device: int) -> int:
    """The handle of the caller's current stream on a GPU."""
    return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream) or LEGACY_STREAM


def from_torch(tensor: Any) -> DeviceArray:
    """One that looks into a tensor on a GPU, or into a contiguous copy of it, without its gradient."""
    torch, cuda = sys.modules["torch"], binding()
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dtype = _BFLOAT16 if tensor.dtype is torch.bfloat16 else np.dtype(str(tensor.dtype).removeprefix("torch."))
    device = tensor.device.index
    stream = stream_of_torch(device)
    return DeviceArray(cuda, device, tensor.data_ptr(), tuple(tensor.shape), dtype, tensor, stream)


class _Look:
    """A `DeviceArray` as PyTorch is to see it."""

    def __init__(self, array: DeviceArray, dtype: np.dtype[Any]) -> None:
        self._array = array
        self.__cuda_array_interface__ = array.interface(dtype)


def to_torch(array: DeviceArray | NDArray[Any], device: int) -> Any:
    """A tensor that looks into `array`, which it keeps; of one on the host, a copy on that device."""
    torch = sys.modules["torch"]
    bits = np.dtype(np.int16) if array.dtype == _BFLOAT16 else array.dtype
    where = torch.device("cuda", device)
    if isinstance(array, DeviceArray):
        made = torch.as_tensor(_Look(array, bits), device=where)
    else:
        made = torch.from_numpy(np.ascontiguousarray(array).view(bits)).to(where)
    return made.view(torch.bfloat16) if array.dtype == _BFLOAT16 else made
