"""NCCL as this runtime uses it: raw integers in, typed errors out, whichever binding is behind.

    NcclError
    ├── NcclRemoteError       another rank, or the way to it, is gone
    ├── NcclTimeoutError      NCCL has given up waiting
    └── NcclUsageError        the call was wrong: a defect of the caller

A communicator is an integer as well, and stays with the implementation that made it. A communicator made without
blocking may take no other call while its `state` is IN_PROGRESS, but for `abort`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic

UNIQUE_ID_BYTES = 128


class NcclResult(enum.IntEnum):
    """NCCL's result codes, with its numbers."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


_MEANINGS: dict[int, str] = {
    NcclResult.UNHANDLED_CUDA_ERROR: "a CUDA call failed",
    NcclResult.SYSTEM_ERROR: "a call to the system failed",
    NcclResult.INTERNAL_ERROR: "an internal check failed",
    NcclResult.INVALID_ARGUMENT: "an argument has an invalid value",
    NcclResult.INVALID_USAGE: "the call is invalid here",
    NcclResult.REMOTE_ERROR: "another rank, or the connection to it, is gone",
    NcclResult.IN_PROGRESS: "the communicator is still at an earlier call",
    NcclResult.TIMEOUT: "it has waited too long for another rank",
}


class NcclError(Exception):
    """A call that NCCL refused, or a communicator that has failed.

    Attributes:
        code: what NCCL answered; a number that `NcclResult` does not have where NCCL is newer than this list.
    """

    def __init__(self, code: int, call: str, said: str = "") -> None:
        meaning = _MEANINGS.get(code, "an error that this release does not know")
        text = f"NCCL: {call}: {meaning} (code {code})"
        super().__init__(f"{text}: {said}" if said else text)
        self.code = code


class NcclRemoteError(NcclError):
    """Another rank, or the way to it, is gone."""


class NcclTimeoutError(NcclError):
    """NCCL has given up waiting."""


class NcclUsageError(NcclError):
    """The call was wrong."""


_CLASSES: dict[int, type[NcclError]] = {
    NcclResult.REMOTE_ERROR: NcclRemoteError,
    NcclResult.TIMEOUT: NcclTimeoutError,
    NcclResult.INVALID_ARGUMENT: NcclUsageError,
    NcclResult.INVALID_USAGE: NcclUsageError,
}


def make_error(code: int, call: str, said: str = "") -> NcclError:
    """The exception for what NCCL answered to `call`; `said` is its own explanation, where the binding has it."""
    return _CLASSES.get(code, NcclError)(code, call, said)


def check_ready(code: int, call: str) -> bool:
    """Whether a communicator with this asynchronous result is ready; False: still in progress.

    Raises:
        NcclError: it has failed.
    """
    if code not in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS):
        raise make_error(code, call)
    return code == NcclResult.SUCCESS


class NcclDataType(enum.IntEnum):
    """Numbered as in NCCL."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9


class NcclOperation(enum.IntEnum):
    """Numbered as in NCCL."""

    SUM = 0
    PRODUCT = 1
    MAX = 2
    MIN = 3
    AVERAGE = 4


_OPERATIONS = {
    ReduceOp.SUM: NcclOperation.SUM,
    ReduceOp.MEAN: NcclOperation.AVERAGE,
    ReduceOp.PRODUCT: NcclOperation.PRODUCT,
    ReduceOp.MAX: NcclOperation.MAX,
    ReduceOp.MIN: NcclOperation.MIN,
}


def nccl_operation(reduce_op: ReduceOp) -> NcclOperation | None:
    """NCCL's name of a reduce op; None where it has none."""
    return _OPERATIONS.get(reduce_op)


ElementLayout = tuple[NcclDataType, int]  # NCCL's type of one partial sum: so many elements of that type


def element_layout(how: Arithmetic) -> ElementLayout | None:
    """NCCL's type for partial sums; None where it cannot fold them as they are to be folded."""
    if nccl_operation(how.operation) is None:
        return None
    if how.dtype.is_complex:  # two numbers side by side, as long as they are only added
        added = how.operation in (ReduceOp.SUM, ReduceOp.MEAN)
        return (NcclDataType.FLOAT32 if how.dtype is DType.COMPLEX64 else NcclDataType.FLOAT64, 2) if added else None
    found = NcclDataType.__members__.get(how.partial_dtype.name.upper())
    return None if found is None else (found, 2 if how.is_split else 1)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a binding.

    Attributes:
        nonblocking: makes communicators without blocking; where it cannot, `init` returns when all ranks have come.
        max_count: elements that one call takes.
    """

    nonblocking: bool
    max_count: int


# Of one call, by whatever binding a worker has: another one may have another, and their calls must be the same.
MOST_ELEMENTS = (1 << 31) - 1


def split_count(count: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, elements) of the calls that together take `count` elements, `most` at a time; at least one call."""
    for start in range(0, max(count, 1), most):
        yield start, min(most, count - start)


class NcclBuffers(NamedTuple):
    """The memory that a collective reads and writes: two addresses, and how many elements of which type lie there."""

    send: int
    receive: int
    elements: int
    dtype: NcclDataType


class NcclBlock(NamedTuple):
    """The memory sent to, or received from, one rank: an address, and how many elements of which type lie there."""

    address: int
    elements: int
    dtype: NcclDataType


class Nccl(Protocol):
    """One loaded libnccl. May be used from any thread; one communicator by one thread at a time, but for `abort`.

    Addresses and streams are of the device that is current in the calling thread. All calls but `version` raise
    `NcclError`; a call takes at most `capabilities.max_count` elements.
    """

    name: str
    capabilities: Capabilities

    def version(self) -> int:
        """Such as 22809 for 2.28.9."""
        ...

    def create_unique_id(self) -> bytes:
        """Create the id that the ranks of one communicator share, in the process of one of them."""
        ...

    def init(self, size: int, unique_id: bytes, rank: int, *, blocking: bool) -> int:
        """A communicator; not yet `ready` where it is made without blocking."""
        ...

    def is_ready(self, communicator: int) -> bool:
        """False while it is at an earlier call; raises where it has failed meanwhile."""
        ...

    def all_reduce(self, buffers: NcclBuffers, op: NcclOperation, communicator: int, stream: int) -> None: ...

    def reduce(self, buffers: NcclBuffers, op: NcclOperation, root: int, communicator: int, stream: int) -> None: ...

    def broadcast(self, buffers: NcclBuffers, root: int, communicator: int, stream: int) -> None: ...

    def all_gather(self, buffers: NcclBuffers, communicator: int, stream: int) -> None:
        """Each rank sends that many elements; it receives those of all, in order of ranks.

        In place it sends what lies where it will have received its own.
        """
        ...

    def reduce_scatter(self, buffers: NcclBuffers, op: NcclOperation, communicator: int, stream: int) -> None:
        """Each rank receives that many elements, its part of what all send; in place, where its own part lies."""
        ...

    def send(self, block: NcclBlock, peer: int, communicator: int, stream: int) -> None:
        """To be answered by a `recv` of as many elements there; several of both together, in a group."""
        ...

    def recv(self, block: NcclBlock, peer: int, communicator: int, stream: int) -> None: ...

    def group_start(self) -> None:
        """Put the calls of this thread until `group_end` on streams together: no call waits for the ones before."""
        ...

    def group_end(self) -> None: ...

    def abort(self, communicator: int) -> None:
        """Free it at once, even while it works. May block; no thread may use it any more."""
        ...

    def destroy(self, communicator: int) -> None:
        """Free it after its current work. May block; no thread may use it any more."""
        ...
