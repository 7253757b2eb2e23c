"""The data that workers need before a collective can run, and the programs by which they exchange it.

Pure. A rank's *rows* are its numbers where lengths may differ: the first length of each leaf, or the rows that an
uneven all-to-all sends to each rank. An *announcement* is the root's description of its value, for ranks that take any
value.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from collectived_proto.codec import MAX_BYTES, collective_from_proto, collective_to_proto
from collectived_proto.device_results import lay_out_device_rows
from collectived_proto.errors import InvalidArgumentError
from collectived_proto.ipc.messages import MAX_PACKS
from collectived_proto.types import (
    AllReduce,
    AllToAll,
    AxisOperation,
    Barrier,
    Broadcast,
    Collective,
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
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile.program import (
    CompiledCollective,
    PackTask,
    compile_program,
    count_tasks,
    digest,
    find_peers,
)
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.validation import check, explain_missing_axis
from collectived_runtime.plan import tree
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.packing import layout

_ANNOUNCEMENT_PACK = Pack(DType.UINT8, DType.UINT8, 0, 0, 0)


def prepare(collective: Collective, rank: int, topology: GroupTopology) -> PreparedCollective:
    """Check what a rank has described, and prepare what its submissions refer to.

    Raises:
        InvalidArgumentError: no rank of the group could mean this. UnimplementedError: these devices cannot do it.
    """
    check(collective, topology.group, rank)
    packs = layout(collective, rank, topology.automatic_pack_bytes)
    for what, nbytes in (("value", packs.staging_bytes), ("result", packs.result_bytes)):
        if nbytes > MAX_BYTES:
            raise InvalidArgumentError(f"a {what} of {nbytes} bytes, and at most 2^63 - 1 can be described: cut it up")
    tasks = max(len(packs.packs), count_tasks(collective, topology, packs))
    if tasks > MAX_PACKS:
        raise InvalidArgumentError(
            f"{tasks} packs, and {MAX_PACKS} can travel at once at most; {_explain_pack_count(collective)}"
        )
    terms = digest(collective.open_contract()) if can_be_open(collective.operation) else b""
    op, flaw = str(collective.operation), explain_missing_axis(collective)
    rows = lay_out_device_rows(collective, packs, rank, topology.group.size)
    return PreparedCollective(collective, digest(collective.contract()), packs, op, terms, flaw, rows)


def _explain_pack_count(collective: Collective) -> str:
    """Explain why a collective has so many packs, and what to do."""
    packing, spec = collective.packing, collective.all_reduce_spec
    if isinstance(collective.operation, AxisOperation):
        return f"{collective.operation} sends every leaf by itself; give it fewer, larger arrays"
    sharded = f"all_reduce_spec with up to {max(tier.shards for tier in spec)} shards and " if spec else ""
    if packing is None:
        return f"{sharded}bytes_per_pack={collective.bytes_per_pack}: choose a larger one, or 0"
    if packing.num_packs:
        return f"{sharded}num_packs={packing.num_packs}, for every type by itself: choose a smaller one"
    return f"{sharded}num_packs=0 sends every value by itself: choose 1 or more, or agg_small_grads_max_bytes"


def can_be_open(operation: Operation) -> bool:
    """Whether ranks may take any value: their workers get its description before it comes."""
    return isinstance(operation, (Broadcast, Scatter))


def compile_length_exchange(collective: Collective, topology: GroupTopology) -> CompiledCollective:
    """The program by which workers exchange the rows of their ranks.

    It is a sum of tables, each with zeros but for the rows of its own ranks.
    """
    count = topology.group.size * rows_per_rank(collective, topology.group)
    table = Collective(AllReduce(ReduceOp.SUM), "rows", (Leaf("rows", DType.INT64, (count,)),))
    program = compile_program(table, topology)
    tasks = tuple(replace(task, plan_hash=digest(f"rows|{task.plan_hash.hex()}")) for task in program.tasks)
    return replace(program, tasks=tasks)


def rows_per_rank(collective: Collective, group: GroupInfo) -> int:
    """How many numbers a rank has to send, where lengths differ."""
    return group.size if isinstance(collective.operation, AllToAll) else len(collective.leaves)


def compile_announcement(topology: GroupTopology, root: int) -> PackTask:
    """The task by which the worker of `root` announces its value to the others."""
    span = Span(0, 0)
    plan = tree.broadcast(range(len(topology.peers)), topology.place, span, topology.place_of(root))
    plan_hash = digest(f"announcement|{root}|{[peer.ranks for peer in topology.peers]}")
    return PackTask(0, 0, _ANNOUNCEMENT_PACK, span, plan, 0, "tree", plan_hash, find_peers(plan))


def single_task_program(task: PackTask) -> CompiledCollective:
    """A program of one task that delivers nothing."""
    nothing = Collective(Barrier(), "None", ())
    return CompiledCollective(nothing, Layout((), (), 0, 0), (None,), (task,), contributors=(), receivers=())


def encode_announcement(collective: Collective) -> bytes:
    """Encode what the root's worker announces: the same in all instances of a contract."""
    return collective_to_proto(replace(collective, site="")).SerializeToString()


def decode_announcement(word: bytes) -> tuple[Collective, bytes]:
    """Decode what was announced; also returns the digest of its contract."""
    collective = collective_from_proto(common_pb2.Collective.FromString(word))
    return collective, digest(collective.contract())


def matches_announcement(model: PreparedCollective, told: Collective, contract: bytes) -> bool:
    """Whether the announced collective is the one in which a local rank takes part."""
    return digest(told.open_contract()) == model.terms if model.collective.open else contract == model.contract


class LengthTable:
    """Rows of this worker's ranks, which a task reads like `InputBuffers`."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self._bytes = rows.reshape(-1).view(np.uint8)

    def contiguous_pack(self, pack_number: int) -> NDArray[np.uint8]:
        return self._bytes
