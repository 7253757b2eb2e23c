"""The libraries whose arrays collectives take from GPUs: CuPy, PyTorch and JAX, and stand-ins for two of them.

Each says how a test makes, reads and uses one of its arrays on GPU 0. A library that is not here is skipped aloud.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.libraries import FakeCupy, FakeJax, own

from collectived.gpu.array import LEGACY_STREAM

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
DTYPES: tuple[np.dtype[Any], ...] = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16, np.dtype(np.int64))


class ArrayLibrary(Protocol):
    """Attributes:
    module: as `session.empty(like=...)` takes it.
    dtypes: those of `DTYPES` that it has.
    real: whether its arrays lie on a GPU of this machine.
    written: whether its arrays may be written: it takes `out`, and lets others look into its memory.
    has_streams: whether it has a current stream.
    """

    module: Any
    dtypes: tuple[np.dtype[Any], ...]
    real: bool
    written: bool
    has_streams: bool

    def array(self, host: NDArray[Any]) -> Any:
        """A copy on GPU 0, which is there when this returns."""

    def host(self, array: Any) -> NDArray[Any]:
        """A copy on the host, after what is on the current stream."""

    def is_own(self, value: Any) -> bool:
        """Whether it is an array of this library, on GPU 0."""

    def address(self, array: Any) -> int: ...

    def doubled(self, array: Any) -> Any:
        """Twice its elements, by work on the current stream."""

    def stream(self) -> contextlib.AbstractContextManager[int]:
        """A new stream that is current in this thread; its handle. It waits for no other stream."""


class RealCupy:
    dtypes = DTYPES
    real, written, has_streams = True, True, True

    def __init__(self) -> None:
        self.module = imported("cupy")

    def array(self, host: NDArray[Any]) -> Any:
        made = self.module.asarray(host)
        self.module.cuda.get_current_stream().synchronize()
        return made

    def host(self, array: Any) -> NDArray[Any]:
        found: NDArray[Any] = self.module.asnumpy(array)
        return found

    def is_own(self, value: Any) -> bool:
        return isinstance(value, self.module.ndarray) and value.device.id == 0

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def doubled(self, array: Any) -> Any:
        return array + array

    @contextlib.contextmanager
    def stream(self) -> Iterator[int]:
        with self.module.cuda.Stream(non_blocking=True) as made:
            yield int(made.ptr)


class RealTorch:
    dtypes = DTYPES
    real, written, has_streams = True, True, True

    def __init__(self) -> None:
        self.module = imported("torch")
        if not self.module.cuda.is_available():
            pytest.skip("this PyTorch cannot use a GPU")

    def array(self, host: NDArray[Any]) -> Any:
        torch, host = self.module, np.ascontiguousarray(host)
        bits = host.view(np.int16) if host.dtype == BFLOAT16 else host
        made = torch.from_numpy(bits.copy()).to("cuda:0")
        torch.cuda.current_stream().synchronize()
        return made.view(torch.bfloat16) if host.dtype == BFLOAT16 else made

    def host(self, array: Any) -> NDArray[Any]:
        torch = self.module
        bits = array.view(torch.int16) if array.dtype is torch.bfloat16 else array
        found: NDArray[Any] = bits.cpu().numpy()
        return found.view(BFLOAT16) if array.dtype is torch.bfloat16 else found

    def is_own(self, value: Any) -> bool:
        return isinstance(value, self.module.Tensor) and value.device == self.module.device("cuda", 0)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def doubled(self, array: Any) -> Any:
        return array + array

    @contextlib.contextmanager
    def stream(self) -> Iterator[int]:
        made = self.module.cuda.Stream(0)
        with self.module.cuda.stream(made):
            yield int(made.cuda_stream)


class RealJax:
    """It leaves memory of the GPU to the others, and knows elements of 64 bits."""

    dtypes = DTYPES
    real, written, has_streams = True, False, False

    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:  # read when it first looks for GPUs
            patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
            self.module = imported("jax")
            try:
                self._device = self.module.local_devices(backend="gpu")[0]
            except RuntimeError as error:
                pytest.skip(f"this JAX cannot use a GPU: {error}")
        self.module.config.update("jax_enable_x64", True)

    def array(self, host: NDArray[Any]) -> Any:
        return self.module.device_put(host, self._device).block_until_ready()

    def host(self, array: Any) -> NDArray[Any]:
        return np.asarray(array)

    def is_own(self, value: Any) -> bool:
        return isinstance(value, self.module.Array) and value.devices() == {self._device}

    def address(self, array: Any) -> int:
        return int(array.unsafe_buffer_pointer())

    def doubled(self, array: Any) -> Any:
        return array + array

    @contextlib.contextmanager
    def stream(self) -> Iterator[int]:
        yield LEGACY_STREAM


class CupyStandIn:
    dtypes = DTYPES
    real, written, has_streams = False, True, True

    def __init__(self, cuda: FakeClientCuda) -> None:
        self._cuda = cuda
        self._current = threading.local()
        self.module: Any = FakeCupy()
        self.module.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=self._stream())

    def _stream(self) -> int:
        found: int = getattr(self._current, "stream", 0)
        return found

    def array(self, host: NDArray[Any]) -> Any:
        return self.module.ndarray(own(self._cuda, host))

    def host(self, array: Any) -> NDArray[Any]:
        self._cuda.synchronize(0, self._stream() or LEGACY_STREAM)
        found: NDArray[Any] = array.host.copy()
        return found

    def is_own(self, value: Any) -> bool:
        return isinstance(value, self.module.ndarray)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def doubled(self, array: Any) -> Any:
        return self.array(2 * self.host(array))

    @contextlib.contextmanager
    def stream(self) -> Iterator[int]:
        self._current.stream = self._cuda.create_stream(0)
        try:
            yield self._current.stream
        finally:
            self._current.stream = 0


class JaxStandIn:
    dtypes = tuple(dtype for dtype in DTYPES if dtype != BFLOAT16)  # NumPy, which plays it, hands out no bfloat16
    real, written, has_streams = False, False, False

    def __init__(self, cuda: FakeClientCuda) -> None:
        self._cuda = cuda
        self.module: Any = FakeJax(cuda)

    def array(self, host: NDArray[Any]) -> Any:
        return self.module.ArrayImpl(own(self._cuda, host))

    def host(self, array: Any) -> NDArray[Any]:
        found: NDArray[Any] = array.host.copy()
        return found

    def is_own(self, value: Any) -> bool:
        return isinstance(value, self.module.ArrayImpl)

    def address(self, array: Any) -> int:
        return int(array.host.ctypes.data)

    def doubled(self, array: Any) -> Any:
        return self.array(2 * array.host)

    @contextlib.contextmanager
    def stream(self) -> Iterator[int]:
        yield LEGACY_STREAM


def imported(name: str) -> Any:
    """A library, or a skip that says that it is missing; what it warns of while it is imported is its own affair."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


REAL: dict[str, Callable[[], ArrayLibrary]] = {"cupy": RealCupy, "torch": RealTorch, "jax": RealJax}
STAND_INS: dict[str, Callable[[FakeClientCuda], ArrayLibrary]] = {"cupy": CupyStandIn, "jax": JaxStandIn}


@contextlib.contextmanager
def stand_in(name: str, cuda: FakeClientCuda) -> Iterator[ArrayLibrary]:
    """One that takes the place of its original in this process."""
    made = STAND_INS[name](cuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, made.module)
        yield made
