"""The words of the contract as frozen values: what travels between client, worker and coordinator.

A *collective* is one operation on one value; a *leaf* is one array of that value; a *pack* is a run of leaves of one
type that travels as one vector; a *layout* says where each leaf lies in its pack. An operation is one class here and
one `case` where it is carried out; it is never a method on several backends.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from collectived_proto.cause import Cause
from collectived_proto.compression import Compression as Compression
from collectived_proto.reduce_op import ReduceOp as ReduceOp  # one of the words, too

RELEASE = "0.1.0"


class DType(enum.IntEnum):
    """Element types, numbered as on the wire."""

    BOOL = 1
    INT8 = 2
    INT16 = 3
    INT32 = 4
    INT64 = 5
    UINT8 = 6
    UINT16 = 7
    UINT32 = 8
    UINT64 = 9
    FLOAT16 = 10
    BFLOAT16 = 11
    FLOAT32 = 12
    FLOAT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def label(self) -> str:
        """The name as NumPy spells it: `float32`."""
        return self.name.lower()

    @property
    def is_integer(self) -> bool:
        return DType.INT8 <= self <= DType.UINT64

    @property
    def is_complex(self) -> bool:
        return self >= DType.COMPLEX64


_ITEMSIZE = dict(zip(DType, (1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16), strict=True))


class CommunicationImplementation(enum.Enum):
    """A hint: which family of algorithms carries a collective."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True, slots=True)
class AllReduce:
    reduce_op: ReduceOp

    def __str__(self) -> str:
        return f"all_reduce({self.reduce_op.value})"


@dataclass(frozen=True, slots=True)
class Reduce:
    reduce_op: ReduceOp
    root: int = 0

    def __str__(self) -> str:
        return f"reduce({self.reduce_op.value}, root={self.root})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    root: int = 0

    def __str__(self) -> str:
        return f"broadcast(root={self.root})"


@dataclass(frozen=True, slots=True)
class Barrier:
    def __str__(self) -> str:
        return "barrier()"


@dataclass(frozen=True, slots=True)
class AllGather:
    """`axis` is the caller's; leaves are described, and travel, with that axis first. So for all that cut or join."""

    axis: int = 0

    def __str__(self) -> str:
        return f"all_gather(axis={self.axis})"


@dataclass(frozen=True, slots=True)
class Gather:
    root: int = 0
    axis: int = 0

    def __str__(self) -> str:
        return f"gather(root={self.root}, axis={self.axis})"


@dataclass(frozen=True, slots=True)
class Scatter:
    """`sizes[r]` rows go to rank r; () is an even split, what remains to the first ranks. Only the root's count."""

    root: int = 0
    axis: int = 0
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"scatter(root={self.root}, axis={self.axis}{_sizes_text(self.sizes)})"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    reduce_op: ReduceOp
    axis: int = 0
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"reduce_scatter({self.reduce_op.value}, axis={self.axis}{_sizes_text(self.sizes)})"


@dataclass(frozen=True, slots=True)
class AllToAll:
    """With `sizes` every rank may cut its value differently; () is an even split of values of one shape."""

    axis: int = 0
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"all_to_all(axis={self.axis}{', sizes' if self.sizes else ''})"


@dataclass(frozen=True, slots=True)
class Send:
    """Numbered per (source, destination, tag), apart from the group's instances; so is `Recv`."""

    to: int
    tag: int = 0

    def __str__(self) -> str:
        return f"send(to={self.to}, tag={self.tag})"


ANY_SOURCE = (1 << 32) - 1  # in place of a rank: the rank that sends first


@dataclass(frozen=True, slots=True)
class Recv:
    """From rank `source`; with ANY_SOURCE from the rank that sends first."""

    source: int
    tag: int = 0

    def __str__(self) -> str:
        return f"recv(source={None if self.source == ANY_SOURCE else self.source}, tag={self.tag})"


def _sizes_text(sizes: tuple[int, ...]) -> str:
    return f", sizes={list(sizes)}" if sizes else ""


