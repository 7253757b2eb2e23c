"""DLPack's capsules of arrays on GPUs, read and made by hand: NumPy, which does so for the host, knows no other memory.

A capsule holds a C structure; this module follows version 0 of it, which all libraries speak.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from collectived.gpu.array import DeviceArray

CUDA = 2  # DLPack's number for memory of NVIDIA's GPUs
_NAME = b"dltensor"  # of a capsule that no library has taken over
_BFLOAT16, _BOOL = (4, 16), (6, 8)  # code and bits
_BFLOAT16_ELEMENTS: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5}
_KINDS = {code: kind for kind, code in _CODES.items()}


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


def _python(result: Any, name: str, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new = _python(ctypes.py_object, "PyCapsule_New", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = _python(ctypes.c_int, "PyCapsule_IsValid", ctypes.py_object, ctypes.c_char_p)
_pointer = _python(ctypes.c_void_p, "PyCapsule_GetPointer", ctypes.py_object, ctypes.c_char_p)


class TensorInfo(NamedTuple):
    """The content of a capsule: address of the first element, (kind, number) of the device, shape, dtype.

    contiguous: whether the elements lie side by side, in row-major order.
    """

    address: int
    device: tuple[int, int]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    contiguous: bool


def read(capsule: object) -> TensorInfo:
    """Read a capsule, without taking it over. The memory stays valid as long as the capsule is held.

    Raises:
        TypeError: it is no capsule of DLPack's version 0, or has elements that NumPy does not know.
    """
    if not _is_valid(capsule, _NAME):
        raise TypeError(f"{type(capsule).__name__} is no capsule of DLPack, or has been taken over")
    tensor = _Managed.from_address(_pointer(capsule, _NAME)).tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else row_major_strides(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    return TensorInfo(
        address,
        (tensor.device_type, tensor.device_id),
        shape,
        _dtype(tensor.type),
        0 in shape or all(a == b or n == 1 for a, b, n in zip(strides, row_major_strides(shape), shape, strict=True)),
    )


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides, in elements."""
    following = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return tuple(reversed(list(following)))[: len(shape)]


def _dtype(found: _Type) -> np.dtype[Any]:
    named = found.code, found.bits
    if found.lanes == 1 and named == _BFLOAT16:
        return _BFLOAT16_ELEMENTS
    if found.lanes == 1 and named == _BOOL:
        return np.dtype(bool)
    if found.lanes != 1 or found.code not in _KINDS or found.bits % 8:
        raise TypeError(f"elements of DLPack's type {found.code} with {found.bits} bits in vectors of {found.lanes}")
    dtype: np.dtype[Any] = np.dtype(f"{_KINDS[found.code]}{found.bits // 8}")
    return dtype


_exported: dict[int, tuple[_Managed, object]] = {}  # tensors handed out, by address: the structure, and its memory


def _discard(address: int) -> None:
    _exported.pop(address, None)


_release = _Deleter(_discard)  # as C calls it, from any thread


class Export:
    """An array on a GPU as one library is to see it, once. The work on its stream must be over.

    A capsule that no library takes over would keep the array forever: `close` lets go of it.
    """

    def __init__(self, array: DeviceArray, device: tuple[int, int] | None = None) -> None:
        """`device` is how DLPack calls where it lies; None: as it does."""
        self._array = array
        self._device = device or (CUDA, array.device)
        self._capsule: object = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: object = None, **_: object) -> object:
        array, ndim = self._array, self._array.ndim
        lengths = ctypes.c_int64 * max(1, ndim)
        shape, strides = lengths(*array.shape), lengths(*row_major_strides(array.shape))
        tensor = _Tensor(array.address, *self._device, ndim, _type(array.dtype), shape, strides, 0)
        managed = _Managed(tensor, None, _release)
        address = ctypes.addressof(managed)
        _exported[address] = managed, (array, shape, strides)
        self._capsule = _new(address, _NAME, None)
        return self._capsule

    def close(self) -> None:
        capsule, self._capsule = self._capsule, None
        if capsule is not None and _is_valid(capsule, _NAME):
            _discard(_pointer(capsule, _NAME))


def _type(dtype: np.dtype[Any]) -> _Type:
    if dtype == _BFLOAT16_ELEMENTS:
        return _Type(*_BFLOAT16, 1)
    if dtype.kind == "b":
        return _Type(*_BOOL, 1)
    return _Type(_CODES[dtype.kind], 8 * dtype.itemsize, 1)


def hand_over(array: DeviceArray, take: Callable[[Any], Any]) -> Any:
    """Return the array that a library's `from_dlpack` makes of an array. It keeps the memory."""
    export = Export(array)
    try:
        return take(export)
    finally:
        export.close()
