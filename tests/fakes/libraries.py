"""Libraries whose arrays lie on GPUs that are fake, which is in the memory of the host."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.fakes.client_cuda import FakeClientCuda


def own(cuda: FakeClientCuda, value: Any, address: int | None = None) -> NDArray[Any]:
    """A copy of `value` in memory of this process's own on GPU 0: in a new allocation, or at an address of one."""
    value = np.asarray(value)
    if address is None:
        address = cuda.malloc(max(1, value.nbytes))
    made = np.ndarray(value.shape, value.dtype, (ctypes.c_uint8 * value.nbytes).from_address(address))
    made[...] = value
    return made


class FakeCupy(types.ModuleType):
    """As much of CuPy as arrays need."""

    class ndarray:
        def __init__(self, host: Any, keep: Any = None) -> None:
            self.host, self.keep = host, keep
            self.shape, self.dtype = host.shape, host.dtype
            self.device = types.SimpleNamespace(id=0)
            self.data = types.SimpleNamespace(ptr=host.ctypes.data)

        def view(self, dtype: Any) -> FakeCupy.ndarray:
            return FakeCupy.ndarray(self.host.view(dtype), self.keep)

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return dict(self.host.__array_interface__)

    ndarray.__module__, ndarray.__qualname__ = "cupy", "ndarray"

    def __init__(self) -> None:
        super().__init__("cupy")
        stream = types.SimpleNamespace(ptr=0)
        self.cuda = types.SimpleNamespace(get_current_stream=lambda: stream, Device=lambda number: _Nothing())

    def ascontiguousarray(self, value: Any) -> Any:
        return value if value.host.flags.c_contiguous else self.ndarray(np.ascontiguousarray(value.host))

    def asarray(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.ndarray(value.copy())
        held = types.SimpleNamespace(__array_interface__=value.__cuda_array_interface__)
        return self.ndarray(np.asarray(held), value)


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
ON_HOST, ON_GPU = 1, 2  # DLPack's numbers
_AT = 8  # where in its structure that of the device is


def _moved(capsule: object, kind: int) -> Any:
    """The same capsule, which says that its memory is of that kind."""
    ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + _AT).value = kind
    return capsule


class Speaker:
    """An array on GPU 0 that speaks DLPack, of a library that NumPy plays.

    Attributes:
        asked: the streams on which it was asked for.
    """

    def __init__(self, host: NDArray[Any]) -> None:
        self.host = host
        self.asked: list[object] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return ON_GPU, 0

    def __dlpack__(self, *, stream: object = None) -> object:
        self.asked.append(stream)
        return _moved(self.host.__dlpack__(), ON_GPU)

    def __array_namespace__(self) -> Any:
        return types.SimpleNamespace(from_dlpack=lambda value: Speaker(taken(value)))


class _Taking:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __dlpack_device__(self) -> Any:
        return ON_HOST, 0

    def __dlpack__(self, **_: object) -> Any:
        return _moved(self._value.__dlpack__(stream=99), ON_HOST)


def taken(value: Any) -> NDArray[Any]:
    """What NumPy makes of something on a GPU that speaks DLPack, or lies on the host."""
    if isinstance(value, np.ndarray):
        return value
    assert value.__dlpack_device__() == (ON_GPU, 0)
    found: NDArray[Any] = np.from_dlpack(_Taking(value))  # which cannot be written, other than those of most libraries
    memory: Any = (ctypes.c_uint8 * max(1, found.nbytes)).from_address(found.ctypes.data)
    memory.keeps_connection = found
    return np.ndarray(found.shape, found.dtype, memory)


class FakeJax(types.ModuleType):
    """As much of JAX on a GPU as arrays need."""

    class ArrayImpl(Speaker):
        def devices(self) -> set[Any]:
            return {FakeJax.Device(0)}

        def block_until_ready(self) -> FakeJax.ArrayImpl:
            return self

    ArrayImpl.__module__, ArrayImpl.__qualname__ = "jaxlib._jax", "ArrayImpl"

    class Device:
        platform = "gpu"

        def __init__(self, number: int) -> None:
            self.local_hardware_id = number

    def __init__(self, cuda: FakeClientCuda) -> None:
        super().__init__("jax")
        self._cuda = cuda
        self.numpy = types.SimpleNamespace(
            from_dlpack=lambda value: self.ArrayImpl(taken(value)),
            array=lambda value, copy: self.ArrayImpl(own(cuda, self._read(value.host))),
        )

    @staticmethod
    def _read(host: NDArray[Any]) -> NDArray[Any]:
        if host.ctypes.data % 16:  # as JAX 0.11 with CUDA does
            raise RuntimeError("INTERNAL: Address of buffer 1 must be a multiple of 10")
        return host

    def local_devices(self, backend: str) -> list[FakeJax.Device]:
        return [self.Device(1), self.Device(0)]

    def device_put(self, value: Any, device: FakeJax.Device) -> FakeJax.ArrayImpl:
        assert device.local_hardware_id == 0
        return self.ArrayImpl(own(self._cuda, value))


class Interface:
    """An array on a GPU of which nothing is known but its interface."""

    def __init__(self, host: NDArray[Any], **told: Any) -> None:
        self.host = host
        self._told = told

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.host.__array_interface__, **self._told}
