"""A program: how one worker carries out one collective of one group, made once per contract and kept.

The ranks of a worker are folded by the worker itself, so plans speak of *places*: workers of the group, numbered by
their lowest rank. A *strand* is one pack (or a shard of it) with its plan and channel; strands of different channels
run side by side, those of one channel one after another, in the same order on all workers, so that no frame waits
behind another one's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from collectived_proto.errors import InvalidArgumentError, UnimplementedError
from collectived_proto.types import (
    AllReduce,
    Broadcast,
    Collective,
    CommunicationImplementation,
    DType,
    GroupInfo,
    Layout,
    Pack,
    Peer,
    Reduce,
    ReduceOp,
)
from collectived_runtime.device.arithmetic import Arithmetic, unsupported
from collectived_runtime.plan import ring, tree
from collectived_runtime.plan.moves import Plan, Recv, Send, Span
from collectived_runtime.plan.packs import layout as pack_layout

CHANNELS = 4  # strands that run side by side
TREE_BYTES = 32 << 10  # up to here a tree's few rounds beat a ring's small volume
_SIGNAL = Pack(DType.UINT8, DType.UINT8, 1, 0, 0)  # what a collective without data sends, so that it still synchronises


def digest(text: str) -> bytes:
    """Eight bytes that stand for a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Topology:
    """A generation as one worker sees it. `peers` are its workers in order of their lowest rank; `place` is mine."""

    group: GroupInfo
    peers: tuple[Peer, ...]
    place: int

    @classmethod
    def of(cls, group: GroupInfo, peers: tuple[Peer, ...], task: int) -> Topology:
        ordered = tuple(sorted(peers, key=lambda peer: peer.ranks[0]))
        return cls(group, ordered, next(i for i, peer in enumerate(ordered) if peer.task == task))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this worker."""
        return self.peers[self.place].ranks

    def place_of(self, rank: int) -> int:
        return next(place for place, peer in enumerate(self.peers) if rank in peer.ranks)


@dataclass(frozen=True, slots=True)
class Strand:
    pack_number: int
    shard: int
    pack: Pack
    span: Span
    plan: Plan
    channel: int
    algorithm: str
    plan_hash: bytes

    @property
    def peers(self) -> frozenset[int]:
        """Places that the plan speaks to."""
        return frozenset(move.peer for moves in self.plan for move in moves if isinstance(move, (Send, Recv)))


@dataclass(frozen=True, slots=True)
class Program:
    """`sources` are the local ranks that contribute, `receivers` those that get a result."""

    collective: Collective
    layout: Layout
    arithmetic: tuple[Arithmetic | None, ...]  # per pack; None: elements are moved as they are
    strands: tuple[Strand, ...]
    sources: tuple[int, ...]
    receivers: tuple[int, ...]
    delivers: bool  # whether results are written on this worker at all
    nbytes: int

    @property
    def algorithm(self) -> str:
        return self.strands[0].algorithm


def compose(collective: Collective, topology: Topology) -> Program:
    """The program of `collective` for this worker.

    Raises:
        InvalidArgumentError: no rank of the group could mean this: a root outside the group, an undefined operation.
        UnimplementedError: these devices cannot do it.
    """
    check(collective, topology.group.size)
    local = topology.ranks
    operation = collective.operation
    packs = pack_layout(collective, operation.root if isinstance(operation, Reduce) else local[0])
    sources, receivers = local, local
    reduce_op: ReduceOp | None = None
    if isinstance(operation, (AllReduce, Reduce)):
        reduce_op = operation.reduce_op
    if isinstance(operation, Reduce):
        receivers = (operation.root,) if operation.root in local else ()
    elif isinstance(operation, Broadcast):
        sources = (operation.root,) if operation.root in local else ()
    if not packs.packs:
        sources = receivers = ()
    carried = packs.packs or (_SIGNAL,)
    size = topology.group.size
    arithmetic = tuple(
        Arithmetic(reduce_op or ReduceOp.SUM, pack.dtype, pack.result_dtype, size)
        if reduce_op or not packs.packs
        else None
        for pack in carried
    )
    strands = tuple(_strand(collective, topology, number, pack) for number, pack in enumerate(carried))
    nbytes = sum(leaf.nbytes for leaf in collective.leaves)
    delivers = bool(packs.packs) and not (isinstance(operation, Reduce) and not receivers)
    return Program(collective, packs, arithmetic, strands, sources, receivers, delivers, nbytes)


def check(collective: Collective, size: int) -> None:
    """Raises what `compose` documents; for a service that wants to refuse before anything is kept."""
    operation = collective.operation
    if isinstance(operation, (Reduce, Broadcast)) and operation.root >= size:
        raise InvalidArgumentError(
            f"root {operation.root} is not a rank of this group of {size}: expected 0 to {size - 1}"
        )
    if isinstance(operation, (AllReduce, Reduce)):
        for leaf in collective.leaves:
            if why := unsupported(operation.reduce_op, leaf.dtype):
                raise UnimplementedError(f"{leaf.path or 'value'}: {why}")


def _strand(collective: Collective, topology: Topology, number: int, pack: Pack) -> Strand:
    name, make = _algorithm(collective, topology, pack)
    span = Span(0, pack.count)
    described = f"{name}|{number}|{pack.count}|{pack.dtype}|{[peer.ranks for peer in topology.peers]}"
    return Strand(number, 0, pack, span, make(span), number % CHANNELS, name, digest(described))


def _algorithm(collective: Collective, topology: Topology, pack: Pack) -> tuple[str, Callable[[Span], Plan]]:
    """What carries this pack across workers: the same choice on every worker, from what all of them know."""
    places = range(len(topology.peers))
    me = topology.place
    operation = collective.operation
    if isinstance(operation, Reduce):
        root = topology.place_of(operation.root)
        return "tree", lambda span: tree.reduce(places, me, span, root)
    if isinstance(operation, Broadcast):
        root = topology.place_of(operation.root)
        return "tree", lambda span: tree.broadcast(places, me, span, root)
    small = pack.count * pack.dtype.itemsize <= TREE_BYTES
    if len(places) == 1:
        return "local", lambda span: ring.all_reduce(places, me, span)
    if small and collective.implementation is not CommunicationImplementation.RING:
        return "tree", lambda span: tree.all_reduce(places, me, span)
    return "ring", lambda span: ring.all_reduce(places, me, span)
