"""The choice of the algorithm for a pack between workers: the tree, one of the table or the caller, or NCCL.

The same choice on every worker: it is made of what all of them have agreed on, and is part of the plan's hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from collectived_proto.errors import UnimplementedError
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    CommunicationImplementation,
    Operation,
    Pack,
    Reduce,
    ReduceScatter,
    Reduction,
    Tier,
    select_tier,
)
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.cuda.kernels import MOST_SOURCES
from collectived_runtime.device.nccl.interface import element_layout
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile.blocks import BlockLayout
from collectived_runtime.plan.packing import select_leaf_tier

SEGMENT_BYTES = 8 << 20  # of a pack that passes between GPUs and hosts: while one is copied, others are on the wire
MAX_SEGMENTS = 64
NCCL = "nccl"
HIERARCHICAL_PREFIX = f"{NCCL}/"  # how algorithms begin that have it inside of workers alone
_NCCL_HINT_REASON = "the hint NCCL"
# A hint for NCCL where there are no GPUs falls back to the ring.
_NCCL = CommunicationImplementation.NCCL
_NCCL_OPERATIONS = (AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, AllToAll)
_RING_HINTS = (CommunicationImplementation.RING, _NCCL)


class Selection(NamedTuple):
    algorithm: str
    shards: int
    reason: str


_LOCAL_SELECTION = Selection("local", 1, "all ranks are on one worker")


def select_algorithm(
    collective: Collective,
    topology: GroupTopology,
    first: Mapping[int, int],
    number: int,
    pack: Pack,
    blocks: BlockLayout | None = None,
) -> Selection:
    """Select what carries this pack across workers, and in how many shards.

    Args:
        first: the first leaf of each pack that has one. number: of the pack.
        blocks: as which it travels, where it does so compressed.

    Raises:
        UnimplementedError: what was ordered cannot be had.
    """
    nbytes = pack.count * pack.dtype.itemsize if blocks is None else blocks.wire_bytes
    carrier = _select(collective, topology, first, number, pack, nbytes)
    if blocks is not None:
        carrier = carrier._replace(reason=f"{carrier.reason}; compressed to {blocks.compression.value}")
    together = len(topology.peers) == 1 and len(topology.gpus) < 2  # on one GPU one kernel folds all of it
    if together or not topology.has_gpus or carrier.algorithm == NCCL:
        return carrier
    segments = min(MAX_SEGMENTS, -(-pack.count * pack.dtype.itemsize // SEGMENT_BYTES))
    return carrier._replace(shards=max(carrier.shards, segments))


def _select(
    collective: Collective, topology: GroupTopology, first: Mapping[int, int], number: int, pack: Pack, nbytes: int
) -> Selection:
    operation = collective.operation
    wanted = select_leaf_tier(collective, first[number]) if collective.all_reduce_spec and number in first else None
    if wanted is not None and wanted.algorithm.startswith(NCCL):
        _check_nccl(wanted, operation, topology, pack)
    hinted, refusal = collective.implementation is _NCCL, ""
    if hinted:
        refusal = _nccl_unsupported_reason(operation, topology, pack) or (
            "" if number in first else "there is no value"
        )
    by_nccl = _is_plain_nccl(wanted, topology) if wanted is not None else hinted and not refusal
    if by_nccl and len(topology.gpus) > 1:
        return Selection(
            NCCL, wanted.shards if wanted else 1, f"all_reduce_spec: {wanted}" if wanted else _NCCL_HINT_REASON
        )
    if isinstance(operation, (Reduce, Broadcast)):
        return Selection("tree", 1, f"it carries every {'reduce' if isinstance(operation, Reduce) else 'broadcast'}")
    if len(topology.peers) == 1:
        return _LOCAL_SELECTION
    if wanted is not None:
        return Selection(wanted.algorithm, wanted.shards, f"all_reduce_spec: {wanted}")
    tier = select_tier(topology.tuning_table, nbytes)
    if collective.implementation in _RING_HINTS:
        where = f"here: {refusal}" if topology.has_gpus else "on CPU devices"
        falls = f", which falls back to RING {where}" if collective.implementation is _NCCL else ""
        return Selection("ring", tier.shards, f"the hint {collective.implementation.value}{falls}")
    return Selection(
        tier.algorithm, tier.shards, f"table of AUTO for {nbytes} {'byte' if nbytes == 1 else 'bytes'}: {tier}"
    )


def _is_plain_nccl(wanted: Tier, topology: GroupTopology) -> bool:
    """Whether a tier is NCCL's own all-reduce: so is NCCL inside of a worker where there is no other one."""
    return wanted.algorithm == NCCL or (wanted.algorithm.startswith(HIERARCHICAL_PREFIX) and len(topology.peers) == 1)


def _check_nccl(tier: Tier, operation: Operation, topology: GroupTopology, pack: Pack) -> None:
    """Raise UnimplementedError if NCCL was ordered and cannot do it."""
    inside = tier.algorithm.startswith(HIERARCHICAL_PREFIX)
    if inside and len(topology.gpus) == len(topology.peers):
        return  # there is nothing for it to join
    why = _nccl_unsupported_reason(operation, topology, pack, inside)
    if why:
        raise UnimplementedError(f"algorithm {tier.algorithm!r} cannot be had here: {why}; choose xring or pscpu")


def _nccl_unsupported_reason(operation: Operation, topology: GroupTopology, pack: Pack, inside: bool = False) -> str:
    """Why NCCL cannot carry out an operation on a pack, between all GPUs or `inside` of workers, or ''."""
    if not isinstance(operation, _NCCL_OPERATIONS):
        return f"NCCL is not asked for {operation}"
    if isinstance(operation, Reduction):
        how = Arithmetic(operation.reduce_op, pack.dtype, pack.result_dtype, topology.group.size)
        if element_layout(how) is None:
            return f"NCCL has no {operation.reduce_op.value} of {pack.dtype.label}"
    return topology.nccl_unavailable_reason or ("" if inside else topology.nccl_mismatch_reason)


def select_partition_algorithm(collective: Collective, topology: GroupTopology, pack: Pack) -> tuple[str, str]:
    """The algorithm of what cuts values or joins them, and why."""
    operation, falls = collective.operation, ""
    if collective.implementation is _NCCL and len(topology.gpus) > 1:
        most = max(map(len, topology.ranks_by_gpu))
        refusal = _nccl_unsupported_reason(operation, topology, pack)
        if not refusal and isinstance(operation, ReduceScatter) and most > MOST_SOURCES:
            refusal = f"{most} ranks are on one GPU, and {MOST_SOURCES} can be folded at once"
        if not refusal:
            return NCCL, _NCCL_HINT_REASON
        falls = f"; the hint NCCL cannot be followed here: {refusal}"
    if len(topology.peers) == 1:
        return _LOCAL_SELECTION.algorithm, f"{_LOCAL_SELECTION.reason}{falls}"
    name = "ring" if isinstance(operation, (AllGather, ReduceScatter)) else "direct"
    return name, f"it carries every {str(operation).partition('(')[0]}{falls}"
