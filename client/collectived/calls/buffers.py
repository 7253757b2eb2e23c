"""Where inputs and results of calls lie: what a way to a worker brings besides its `RankChannel`, and what is asked of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectived.gpu.array import DeviceArray
from collectived.gpu.driver import Cuda
from collectived.values.leaves import Array
from collectived_proto.deadline import Deadline
from collectived_proto.types import Collective, Layout

LeafLocation = tuple[int, np.dtype[Any], tuple[int, ...]]  # byte offset in a slot, dtype, shape
ArenaAddress = tuple[int, int]  # of bytes in worker memory: (arena, byte offset)


class Description(NamedTuple):
    """A collective as the worker knows it.

    Attributes:
        id: the worker's number for it.
        contract: digest of what all ranks must agree on.
        terms: digest of what a rank that takes what comes must agree on; empty where none may.
    """

    id: int
    layout: Layout
    contract: bytes
    terms: bytes


Describe = Callable[[Collective, Deadline | None], Description]  # to the worker


class Backing(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a slot, as the base of the arrays in it: each of those keeps the slot.

    It is a subclass because NumPy lets a view of a view skip bases of its own type.
    """

    slot: object = None


class Stageable(Hashable, Protocol):
    """A prepared collective, as far as staging it goes.

    Attributes:
        is_cached: whether more calls of it may come, so that its staging slot is worth keeping.
    """

    is_cached: bool
    layout: Layout
    staging_locations: list[LeafLocation]


class StagedInputs(Protocol):
    """Room for the leaves of one call.

    Attributes:
        address: as `RankChannel.submit` takes it.
    """

    address: tuple[ArenaAddress, ...]

    def fill(self, arrays: Sequence[Array]) -> None:
        """Copies the leaves there."""


class StagingArea(Protocol):
    """Where inputs wait for the worker. Thread-safe."""

    def locate(self, array: Array) -> ArenaAddress | None:
        """Where an array lies that the worker can read as it is; None for all others, which are staged."""

    def acquire_staging(self, prepared: Stageable, patience: float = ...) -> Any:
        """A `StagedInputs` for a call of this collective, had within so many seconds."""

    def release_staging(self, prepared: Stageable, staging: Any) -> None:
        """The worker has read it; it may serve again."""

    def retire(self, staging: Any, arrays: Sequence[Array]) -> object:
        """The worker may still be reading these: they serve again only if the result is given to `release_retired`."""

    def release_retired(self, retired: object) -> None:
        """The worker does not."""

    def evict(self, prepared: Stageable) -> None:
        """No more calls of it will come."""


class DeviceStagingArea(StagingArea, Protocol):
    """Where inputs and results lie on a GPU: `device` of this process, which is spoken to by `cuda`."""

    cuda: Cuda
    device: int

    def export_array(self, array: DeviceArray, patience: float) -> tuple[ArenaAddress, object] | None:
        """Where the worker reads an array of the caller's own, as long as the second is held; None: it cannot.

        Args:
            patience: seconds in which the worker finds it, the first time.
        """

    @property
    def copy_stream(self) -> int:
        """One that waits for no stream of the caller's: on it results that are there are copied to the host."""

    def acquire_output(self, nbytes: int, patience: float) -> Any:
        """A slot for a result, had within so many seconds; it has an `address`."""

    def array(self, slot: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """The array at that offset of the slot."""

    def wait_stream(self, stream: int, other: int) -> None:
        """Make later work on a stream wait for the work that is on the other one now."""

    def record_stream(self, slot: Any, stream: int) -> None:
        """Note that work on the stream reads the slot. The place is not reused until that work is done."""

    def wait_event(self, event: int, stream: int) -> bool:
        """Make later work on a stream wait for an event of the worker, which may die before.

        False: not so, for the device is being waited for elsewhere in this process.
        """


class ResultBuffer(Protocol):
    """A result.

    Attributes:
        memory, offset: where it lies; it may be read-only.
        views: of what lies in that memory, by prepared collective and offset; they end with it.
    """

    offset: int

    @property
    def memory(self) -> Any: ...

    @property
    def views(self) -> dict[tuple[int, int], list[Array]]: ...

    def acquire_backing(self, nbytes: int) -> Backing | None:
        """The slot as a base of read-only views that hold it, asked for once; None where results are to be copied."""
