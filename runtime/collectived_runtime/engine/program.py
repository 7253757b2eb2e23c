"""A program: how one worker carries out one collective of one group, made once per contract and kept.

The ranks of a worker are folded by the worker itself, so plans speak of *places*: workers of the group, numbered by
their lowest rank. A *strand* is one pack (or a shard of it) with its plan and channel; strands of different channels
run side by side, those of one channel one after another, in the same order on all workers, so that no frame waits
behind another one's.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectived_proto.devices import DeviceName
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
    Tier,
    tier_of,
)
from collectived_runtime.device.arithmetic import Arithmetic, unsupported
from collectived_runtime.plan import ring, shuffle, tree
from collectived_runtime.plan.batches import cut
from collectived_runtime.plan.collect import WidePlan
from collectived_runtime.plan.hierarchical import Flat
from collectived_runtime.plan.moves import Recv, Send, Span
from collectived_runtime.plan.named import FLAT
from collectived_runtime.plan.packs import layout as pack_layout
from collectived_runtime.plan.packs import tier_of_leaf

CHANNELS = 8  # strands that run side by side
_SIGNAL = Pack(DType.UINT8, DType.UINT8, 1, 0, 0)  # what a collective without data sends, so that it still synchronises


def digest(text: str) -> bytes:
    """Eight bytes that stand for a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Topology:
    """A generation as one worker sees it. `peers` are its workers in order of their lowest rank; `place` is mine.

    `table` is what AUTO chooses: made by the coordinator, the same for all.
    """

    group: GroupInfo
    peers: tuple[Peer, ...]
    place: int
    table: tuple[Tier, ...]

    @classmethod
    def of(cls, group: GroupInfo, peers: tuple[Peer, ...], task: int, table: tuple[Tier, ...]) -> Topology:
        ordered = tuple(sorted(peers, key=lambda peer: peer.ranks[0]))
        return cls(group, ordered, next(i for i, peer in enumerate(ordered) if peer.task == task), table)

    @property
    def automatic_pack_bytes(self) -> int:
        """The pack size where a call leaves it open; 0: one pack per type."""
        return self.table[0].bytes_per_pack

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
    plan: WidePlan
    channel: int
    algorithm: str
    plan_hash: bytes
    peers: frozenset[int]  # places that the plan speaks to


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
    strands_per_pack: tuple[tuple[int, int], ...]
    queues: tuple[tuple[int, tuple[Strand, ...]], ...]  # by channel, the strand that runs first last

    @property
    def algorithm(self) -> str:
        return self.strands[0].algorithm


def compose(collective: Collective, topology: Topology) -> Program:
    """The program of `collective` for this worker.

    Raises:
        InvalidArgumentError: no rank of the group could mean this: a root outside the group, an undefined operation.
        UnimplementedError: these devices cannot do it.
    """
    check(collective, topology.group)
    local = topology.ranks
    operation = collective.operation
    receiver = operation.root if isinstance(operation, Reduce) else local[0]
    packs = pack_layout(collective, receiver, topology.automatic_pack_bytes)
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
    strands = tuple(
        s for number, pack in enumerate(carried) for s in _strands(collective, topology, packs, number, pack)
    )
    nbytes = sum(leaf.nbytes for leaf in collective.leaves)
    delivers = bool(packs.packs) and not (isinstance(operation, Reduce) and not receivers)
    per_pack = tuple(Counter(strand.pack_number for strand in strands).items())
    return Program(
        collective, packs, arithmetic, strands, sources, receivers, delivers, nbytes, per_pack, _queues(strands)
    )


def _queues(strands: Sequence[Strand]) -> tuple[tuple[int, tuple[Strand, ...]], ...]:
    queues: dict[int, list[Strand]] = {}
    for strand in reversed(strands):
        queues.setdefault(strand.channel, []).append(strand)
    return tuple((channel, tuple(queue)) for channel, queue in queues.items())


