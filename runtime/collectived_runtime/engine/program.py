"""A program: how one worker carries out one collective of one group, made once per contract and kept.

The ranks of a worker are folded by the worker itself, so plans speak of *places*: workers of the group, numbered by
their lowest rank. A *strand* is one pack (or a shard of it) with its plan and channel; strands of different channels
run side by side, those of one channel one after another, in the same order on all workers, so that no frame waits
behind another one's.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import (
    Broadcast,
    Collective,
    Cutting,
    DType,
    Gather,
    Layout,
    Operation,
    Pack,
    Reduce,
    ReduceOp,
    Scatter,
)
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.engine.carriers import INSIDE, NCCL, carrier_of, carrier_of_cut
from collectived_runtime.engine.checks import check
from collectived_runtime.engine.cutting import Cut, Rows, Workers, cut
from collectived_runtime.engine.minute import NOTHING, Load, load_of
from collectived_runtime.engine.outlines import outlines
from collectived_runtime.engine.recorder import NO_GIST, Gist, traffic
from collectived_runtime.engine.topology import Topology
from collectived_runtime.plan import named, ring, tree
from collectived_runtime.plan.batches import cut as cut_evenly
from collectived_runtime.plan.batches import strands_of
from collectived_runtime.plan.collect import Collect, Kind, Native, WidePlan
from collectived_runtime.plan.moves import Recv, Send, Span
from collectived_runtime.plan.named import ON_HOSTS
from collectived_runtime.plan.packs import aligned, reduce_op_of
from collectived_runtime.plan.packs import layout as pack_layout

CHANNELS = 8  # strands that run side by side
AT_ONCE_BYTES = 256 << 10  # of a result: what takes the worker some tens of microseconds
_NATIVE = {Reduce: Kind.REDUCE, Broadcast: Kind.BROADCAST}
_SIGNAL = Pack(DType.UINT8, DType.UINT8, 1, 0, 0)  # what a collective without data sends, so that it still synchronises


def digest(text: str) -> bytes:
    """Eight bytes that stand for a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


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
    cut: Cut | None = None  # where the operation cuts leaves or joins them
    why: str = ""  # this algorithm: for people
    dtype: np.dtype[Any] = field(init=False, compare=False)  # of its pack
    result_dtype: np.dtype[Any] = field(init=False, compare=False)
    result: slice = field(init=False, compare=False)  # bytes of its pack's result, in a slot
    straight: bool = field(init=False, compare=False)  # whether values are combined element by element as they lie

    def __post_init__(self) -> None:
        pack, cut = self.pack, self.cut
        size = (pack.count if cut is None else cut.output) * pack.result_dtype.itemsize
        facts = {
            "dtype": to_numpy(pack.dtype),
            "result_dtype": to_numpy(pack.result_dtype),
            "result": slice(pack.result_offset, pack.result_offset + size),
            "straight": cut is None or cut.straight,
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    @property
    def inside(self) -> bool:
        """Whether NCCL is to join the GPUs of each worker, where it has several."""
        return self.algorithm.startswith(INSIDE)


@dataclass(frozen=True, slots=True)
class Program:
    """`sources` are the local ranks that contribute, `receivers` those that get a result.

    A result slot begins with `head`, the outlines of those ranks that do not know what comes; `outlines` says where
    theirs begin. Offsets of results in `layout` count from behind it.

    What is folded or moved within one worker, in one pack that is small, needs no strand that runs: it is carried out
    `at_once`, but not what NCCL carries out, whose turn is waited for and given back.
    """

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
    head: bytes = b""
    outlines: Mapping[int, int] = field(default_factory=dict)  # rank -> offset in the slot
    alone: bool = False  # whether all ranks are on this worker
    at_once: bool = False
    load: Load = NOTHING
    gist: Gist = NO_GIST  # for the recorder
    native: int = field(init=False)  # how many of its strands NCCL carries out
    inside: bool = field(init=False)  # whether NCCL joins the GPUs of a worker in any of its strands; see `Strand`
    slot_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "native", sum(strand.algorithm == NCCL for strand in self.strands))
        object.__setattr__(self, "inside", any(strand.inside for strand in self.strands))
        object.__setattr__(self, "slot_bytes", len(self.head) + self.layout.result_bytes)

    @property
    def algorithm(self) -> str:
        return self.strands[0].algorithm

    @property
    def reasons(self) -> dict[str, str]:
        """Every algorithm in use, in order of packs, with why it was chosen where it was chosen first."""
        found: dict[str, str] = {}
        for strand in self.strands:
            found.setdefault(strand.algorithm, strand.why)
        return found

    @property
    def shards(self) -> int:
        """The most parts that a pack is cut into."""
        return max(count for _, count in self.strands_per_pack)


