"""What has to be known before a collective can be carried out, and the programs by which workers tell each other.

Pure. A rank's *rows* are what it has to tell where lengths may differ: the first length of each leaf, or what an uneven
all-to-all sends to each rank. An *announcement* is the root's word on what it is about to send, for those that take
what comes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from collectived_proto.codec import collective_from_proto, collective_to_proto
from collectived_proto.errors import InvalidArgumentError
from collectived_proto.local.wire import MAX_PACKS
from collectived_proto.types import (
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Cutting,
    DType,
    GroupInfo,
    Layout,
    Leaf,
    Operation,
    Pack,
    ReduceOp,
    Scatter,
)
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine.checks import check
from collectived_runtime.engine.ledger import Prepared
from collectived_runtime.engine.program import (
    Program,
    Strand,
    compose,
    digest,
    peers_of,
    queues,
    strand_count,
)
from collectived_runtime.engine.topology import Topology
from collectived_runtime.plan import tree
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.packs import layout

_WORD = Pack(DType.UINT8, DType.UINT8, 0, 0, 0)


def prepare(collective: Collective, rank: int, topology: Topology) -> Prepared:
    """What a rank has described, as its rings refer to it.

    Raises:
        InvalidArgumentError: no rank of the group could mean this. UnimplementedError: these devices cannot do it.
    """
    check(collective, topology.group, rank)
    packs = layout(collective, rank, topology.automatic_pack_bytes)
    strands = max(len(packs.packs), strand_count(collective, topology, packs))
    if strands > MAX_PACKS:
        raise InvalidArgumentError(
            f"{strands} packs, and {MAX_PACKS} can travel at once at most; {_why_so_many(collective)}"
        )
    terms = digest(collective.terms()) if may_be_open(collective.operation) else b""
    return Prepared(collective, digest(collective.contract()), packs, str(collective.operation), terms)


def _why_so_many(collective: Collective) -> str:
    """What made a collective so many packs, and what to do."""
    packing, spec = collective.packing, collective.all_reduce_spec
    if isinstance(collective.operation, Cutting):
        return f"{collective.operation} sends every leaf by itself; give it fewer, larger arrays"
    sharded = f"all_reduce_spec with up to {max(tier.shards for tier in spec)} shards and " if spec else ""
    if packing is None:
        return f"{sharded}bytes_per_pack={collective.bytes_per_pack}: choose a larger one, or 0"
    if packing.num_packs:
        return f"{sharded}num_packs={packing.num_packs}, for every type by itself: choose a smaller one"
    return f"{sharded}num_packs=0 sends every value by itself: choose 1 or more, or agg_small_grads_max_bytes"


def may_be_open(operation: Operation) -> bool:
    """Whether ranks may take what comes: their workers are told what it is before it comes."""
    return isinstance(operation, (Broadcast, Scatter))


def lengths(collective: Collective, topology: Topology) -> Program:
    """By it workers tell each other the rows of their ranks: a sum of tables, each with zeros but for one's own."""
    count = topology.group.size * rows_per_rank(collective, topology.group)
    table = Collective(AllReduce(ReduceOp.SUM), "rows", (Leaf("rows", DType.INT64, (count,)),))
    program = compose(table, topology)
    strands = tuple(replace(strand, plan_hash=digest(f"rows|{strand.plan_hash.hex()}")) for strand in program.strands)
    return replace(program, strands=strands, queues=queues(strands))


def rows_per_rank(collective: Collective, group: GroupInfo) -> int:
    """How many numbers a rank has to tell, where lengths differ."""
    return group.size if isinstance(collective.operation, AllToAll) else len(collective.leaves)


def rows_of(collective: Collective) -> tuple[int, ...]:
    """What a rank has to tell."""
    operation = collective.operation
    return operation.sizes if isinstance(operation, AllToAll) else tuple(leaf.shape[0] for leaf in collective.leaves)


def announcement(topology: Topology, root: int) -> Strand:
    """The strand by which the worker of `root` tells the others what is coming."""
    span = Span(0, 0)
    plan = tree.broadcast(range(len(topology.peers)), topology.place, span, topology.place_of(root))
    plan_hash = digest(f"announcement|{root}|{[peer.ranks for peer in topology.peers]}")
    return Strand(0, 0, _WORD, span, plan, 0, "tree", plan_hash, peers_of(plan))


def alone(strand: Strand) -> Program:
    """A program of one strand that delivers nothing."""
    nothing = Collective(Barrier(), "None", ())
    return Program(
        nothing, Layout((), (), 0, 0), (None,), (strand,), (), (), False, 0, ((0, 1),), ((strand.channel, (strand,)),)
    )


def word(collective: Collective) -> bytes:
    """What the root's worker announces."""
    return collective_to_proto(collective).SerializeToString()


def told(word: bytes) -> tuple[Collective, bytes]:
    """What was announced, and the digest of its contract."""
    collective = collective_from_proto(common_pb2.Collective.FromString(word))
    return collective, digest(collective.contract())


def agrees(model: Prepared, told: Collective, contract: bytes) -> bool:
    """Whether what was announced is what a rank of ours takes part in."""
    return digest(told.terms()) == model.terms if model.collective.open else contract == model.contract


class Table:
    """Rows of this worker's ranks, as a strand reads what a rank submitted."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self._bytes = rows.reshape(-1).view(np.uint8)

    def whole(self, pack_number: int) -> NDArray[np.uint8]:
        return self._bytes