def check(collective: Collective, group: GroupInfo) -> None:
    """Raises what `compose` documents; for a service that wants to refuse before anything is kept."""
    operation = collective.operation
    if isinstance(operation, (Reduce, Broadcast)) and operation.root >= group.size:
        raise InvalidArgumentError(
            f"root {operation.root} is not a rank of this group of {group.size}: expected 0 to {group.size - 1}"
        )
    if isinstance(operation, (AllReduce, Reduce)):
        for leaf in collective.leaves:
            if why := unsupported(operation.reduce_op, leaf.dtype):
                raise UnimplementedError(f"{leaf.path or 'value'}: {why}")
    for tier in collective.all_reduce_spec:
        _check_tier(tier, group)


def _check_tier(tier: Tier, group: GroupInfo) -> None:
    if tier.algorithm not in _ACROSS and tier.algorithm not in _NEEDS_GPUS:
        raise InvalidArgumentError(f"unknown algorithm {tier.algorithm!r} in all_reduce_spec")
    host = next((member for member in group.members if DeviceName.parse(member.device).kind != "GPU"), None)
    if tier.algorithm in _NEEDS_GPUS and host is not None:
        raise UnimplementedError(
            f"algorithm {tier.algorithm!r} needs GPUs, and rank {host.rank} of this group is on {host.device}; "
            "choose xring, pscpu or pscpu/pscpu"
        )


def _strands(collective: Collective, topology: Topology, layout: Layout, number: int, pack: Pack) -> list[Strand]:
    """The strands of a pack: one per cut and shard, each over its part of the pack and on a channel of its own."""
    name, shards, make = _algorithm(collective, topology, layout, number, pack)
    packs = collective.packing.num_packs if collective.packing is not None else 0
    spans = [span for part in cut(pack.count, packs or 1) for span in part.split(shards)]
    described = f"{name}|{len(spans)}|{number}|{pack.count}|{pack.dtype}|{[peer.ranks for peer in topology.peers]}"
    found = []
    for shard, span in enumerate(spans):
        channel = (number * len(spans) + shard) % CHANNELS
        plan = make(span)
        peers = frozenset(move.peer for moves in plan for move in moves if isinstance(move, (Send, Recv)))
        found.append(Strand(number, shard, pack, span, plan, channel, name, digest(f"{described}|{shard}"), peers))
    return found


def _algorithm(
    collective: Collective, topology: Topology, layout: Layout, number: int, pack: Pack
) -> tuple[str, int, Callable[[Span], WidePlan]]:
    """What carries this pack across workers, in how many shards: the same choice on every worker."""
    places = range(len(topology.peers))
    me = topology.place
    operation = collective.operation
    if isinstance(operation, Reduce):
        root = topology.place_of(operation.root)
        return "tree", 1, lambda span: tree.reduce(places, me, span, root)
    if isinstance(operation, Broadcast):
        root = topology.place_of(operation.root)
        return "tree", 1, lambda span: tree.broadcast(places, me, span, root)
    if len(places) == 1:
        return "local", 1, lambda span: ring.all_reduce(places, me, span)
    if collective.all_reduce_spec and layout.packs:
        tier = tier_of_leaf(collective, next(i for i, place in enumerate(layout.places) if place.pack == number))
    else:
        tier = tier_of(topology.table, pack.count * pack.dtype.itemsize)
    name = tier.algorithm
    if collective.implementation in _RING_HINTS and not collective.all_reduce_spec:
        name = "ring"
    across = _ACROSS[name]
    return name, tier.shards, lambda span: tuple(across(places, me, span))


# The ranks of a worker have been folded by it: what is left of every algorithm is its stage across workers.
_ACROSS: dict[str, Flat] = {**FLAT, "pscpu": shuffle.all_reduce, "pscpu/pscpu": shuffle.all_reduce}
# A hint for NCCL where there are no GPUs falls back to the ring.
_RING_HINTS = (CommunicationImplementation.RING, CommunicationImplementation.NCCL)
_NEEDS_GPUS = ("nccl", "nccl/xring", "nccl/rechd", "nccl/pscpu", "psgpu")
