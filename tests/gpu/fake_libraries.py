"""Libraries whose arrays lie on GPUs that are fake, which is in the memory of the host."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import numpy as np
from tests.gpu.fake_client import FakeClientCuda


def own(cuda: FakeClientCuda, value: Any, address: int | None = None) -> np.ndarray[Any, Any]:
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
