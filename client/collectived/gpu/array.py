"""Arrays in the memory of a GPU: what collectives know of a caller's, and what `Session.empty` makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived.gpu.driver import Cuda

LEGACY_STREAM = 1  # the driver's handle of the stream that is the default unless another one is asked for


class DeviceArray:
    """Row-major elements in the memory of a GPU. `cupy.asarray` and `torch.as_tensor` look into it without a copy.

    Attributes:
        device: number of the GPU in this process.
        stream: handle of the stream on which its elements were written last, as far as is known.
        origin: the memory of a worker in which it lies; None: it is the caller's own.
    """

    __slots__ = ("_cuda", "_owner", "address", "device", "dtype", "origin", "shape", "stream")

    def __init__(
        self,
        cuda: Cuda,
        device: int,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        keep: object,
        stream: int = LEGACY_STREAM,
    ) -> None:
        """`keep` is held as long as the array: whatever its memory lives by."""
        self._cuda = cuda
        self.device = device
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self._owner = keep
        self.stream = stream
        self.origin: Any = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface(self.dtype)

    def interface(self, dtype: np.dtype[Any]) -> dict[str, Any]:
        """As others see it, with elements called so: not all of them know bfloat16."""
        address = self.address if self.size else 0
        return {"shape": self.shape, "typestr": dtype.str, "data": (address, False), "strides": None, "version": 3}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """A copy on the host."""
        if copy is False:
            raise ValueError("an array on a GPU cannot be seen from the host without a copy")
        (made,) = fetch_to_host([self])
        return made if dtype is None else made.astype(dtype)

    def assign(self, source: NDArray[Any] | DeviceArray) -> None:
        """Copies the elements of an array of the same shape and dtype."""
        if isinstance(source, DeviceArray):
            self._cuda.copy(self.device, self.address, source.address, self.nbytes, source.stream)
        else:
            host = np.ascontiguousarray(source)
            self._cuda.copy(self.device, self.address, host.ctypes.data, self.nbytes, self.stream)
            self.synchronize()  # before the source goes

    def synchronize(self) -> None:
        """Returns when what is on its stream is done."""
        self._cuda.synchronize(self.device, self.stream)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype}{list(self.shape)} on GPU {self.device}>"


def fetch_to_host(arrays: Sequence[NDArray[Any] | DeviceArray]) -> list[NDArray[Any]]:
    """Copies on the host of those that lie on a GPU, all waited for together; the others as they are."""
    found: list[NDArray[Any]] = []
    copied: list[DeviceArray] = []
    for array in arrays:
        if isinstance(array, DeviceArray):
            made: NDArray[Any] = np.empty(array.shape, array.dtype)
            array._cuda.copy(array.device, made.ctypes.data, array.address, array.nbytes, array.stream)
            copied.append(array)
            array = made
        found.append(array)
    for one in {(array.device, array.stream): array for array in copied}.values():
        one.synchronize()
    return found


def fetch_foreign_to_host(arrays: list[Any], device: int) -> list[Any]:
    """The same with copies on the host of those that lie on another GPU than this one."""
    away = [isinstance(array, DeviceArray) and array.device != device for array in arrays]
    if not any(away):
        return arrays
    copies = iter(fetch_to_host([array for array, other in zip(arrays, away, strict=True) if other]))
    return [next(copies) if other else array for array, other in zip(arrays, away, strict=True)]
