"""The seam to CUDA: what a worker asks of its GPUs, in raw integers.

Devices are numbered as the driver numbers them. Addresses are of the unified address space, so that one `copy` serves
in all directions; streams and events are the driver's handles. `driver_cuda.py` speaks to the driver;
`tests/fakes/cuda.py` keeps device memory in files. Both pass `tests/fakes/test_cuda.py`.

Everything may be called from any thread. Calls that take a stream return before the work is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from collectived_proto.ipc.gpu import CudaError as CudaError
from collectived_proto.types import DType, ReduceOp


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. `uuid` is the same in every process, whatever CUDA_VISIBLE_DEVICES says; `number` is this process's."""

    number: int
    uuid: str
    name: str
    total_bytes: int
    pci: str


@dataclass(frozen=True, slots=True)
class FoldSpec:
    """outs[·] = sources[0] ∘ sources[1] ∘ …, element by element, as `device.arithmetic.Arithmetic` does it.

    With `widen`, sources have elements of `dtype`, else they are partial sums. With `finish`, `outs` get elements of
    `result_dtype`: rounded, and divided by `contributions` for a mean; else they get partial sums.
    """

    operation: ReduceOp
    dtype: DType
    result_dtype: DType
    contributions: int
    widen: bool
    finish: bool


class Cuda(Protocol):
    """See the module. Every method may raise CudaError."""

    def devices(self) -> Sequence[Device]:
        """The GPUs that this process may use."""

    def set_device(self, device: int) -> None:
        """Make a GPU the current one of the calling thread, for libraries that ask which it is."""

    def allocate(self, device: int, size: int) -> tuple[int, int]:
        """(address, bytes) of new memory that `export` can hand to another process: `size` rounded up to pages."""

    def export(self, address: int) -> int:
        """A new descriptor of memory that was allocated; a process that maps it keeps the memory alive."""

    def free(self, address: int) -> None:
        """Give allocated memory back; no work that uses it may be under way."""

    def open_memory(self, device: int, handle: bytes) -> tuple[int, int]:
        """(address, bytes) of an allocation of another process on that device, by its handle of 64 bytes.

        A handle that is open already gives the same address; it is closed when it has been closed as often.

        Raises:
            CudaError: it cannot be opened, or lies on another device.
        """

    def close_memory(self, device: int, address: int) -> None:
        """Let go of what was opened there; no work that uses it may be under way."""

    def pin(self, size: int) -> int:
        """The address of new host memory that GPUs copy from and to."""

    def unpin(self, address: int) -> None: ...

    def create_stream(self, device: int) -> int:
        """A new stream: work on it runs in order, beside that of other streams."""

    def destroy_stream(self, stream: int) -> None: ...

    def create_event(self, device: int) -> int: ...

    def create_shared_event(self, device: int) -> tuple[int, bytes]:
        """A new event, and the handle of 64 bytes by which another process may make its streams wait for it.

        Once it is ended no stream may wait for it: end it when it is over, else a waiting stream may wait forever.
        """

    def open_event(self, device: int, handle: bytes) -> int:
        """The event of another process that this handle of 64 bytes names. Nothing may be recorded behind it here."""

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """The event is over when all work that is on the stream now is done."""

    def is_event_done(self, event: int) -> bool:
        """Whether it is.

        Raises:
            CudaError: work on the device has failed.
        """

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None: ...

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        """Write zeros."""

    def fold(self, fold: FoldSpec, sources: Sequence[int], outs: Sequence[int], count: int, stream: int) -> None:
        """`count` elements, the result at every one of `outs`; they may be sources where elements keep their size."""