Reduction = AllReduce | Reduce | ReduceScatter
AxisOperation = AllGather | Gather | Scatter | ReduceScatter | AllToAll
"""Operations that cut values along an axis, or join them; every leaf travels by itself."""
Operation = (
    AllReduce | Reduce | Broadcast | Barrier | AllGather | Gather | Scatter | ReduceScatter | AllToAll | Send | Recv
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a value: where it sits in the nest, and what it is."""

    path: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def __str__(self) -> str:
        """`float32[3, 4]`; a length that may differ between ranks (-1) is shown as `?`."""
        lengths = ", ".join("?" if length < 0 else str(length) for length in self.shape)
        return f"{self.dtype.label}[{lengths}]"


@dataclass(frozen=True, slots=True)
class Tier:
    """`shards` parallel collectives by `algorithm` for vectors of up to `limit` bytes; -1: of any size.

    In a generation's table `bytes_per_pack` is the pack size where a call leaves it open; 0: one pack per type.
    """

    algorithm: str
    shards: int = 1
    limit: int = -1
    bytes_per_pack: int = 0

    def __str__(self) -> str:
        size = "more" if self.limit < 0 else f"up to {self.limit} bytes"
        return f"{size}: {self.algorithm}" + (f" in {self.shards} shards" if self.shards > 1 else "")


def select_tier(tiers: Sequence[Tier], nbytes: int) -> Tier:
    """The first tier that takes a vector of that size; the last one takes all."""
    return next(tier for tier in tiers if tier.limit < 0 or nbytes <= tier.limit)


@dataclass(frozen=True, slots=True)
class Packing:
    """How MultiWorkerAllReduce and NcclAllReduce put tensors together, instead of by `bytes_per_pack`.

    `num_packs` packs of all tensors of a type; with 0, runs of at most `max_group` neighbours of at most `max_bytes`
    each travel together, and everything else alone.
    """

    num_packs: int = 0
    max_bytes: int = 0
    max_group: int = 10


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, described once; all but `site` is the contract that every rank must agree on.

    An *open* one has no value of its own and takes what comes: a broadcast or scatter off root, or a recv.
    """

    operation: Operation
    structure: str
    leaves: tuple[Leaf, ...]
    bytes_per_pack: int = 0
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    site: str = ""
    all_reduce_spec: tuple[Tier, ...] = ()
    packing: Packing | None = None
    open: bool = False
    compression: Compression = Compression.NONE

    def contributes(self, rank: int) -> bool:
        """Whether the value of this rank goes anywhere: of a broadcast or scatter only the root's does."""
        return not isinstance(self.operation, (Broadcast, Scatter)) or self.operation.root == rank

    @property
    def lengths_differ(self) -> bool:
        """Whether the leaves' first lengths may differ between ranks, so that they must be exchanged first."""
        operation = self.operation
        return isinstance(operation, (AllGather, Gather)) or (isinstance(operation, AllToAll) and bool(operation.sizes))

    def normalize(self) -> Collective:
        """The same without lengths that may differ between ranks: they are -1. An array of 0 dimensions has none."""
        if self.lengths_differ:
            leaves = tuple(replace(leaf, shape=(-1, *leaf.shape[1:])) if leaf.shape else leaf for leaf in self.leaves)
            operation = self.operation
            if isinstance(operation, AllToAll):
                operation = AllToAll(operation.axis, (-1,))
            return replace(self, operation=operation, leaves=leaves, site="")
        return replace(self, site="")

    def contract(self) -> str:
        """The canonical text that ranks compare (as a digest): equal texts, equal collectives."""
        same = self.normalize()
        leaves = ";".join(f"{leaf.path}={leaf}" for leaf in same.leaves)
        return f"{same.operation}|{'open' if same.open else same.structure}|{leaves}|{same.open_contract()}"

    def open_contract(self) -> str:
        """The part of the contract that an open collective has too."""
        same = self.normalize()
        operation = same.operation
        if isinstance(operation, Scatter):
            operation = Scatter(operation.root, operation.axis)
        compressed = "" if same.compression is Compression.NONE else f"|compression={same.compression.value}"
        return (
            f"{operation}|bytes_per_pack={same.bytes_per_pack}|implementation={same.implementation.value}"
            f"|all_reduce_spec={'; '.join(map(str, same.all_reduce_spec))}|{same.packing}{compressed}"
        )


@dataclass(frozen=True, slots=True)
class Pack:
    """Leaves that travel together as one vector of one type."""

    dtype: DType
    result_dtype: DType
    count: int
    staging_offset: int
    result_offset: int


@dataclass(frozen=True, slots=True)
class LeafPlacement:
    """Where a leaf lies: `offset` elements into pack number `pack`."""

    pack: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Packs in the order in which they start (last leaves first), and a place for every leaf in leaf order."""

    packs: tuple[Pack, ...]
    places: tuple[LeafPlacement, ...]
    staging_bytes: int
    result_bytes: int


@dataclass(frozen=True, slots=True)
class Member:
    """One participant of a group. `last_*` describe its last known result and its last call; `stack`, of one that
    others wait for, where its threads are, one a line."""

    rank: int
    device: str
    worker: int
    host: str
    pid: int
    label: str = ""
    last_instance: int = -1
    last_op: str = ""
    last_site: str = ""
    idle_seconds: float = 0.0
    stack: str = ""

    def __str__(self) -> str:
        where = f"{self.label}, " if self.label else ""
        return f"rank {self.rank} ({where}host {self.host}, pid {self.pid})"


def with_progress(
    member: Member, instance: int, op: str, site: str, idle_seconds: float = 0.0, stack: str = ""
) -> Member:
    """A member, and what is known of its last result and its last call."""
    return replace(member, last_instance=instance, last_op=op, last_site=site, idle_seconds=idle_seconds, stack=stack)


def unscoped_name(name: str) -> str:
    """A group's name as its users know it: without the job that scopes it on the wire."""
    return name if name.startswith("/") else name.partition("/")[2] or name


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One complete generation of a group; `members[r]` is rank r."""

    name: str
    key: int
    generation: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    def complete(self, members: Iterable[Member]) -> tuple[Member, ...]:
        """The same members; of those that say no more than their rank and what they did last, all that is known."""
        return tuple(
            with_progress(
                self.members[one.rank], one.last_instance, one.last_op, one.last_site, one.idle_seconds, one.stack
            )
            if not one.device and one.rank < self.size
            else one
            for one in members
        )


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker of a generation as its peers must know it; `ranks` ascend."""

    task: int
    incarnation: str
    host: str
    link_address: str
    ranks: tuple[int, ...]
    nccl: int = 0  # its version of NCCL, 22809 for 2.28.9; 0: it has none

    def __str__(self) -> str:
        return f"worker {self.task} (host {self.host})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a generation, the same for every rank of it.

    Instances from `from_instance` on fail; the group goes on in generation `successor` (0: join again) with instance
    `next_instance`. `members` say the last instance that each has finished. `orderly`: a rank has only left.
    """

    group: str
    key: int
    generation: int
    code: int
    message: str
    from_instance: int
    instance: int = -1
    op: str = ""
    missing: tuple[Member, ...] = ()
    differing: tuple[Member, ...] = ()
    successor: int = 0
    decided_by: str = "coordinator"
    members: tuple[Member, ...] = field(default=())
    orderly: bool = False
    cause: Cause = Cause.UNSPECIFIED
    origin: int | None = None  # the rank with which it began, where it is one
    next_instance: int = 0


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where one rank stands in a generation; `op` to `collective`: the instance asked about, `waits` on: heartbeats.
    With a contract and not `arrived`, its GPU is still writing the value."""

    rank: int
    submitted: int = -1
    finished: int = -1
    last_op: str = ""
    last_site: str = ""
    idle_seconds: float = 0.0
    arrived: bool = False
    op: str = ""
    site: str = ""
    contract: bytes = b""
    collective: Collective | None = None
    waits: int = 0
    waited_seconds: float = 0.0
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Submission:
    """A call of one rank as one instance. `collective`: the call of which the digest was made, where it is known."""

    instance: int
    op: str
    site: str
    contract: bytes
    collective: Collective | None = None


class ReportKind(enum.IntEnum):
    """Kinds of reports of a group loop to the coordinator about a generation; see coordinator.proto."""

    PENDING = 1
    EXPIRED = 2
    MISMATCH = 3
    LOST = 4
    ABORT = 5
    LINK = 6
    LEFT = 7
    EXHAUSTED = 8
    RESUMED = 9
    OVERDUE = 10
    UNANSWERED = 11
    UNCLAIMED = 12
    NATIVE = 13
    NEAR = 14


@dataclass(frozen=True, slots=True)
class Report:
    key: int
    generation: int
    kind: ReportKind
    instance: int = -1
    rank: int = 0
    worker: int = 0
    text: str = ""
    timeout_seconds: float = 0.0
    ranks: tuple[RankPosition, ...] = ()
    peer: int = 0
    last: tuple[Submission, ...] = ()  # of a rank that has gone: what others may find only now that they differ in
    cause: Cause = Cause.UNSPECIFIED  # of an abort that a failure of the rank is behind, or why there is no link