def compose(collective: Collective, topology: Topology, rows: Rows = (), strangers: Sequence[int] = ()) -> Program:
    """The program of `collective` for this worker.

    Args:
        rows: of all ranks, where lengths differ.
        strangers: local ranks that take what comes, and do not know what that is.

    Raises:
        InvalidArgumentError: no rank of the group could mean this: a root outside the group, an undefined operation.
        UnimplementedError: these devices cannot do it.
    """
    check(collective, topology.group)
    local = topology.ranks
    operation = collective.operation
    receiver = operation.root if isinstance(operation, (Reduce, Gather)) else local[0]
    packs = pack_layout(collective, receiver, topology.automatic_pack_bytes)
    sources, receivers = local, local
    if isinstance(operation, (Reduce, Gather)):
        receivers = (operation.root,) if operation.root in local else ()
    elif isinstance(operation, (Broadcast, Scatter)):
        sources = (operation.root,) if operation.root in local else ()
    if not packs.packs:
        sources = ()
        receivers = tuple(strangers)
    carried = packs.packs or (_SIGNAL,)
    reduce_op = reduce_op_of(collective) or (None if packs.packs else ReduceOp.SUM)
    size = topology.group.size
    arithmetic = tuple(
        Arithmetic(reduce_op, pack.dtype, pack.result_dtype, size) if reduce_op else None for pack in carried
    )
    if isinstance(operation, Cutting) and packs.packs:
        packs, strands = _cut_strands(collective, operation, topology, packs, rows)
    else:
        first = first_leaves(packs)
        strands = tuple(
            s for number, pack in enumerate(carried) for s in _strands(collective, topology, first, number, pack)
        )
    head, told = outlines(collective, packs, [strand.cut for strand in strands], receivers, strangers)
    nbytes = sum(leaf.nbytes for leaf in collective.leaves)
    per_pack = tuple(Counter(strand.pack_number for strand in strands).items())
    return Program(
        collective,
        packs,
        arithmetic,
        strands,
        sources,
        receivers,
        bool(receivers),
        nbytes,
        per_pack,
        queues(strands),
        head,
        told,
        len(topology.peers) == 1,
        _at_once(topology, packs, strands, sources, receivers),
        load_of(collective, topology.group.size, rows),
        _gist(topology, strands, arithmetic, nbytes),
    )


def _gist(topology: Topology, strands: Sequence[Strand], arithmetic: Sequence[Arithmetic | None], nbytes: int) -> Gist:
    per_pack = Counter(strand.pack_number for strand in strands)
    moved = []
    for strand in strands:
        how = arithmetic[strand.pack_number]
        row = how.partial_bytes if how is not None else strand.pack.dtype.itemsize
        for moves in strand.plan:
            for move in moves:
                match move:
                    case Send(peer, span):
                        moved.append((topology.peers[peer].task, len(span) * row, 0))
                    case Recv(peer, span):
                        moved.append((topology.peers[peer].task, 0, len(span) * row))
                    case Collect(order, span):
                        others = (place for place in order if place != topology.place)
                        moved += [(topology.peers[place].task, 0, len(span) * row) for place in others]
    return Gist(strands[0].algorithm, nbytes, len(per_pack), max(per_pack.values()), traffic(moved))


def _at_once(
    topology: Topology, packs: Layout, strands: Sequence[Strand], sources: Sequence[int], receivers: Sequence[int]
) -> bool:
    if len(topology.peers) > 1 or len(packs.packs) != 1 or len(strands) != 1 or not (sources and receivers):
        return False
    if strands[0].algorithm == NCCL or strands[0].inside:
        return False
    return strands[0].cut is None and packs.result_bytes <= AT_ONCE_BYTES


