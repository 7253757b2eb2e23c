"""A program: how one worker carries out one collective of one group, made once per contract and kept.

The ranks of a worker are folded by the worker itself, so plans speak of *places*: workers of the group, numbered by
their lowest rank; only moves of NCCL speak of GPUs. A *task* is one pack (or a shard of it) with its plan and channel;
tasks of different channels run side by side, those of one channel one after another, in the same order on all workers,
so that no frame waits behind another one's.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

import numpy as np

from collectived_proto.device_results import DeviceRows
from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import (
    AxisOperation,
    Broadcast,
    Collective,
    DType,
    Gather,
    Layout,
    Operation,
    Pack,
    Reduce,
    ReduceOp,
    Reduction,
    Scatter,
)
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile.blocks import BlockLayout, lay_out_packs, lay_out_shares
from collectived_runtime.engine.compile.gpu_rows import GpuRows, LeafRows, plan_gpu_rows
from collectived_runtime.engine.compile.partition import Partition, RanksByWorker, Rows, partition_leaf
from collectived_runtime.engine.compile.result_header import encode_result_headers
from collectived_runtime.engine.compile.selection import (
    HIERARCHICAL_PREFIX,
    NCCL,
    select_algorithm,
    select_partition_algorithm,
)
from collectived_runtime.engine.record.flight_recorder import EMPTY_SUMMARY, ProgramSummary, sum_traffic
from collectived_runtime.engine.record.rates import NO_LOAD, OperationLoad, compute_load
from collectived_runtime.engine.submit.validation import check
from collectived_runtime.plan import catalog, ring, tree
from collectived_runtime.plan.catalog import ACROSS_ALGORITHMS
from collectived_runtime.plan.moves import RecvMove, SendMove, Span
from collectived_runtime.plan.packing import align_up, get_reduce_op
from collectived_runtime.plan.packing import layout as pack_layout
from collectived_runtime.plan.tf_packing import count_pack_tasks
from collectived_runtime.plan.tf_packing import split_elements as cut_evenly
from collectived_runtime.plan.wide_moves import CollectMove, NativeMove, WidePlan

CHANNELS = 8  # tasks that run side by side
MAX_INLINE_BYTES = 256 << 10  # of a result: what takes the worker some tens of microseconds
_SIGNAL_PACK = Pack(
    DType.UINT8, DType.UINT8, 1, 0, 0
)  # the payload of a collective without data, so that it still synchronises


def digest(text: str) -> bytes:
    """Hash a text into eight bytes."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class PackTask:
    pack_number: int
    shard: int
    pack: Pack
    span: Span
    plan: WidePlan
    channel: int
    algorithm: str
    plan_hash: bytes
    peers: frozenset[int]  # places that the plan speaks to
    partition: Partition | None = None  # where the operation cuts leaves or joins them
    reason: str = ""  # this algorithm: for people
    blocks: BlockLayout | None = None  # the units of its plan instead of elements, where it travels compressed
    block_count: int = 0  # of its pack
    gpu_rows: tuple[GpuRows, ...] = ()  # where NCCL carries it between GPUs
    dtype: np.dtype[Any] = field(init=False, compare=False)  # of its pack
    result_dtype: np.dtype[Any] = field(init=False, compare=False)
    result_slice: slice = field(init=False, compare=False)  # bytes of its pack's result, in a slot
    is_in_order: bool = field(init=False, compare=False)  # whether values are combined element by element as they lie
    is_hierarchical: bool = field(init=False, compare=False)  # whether NCCL works inside of this worker alone

    def __post_init__(self) -> None:
        pack, cut = self.pack, self.partition
        size = (pack.count if cut is None else cut.output_count) * pack.result_dtype.itemsize
        facts = {
            "dtype": to_numpy(pack.dtype),
            "result_dtype": to_numpy(pack.result_dtype),
            "result_slice": slice(pack.result_offset, pack.result_offset + size),
            "is_in_order": cut is None or cut.is_in_order,
            "is_hierarchical": self.algorithm != NCCL
            and any(isinstance(move, NativeMove) for moves in self.plan for move in moves),
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """The work of one worker for a collective.

    `contributors` are the local ranks that contribute, `receivers` those that get a result.

    A result slot begins with `header`, the outlines of those ranks that do not know what comes; `header_offsets` says
    where theirs begin. Offsets of results in `layout` count from behind it.

    A small pack that is folded or moved within one worker needs no task that runs: it is carried out
    `is_inline`. NCCL's work is not, because its turn is waited for and given back.
    """

    collective: Collective
    layout: Layout
    arithmetic: tuple[Arithmetic | None, ...]  # per pack; None: elements are moved as they are
    tasks: tuple[PackTask, ...]
    contributors: tuple[int, ...]
    receivers: tuple[int, ...]
    header: bytes = b""
    header_offsets: Mapping[int, int] = field(default_factory=dict)  # rank -> offset in the slot
    is_single_worker: bool = False  # whether all ranks are on this worker
    is_inline: bool = False
    load: OperationLoad = NO_LOAD
    summary: ProgramSummary = EMPTY_SUMMARY  # for the recorder
    tasks_per_pack: tuple[tuple[int, int], ...] = field(init=False)
    queues: tuple[tuple[int, tuple[PackTask, ...]], ...] = field(
        init=False
    )  # by channel, the task that runs first last
    nccl_task_count: int = field(init=False)  # how many of its tasks NCCL carries out
    is_hierarchical: bool = field(init=False)  # whether any of its tasks is
    slot_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks_per_pack", tuple(Counter(task.pack_number for task in self.tasks).items()))
        object.__setattr__(self, "queues", build_queues(self.tasks))
        object.__setattr__(self, "nccl_task_count", sum(task.algorithm == NCCL for task in self.tasks))
        object.__setattr__(self, "is_hierarchical", any(task.is_hierarchical for task in self.tasks))
        object.__setattr__(self, "slot_bytes", len(self.header) + self.layout.result_bytes)

    @property
    def algorithm(self) -> str:
        return self.tasks[0].algorithm

    def fits_device_rows(self, rank: int, expected: DeviceRows | None) -> bool:
        """Whether a rank gets as many rows of each leaf as it has room for on its GPU; True where it gets no rows."""
        if expected is None:
            return True
        cuts = [task.partition for task in self.tasks]
        return len(cuts) == len(expected.rows) and all(
            cut is not None and sum(count for _, count in cut.pieces[rank]) == rows
            for cut, rows in zip(cuts, expected.rows, strict=True)
        )

    @property
    def reasons(self) -> dict[str, str]:
        """Every algorithm in use, in order of packs, with why it was chosen where it was chosen first."""
        found: dict[str, str] = {}
        for task in self.tasks:
            found.setdefault(task.algorithm, task.reason)
        return found

    @property
    def max_shards(self) -> int:
        """The most parts that a pack is cut into."""
        return max(count for _, count in self.tasks_per_pack)


def compile_program(
    collective: Collective,
    topology: GroupTopology,
    rows: Rows = (),
    strangers: Sequence[int] = (),
    *,
    leaves_own: bool = False,
) -> CompiledCollective:
    """Compile the program of `collective` for this worker.

    Args:
        rows: of all ranks, where lengths differ.
        strangers: local ranks that take what comes, and do not know what that is.
        leaves_own: whether the only local rank takes its own rows of the result from its own arrays.

    Raises:
        InvalidArgumentError: no rank of the group could mean this: a root outside the group, an undefined operation.
        UnimplementedError: these devices cannot do it.
    """
    check(collective, topology.group)
    local = topology.own_ranks
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
    carried = packs.packs or (_SIGNAL_PACK,)
    reduce_op = get_reduce_op(collective) or (None if packs.packs else ReduceOp.SUM)
    size = topology.group.size
    arithmetic = tuple(
        Arithmetic(reduce_op, pack.dtype, pack.result_dtype, size) if reduce_op else None for pack in carried
    )
    if isinstance(operation, AxisOperation) and packs.packs:
        packs, tasks = _make_partition_tasks(collective, operation, topology, packs, rows, leaves_own)
    else:
        first = first_leaves(packs)
        layouts = lay_out_packs(collective, topology, packs) or (None,)
        tasks = tuple(
            s
            for number, (pack, blocks) in enumerate(zip(carried, layouts, strict=True))
            for s in _make_pack_tasks(collective, topology, first, number, pack, blocks)
        )
    head, told = encode_result_headers(collective, packs, [task.partition for task in tasks], receivers, strangers)
    return CompiledCollective(
        collective=collective,
        layout=packs,
        arithmetic=arithmetic,
        tasks=tasks,
        contributors=sources,
        receivers=receivers,
        header=head,
        header_offsets=told,
        is_single_worker=len(topology.peers) == 1,
        is_inline=_can_run_inline(topology, packs, tasks, sources, receivers),
        load=compute_load(collective, topology.group.size, rows),
        summary=_summarize(topology, tasks, arithmetic, sum(leaf.nbytes for leaf in collective.leaves)),
    )


def _summarize(
    topology: GroupTopology, tasks: Sequence[PackTask], arithmetic: Sequence[Arithmetic | None], nbytes: int
) -> ProgramSummary:
    per_pack = Counter(task.pack_number for task in tasks)
    moved = []
    for task in tasks:
        how = arithmetic[task.pack_number]
        row = how.partial_bytes if how is not None else task.pack.dtype.itemsize
        row = row if task.blocks is None else task.blocks.block_bytes
        for moves in task.plan:
            for move in moves:
                match move:
                    case SendMove(peer, span):
                        moved.append((topology.peers[peer].task, len(span) * row, 0))
                    case RecvMove(peer, span):
                        moved.append((topology.peers[peer].task, 0, len(span) * row))
                    case CollectMove(order, span):
                        others = (place for place in order if place != topology.place)
                        moved += [(topology.peers[place].task, 0, len(span) * row) for place in others]
    return ProgramSummary(tasks[0].algorithm, nbytes, len(per_pack), max(per_pack.values()), sum_traffic(moved))


def _can_run_inline(
    topology: GroupTopology, packs: Layout, tasks: Sequence[PackTask], sources: Sequence[int], receivers: Sequence[int]
) -> bool:
    if len(topology.peers) > 1 or len(packs.packs) != 1 or len(tasks) != 1 or not (sources and receivers):
        return False
    if tasks[0].algorithm == NCCL or tasks[0].is_hierarchical:
        return False
    return tasks[0].partition is None and packs.result_bytes <= MAX_INLINE_BYTES


def _make_partition_tasks(
    collective: Collective,
    operation: AxisOperation,
    topology: GroupTopology,
    packs: Layout,
    rows: Rows,
    leaves_own: bool,
) -> tuple[Layout, tuple[PackTask, ...]]:
    """One task per leaf, and the layout of what this worker receives."""
    workers = RanksByWorker(tuple(peer.ranks for peer in topology.peers), topology.place)
    agreed = collective.normalize()
    described = f"{agreed.operation}|{[leaf.shape for leaf in agreed.leaves]}|{rows}|{workers.ranks_by_place}"
    result_bytes = 0
    carried, tasks = [], []
    first = first_leaves(packs)
    for number, pack in enumerate(packs.packs):
        index = first[number]
        leaf = collective.leaves[index]
        how = partition_leaf(operation, workers, index, leaf.shape[0], math.prod(leaf.shape[1:]), rows)
        if leaves_own:
            how = how.leave_own(topology.own_ranks[0])
        carried.append(replace(pack, count=how.count, result_offset=result_bytes))
        result_bytes += align_up(how.output_count * pack.result_dtype.itemsize)
        name, why = select_partition_algorithm(collective, topology, pack)
        plan, plan_hash = how.plan, digest(f"{described}|{number}")
        gpu_rows: tuple[GpuRows, ...] = ()
        if name == NCCL:
            units = 2 if isinstance(operation, Reduction) else pack.dtype.itemsize  # of a partial sum at most two
            gpu_leaf = LeafRows(index, leaf.shape[0], math.prod(leaf.shape[1:]), rows, units)
            gpu_rows, plan = plan_gpu_rows(operation, topology, gpu_leaf), ()
            plan_hash = digest(f"{described}|{number}|{NCCL}")
        blocks = lay_out_shares(collective, topology, how.shares)
        if blocks is not None:
            spans = [blocks.to_blocks(share) for share in how.shares]
            plan = ring.reduce_scatter(range(len(spans)), topology.place, spans)
            plan_hash = digest(f"{described}|{number}|{blocks.compression.value}")
            why = f"{why}; compressed to {blocks.compression.value}"
        task = PackTask(
            number,
            0,
            carried[-1],
            Span(0, how.count),
            plan,
            number % CHANNELS,
            name,
            plan_hash,
            find_peers(plan),
            how,
            why,
            blocks,
            0 if blocks is None else len(blocks.blocks),
            gpu_rows,
        )
        tasks.append(task)
    return Layout(tuple(carried), packs.places, packs.staging_bytes, result_bytes), tuple(tasks)


def build_queues(tasks: Sequence[PackTask]) -> tuple[tuple[int, tuple[PackTask, ...]], ...]:
    """Tasks by channel, in order of packs; in each the one that runs first stands last."""
    found: dict[int, list[PackTask]] = {task.channel: [] for task in tasks}
    for task in reversed(tasks):
        found[task.channel].append(task)
    return tuple((channel, tuple(queue)) for channel, queue in found.items())


def first_leaves(layout: Layout) -> dict[int, int]:
    """The first leaf of each pack."""
    found: dict[int, int] = {}
    for leaf, place in enumerate(layout.places):
        found.setdefault(place.pack, leaf)
    return found


def count_tasks(collective: Collective, topology: GroupTopology, layout: Layout) -> int:
    """Count the tasks that `compile_program` will make, without making them.

    Args:
        collective: as `validation.check` has let it pass.
        layout: its packs.
    """
    if isinstance(collective.operation, AxisOperation) or not layout.packs:
        return max(1, len(layout.packs))
    first, parts = first_leaves(layout), _parts_per_pack(collective)
    layouts = lay_out_packs(collective, topology, layout)
    return sum(
        count_pack_tasks(
            pack.count if blocks is None else len(blocks.blocks),
            parts,
            select_algorithm(collective, topology, first, number, pack, blocks).shards,
        )
        for number, (pack, blocks) in enumerate(zip(layout.packs, layouts, strict=True))
    )


def _parts_per_pack(collective: Collective) -> int:
    """Into how many parts packs are cut."""
    return (collective.packing.num_packs if collective.packing is not None else 0) or 1


def _make_pack_tasks(
    collective: Collective,
    topology: GroupTopology,
    first: Mapping[int, int],
    number: int,
    pack: Pack,
    blocks: BlockLayout | None,
) -> list[PackTask]:
    """The tasks of a pack: one per cut and shard, each over its part of the pack and on a channel of its own."""
    name, shards, why = select_algorithm(collective, topology, first, number, pack, blocks)
    make = _planner(collective.operation, topology, name)
    spans = [
        span
        for part in cut_evenly(pack.count if blocks is None else len(blocks.blocks), _parts_per_pack(collective))
        for span in part.split(min(shards, max(1, len(part))))
    ]
    described = f"{name}|{len(spans)}|{number}|{pack.count}|{pack.dtype}|{[peer.ranks for peer in topology.peers]}"
    if blocks is not None:
        described += f"|{blocks.compression.value}"
    found = []
    for shard, span in enumerate(spans):
        channel = (number * len(spans) + shard) % CHANNELS
        plan = make(span)
        plan_hash = digest(f"{described}|{shard}")
        task = PackTask(number, shard, pack, span, plan, channel, name, plan_hash, find_peers(plan), reason=why)
        if blocks is not None:
            part = blocks.select(span)
            task = replace(task, span=part.values, blocks=part, block_count=len(blocks.blocks))
        found.append(task)
    return found


def find_peers(plan: WidePlan) -> frozenset[int]:
    """The places that a plan speaks to."""
    return frozenset(move.peer for moves in plan for move in moves if isinstance(move, (SendMove, RecvMove)))


def _planner(operation: Operation, topology: GroupTopology, name: str) -> Callable[[Span], WidePlan]:
    """By span, the plan of this worker; where NCCL works between its GPUs, that of the GPU which leads them."""
    places, me = range(len(topology.peers)), topology.place
    if name == NCCL:
        return _nccl_planner(operation, topology)
    if isinstance(operation, (Reduce, Broadcast)):
        root = topology.place_of(operation.root)
        flat = tree.reduce if isinstance(operation, Reduce) else tree.broadcast
        return lambda span: flat(places, me, span, root)
    if name.startswith(HIERARCHICAL_PREFIX):
        hosts = gpu_participants(topology)
        return lambda span: catalog.all_reduce(name, hosts, me, span)
    if len(places) == 1:
        return lambda span: ring.all_reduce(places, me, span)
    across = ACROSS_ALGORITHMS[name]
    return lambda span: tuple(across(places, me, span))


def _nccl_planner(operation: Operation, topology: GroupTopology) -> Callable[[Span], WidePlan]:
    """Participants are the GPUs of the group, numbered as in its communicator."""
    gpus = range(len(topology.gpus))
    local = [number for number in gpus if topology.gpus[number][0] == topology.place]
    if not isinstance(operation, (Reduce, Broadcast)):
        return lambda span: catalog.all_reduce(NCCL, [(gpu,) for gpu in gpus], local[0], span)
    root = topology.gpu_number_of(operation.root)
    leader = root if root in local else local[0]
    native = catalog.native_reduce if isinstance(operation, Reduce) else catalog.native_broadcast
    return lambda span: native(gpus, leader, span, root)


def gpu_participants(topology: GroupTopology) -> list[tuple[int, ...]]:
    """By place, the participants of a plan with NCCL inside of workers.

    The first GPU of a worker leads it and has the number of its place, so that links are found by it; numbers above
    those of all places are for the others, in the order of their communicator.
    """
    others = count(len(topology.peers))
    per_place = Counter(place for place, _ in topology.gpus)
    return [(place, *islice(others, max(0, per_place[place] - 1))) for place in range(len(topology.peers))]
