"""Arrays of PyTorch, JAX and whatever speaks DLPack: seen as NumPy arrays, and made from them.

None of these libraries is imported here: a program that holds an array of one has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived.gpu.array import DeviceArray
from collectived.gpu.dlpack import CUDA
from collectived.gpu.driver import CudaError
from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType

Array = NDArray[Any]
_BFLOAT16 = to_numpy(DType.BFLOAT16)
_ON_THE_HOST = (1, 3, 11)  # DLPack's numbers for plain host memory and for what CUDA and ROCm have pinned


class UnknownLeaf(TypeError):
    """An object that collectives do not carry; the message lacks the path, which the caller knows."""


def from_torch(tensor: Any) -> Array:
    """A tensor in host memory as an array that looks into it, without its gradient; bfloat16 is seen by its bits.

    Raises:
        UnknownLeaf: it lies elsewhere, or is no plain block of elements that NumPy knows.
    """
    torch = sys.modules["torch"]
    found: Array
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise UnknownLeaf(_explain_refusal(tensor))
    try:
        if not (tensor.requires_grad or tensor.dtype is torch.bfloat16 or tensor.is_conj() or tensor.is_neg()):
            found = tensor.numpy()
        elif tensor.dtype is torch.bfloat16:
            found = tensor.detach().view(torch.int16).numpy().view(_BFLOAT16)
        else:
            found = tensor.numpy(force=True)  # detached; a pending conjugation or negation is carried out in a copy
    except (RuntimeError, TypeError) as error:  # so it refuses subclasses without memory, and dtypes of its own
        raise UnknownLeaf(_explain_refusal(tensor, str(error))) from None
    return found


def import_gpu_array(see: Callable[[Any], DeviceArray], value: Any) -> DeviceArray:
    """An array on a GPU as collectives see it.

    Raises:
        UnknownLeaf: this process cannot copy it.
    """
    try:
        return see(value)
    except CudaError as error:
        raise UnknownLeaf(f"a {type(value).__name__} on a GPU, which this process cannot copy: {error}") from None
    except (BufferError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownLeaf(f"a {type(value).__name__} on a GPU whose elements cannot be had: {error}") from None


def check_in_place(value: Any, view: DeviceArray) -> None:
    """Raises ValueError where what is seen of an array on a GPU is a copy of it."""
    if hasattr(value, "data_ptr"):
        pointer, fixed = value.data_ptr(), False
    else:
        pointer, fixed = value.__cuda_array_interface__["data"]
    if fixed:
        raise ValueError("read-only: it cannot be written")
    if view.size and pointer != view.address:
        raise ValueError("an array on a GPU that is not contiguous: it cannot be written; give a contiguous one")


def _explain_refusal(tensor: Any, error: str = "") -> str:
    what = f"a {type(tensor).__name__} of PyTorch"
    if tensor.is_meta:
        return f"{what} without data, on the device meta: send one that has data"
    if not tensor.is_cpu:
        return f"{what} on {tensor.device}: expected one on the CPU or on a GPU of CUDA; send its .cpu()"
    if tensor.is_nested:
        return f"{what} that is nested: send its parts, list(tensor.unbind())"
    if tensor.layout is not sys.modules["torch"].strided:
        return f"{what} of layout {tensor.layout}: send its .to_dense()"
    if tensor.is_quantized:
        return f"{what} that is quantized ({tensor.dtype}): send its .dequantize()"
    return f"{what} of {tensor.dtype} whose elements cannot be had ({error}): send an ordinary tensor"


def to_torch(array: Array) -> Any:
    """A tensor that looks into `array`, or into a copy where that cannot be written: tensors know no such memory."""
    torch = sys.modules["torch"]
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def check_writable(tensor: Any) -> None:
    """Raises ValueError where writing through an array would not write each element of a tensor."""
    if any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError("a tensor whose elements share memory, as .expand() makes them: it cannot be written")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("a tensor with a conjugation or negation pending: it cannot be written; give a .clone()")


def dtype_of_torch(dtype: Any) -> np.dtype[Any]:
    """A `torch.dtype` as NumPy's.

    Raises:
        UnknownLeaf: NumPy has no such elements.
    """
    return from_torch(sys.modules["torch"].empty(0, dtype=dtype, device="cpu")).dtype


def device_name(device: Any) -> str | None:
    """The name of a device that is given by name or as a `torch.device`, where `cuda` is a GPU; None: it is neither."""
    if isinstance(device, str):
        return device
    kind = type(device)
    return str(device) if f"{kind.__module__}.{kind.__qualname__}" == "torch.device" else None


def from_jax(value: Any) -> Array:
    """A JAX array in host memory as a read-only array that looks into it, once it is computed.

    Raises:
        UnknownLeaf: it lies elsewhere, or its data are gone.
    """
    try:
        devices = value.devices()
        platform = next(iter(devices)).platform
        if platform != "cpu":
            where = f"{platform}, spread over {len(devices)} devices" if len(devices) > 1 else platform
            raise UnknownLeaf(
                f"a JAX array on {where}: expected one on the CPU or on a GPU of CUDA; send its parts, [part.data for "
                "part in value.addressable_shards], or numpy.asarray(value)"
            )
        return np.asarray(value)
    except RuntimeError as error:  # donated, or spread over processes
        raise UnknownLeaf(f"a JAX array whose elements cannot be had: {error}") from None


def gpu_of_jax(value: Any) -> int | None:
    """The number of the GPU of CUDA on which all of a JAX array lies; None: it lies elsewhere, or its data are gone."""
    try:
        devices = value.devices()
        if len(devices) > 1 or next(iter(devices)).platform != "gpu":
            return None
        return gpu_of_dlpack(value)
    except RuntimeError:
        return None


def gpu_of_dlpack(value: Any) -> int | None:
    """The number of the GPU of CUDA on which something lies that speaks DLPack; None: it lies elsewhere."""
    kind, number = value.__dlpack_device__()
    return int(number) if kind == CUDA else None


def to_jax(array: Array) -> Any:
    """A copy of `array` on the CPU, in memory of JAX's; 64-bit types become 32-bit ones unless JAX has x64 enabled.

    A copy even where JAX could look into worker memory: of any JAX array `torch.from_dlpack` makes a writable tensor
    without a word, and a write through one into memory that is read-only here would end the process.
    """
    jax = sys.modules["jax"]
    if jax.default_backend() == "cpu":
        return jax.numpy.asarray(array)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.numpy.asarray(array)


def from_dlpack(value: Any) -> Array:
    """Whatever speaks DLPack, in host memory, as an array that looks into it.

    Raises:
        UnknownLeaf: it lies elsewhere, or NumPy does not take it.
    """
    what = f"a {type(value).__module__}.{type(value).__qualname__}"
    place = value.__dlpack_device__()[0]
    if place not in _ON_THE_HOST:
        raise UnknownLeaf(
            f"{what} on a device of DLPack's kind {int(place)}: expected one on the host or on a GPU of CUDA; send "
            "a copy on the host"
        )
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownLeaf(f"{what}, which numpy.from_dlpack refuses: {error}; send it as a NumPy array") from None


def find_from_dlpack(value: Any) -> Callable[[Any], Any] | None:
    """How arrays become what `value` is: by the `from_dlpack` of its library; None where it has none."""
    library = sys.modules.get(type(value).__module__.partition(".")[0])
    if hasattr(value, "__array_namespace__"):
        library = value.__array_namespace__()
    made: Callable[[Any], Any] | None = getattr(library, "from_dlpack", None)
    return made