def _cut_strands(
    collective: Collective, operation: Cutting, topology: Topology, packs: Layout, rows: Rows
) -> tuple[Layout, tuple[Strand, ...]]:
    """One strand per leaf, and the layout of what this worker receives."""
    workers = Workers(tuple(peer.ranks for peer in topology.peers), topology.place)
    agreed = collective.agreed()
    described = f"{agreed.operation}|{[leaf.shape for leaf in agreed.leaves]}|{rows}|{workers.ranks}"
    result_bytes = 0
    carried, strands = [], []
    first = first_leaves(packs)
    for number, pack in enumerate(packs.packs):
        index = first[number]
        leaf = collective.leaves[index]
        how = cut(operation, workers, index, leaf.shape[0], math.prod(leaf.shape[1:]), rows)
        carried.append(replace(pack, count=how.count, result_offset=result_bytes))
        result_bytes += aligned(how.output * pack.result_dtype.itemsize)
        name, why = carrier_of_cut(operation, workers)
        plan_hash = digest(f"{described}|{number}")
        span = Span(0, how.count)
        strands.append(
            Strand(
                number,
                0,
                carried[-1],
                span,
                how.plan,
                number % CHANNELS,
                name,
                plan_hash,
                peers_of(how.plan),
                how,
                why,
            )
        )
    return Layout(tuple(carried), packs.places, packs.staging_bytes, result_bytes), tuple(strands)


def queues(strands: Sequence[Strand]) -> tuple[tuple[int, tuple[Strand, ...]], ...]:
    """Strands by channel, in order of packs; in each the one that runs first stands last."""
    found: dict[int, list[Strand]] = {strand.channel: [] for strand in strands}
    for strand in reversed(strands):
        found[strand.channel].append(strand)
    return tuple((channel, tuple(queue)) for channel, queue in found.items())


def first_leaves(layout: Layout) -> dict[int, int]:
    """The first leaf of each pack."""
    found: dict[int, int] = {}
    for leaf, place in enumerate(layout.places):
        found.setdefault(place.pack, leaf)
    return found


def strand_count(collective: Collective, topology: Topology, layout: Layout) -> int:
    """How many strands `compose` will make, without making them.

    Args:
        collective: as `engine.checks.check` has let it pass.
        layout: its packs.
    """
    if isinstance(collective.operation, Cutting) or not layout.packs:
        return max(1, len(layout.packs))
    first, parts = first_leaves(layout), _parts(collective)
    return sum(
        strands_of(pack.count, parts, carrier_of(collective, topology, first, number, pack).shards)
        for number, pack in enumerate(layout.packs)
    )


def _parts(collective: Collective) -> int:
    """Into how many parts packs are cut."""
    return (collective.packing.num_packs if collective.packing is not None else 0) or 1


def _strands(
    collective: Collective, topology: Topology, first: Mapping[int, int], number: int, pack: Pack
) -> list[Strand]:
    """The strands of a pack: one per cut and shard, each over its part of the pack and on a channel of its own."""
    name, shards, why = carrier_of(collective, topology, first, number, pack)
    make = _planner(collective.operation, topology, name)
    spans = [
        span
        for part in cut_evenly(pack.count, _parts(collective))
        for span in part.split(min(shards, max(1, len(part))))
    ]
    described = f"{name}|{len(spans)}|{number}|{pack.count}|{pack.dtype}|{[peer.ranks for peer in topology.peers]}"
    found = []
    for shard, span in enumerate(spans):
        channel = (number * len(spans) + shard) % CHANNELS
        plan = make(span)
        plan_hash = digest(f"{described}|{shard}")
        found.append(Strand(number, shard, pack, span, plan, channel, name, plan_hash, peers_of(plan), why=why))
    return found


def peers_of(plan: WidePlan) -> frozenset[int]:
    """The places that a plan speaks to."""
    return frozenset(move.peer for moves in plan for move in moves if isinstance(move, (Send, Recv)))


def _planner(operation: Operation, topology: Topology, name: str) -> Callable[[Span], WidePlan]:
    """By span, the plan of this worker."""
    places, me = range(len(topology.peers)), topology.place
    root = topology.place_of(operation.root) if isinstance(operation, (Reduce, Broadcast)) else 0
    if name == NCCL:
        kind = next((kind for of, kind in _NATIVE.items() if isinstance(operation, of)), Kind.ALL_REDUCE)
        return lambda span: ((Native(kind, tuple(places), span, root),),)
    if isinstance(operation, Reduce):
        return lambda span: tree.reduce(places, me, span, root)
    if isinstance(operation, Broadcast):
        return lambda span: tree.broadcast(places, me, span, root)
    if name.startswith(INSIDE):
        return lambda span: named.all_reduce(name, [(place,) for place in places], me, span)
    if len(places) == 1:
        return lambda span: ring.all_reduce(places, me, span)
    across = ON_HOSTS[name]
    return lambda span: tuple(across(places, me, span))
