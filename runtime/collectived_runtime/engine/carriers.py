"""What carries a pack between the workers of a group: the tree, an algorithm of the table or of the caller, or NCCL.

The same choice on every worker: it is made of what all of them have agreed on, and is part of the plan's hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from collectived_proto.errors import UnimplementedError
from collectived_proto.types import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    CommunicationImplementation,
    Cutting,
    Operation,
    Pack,
    Reduce,
    ReduceScatter,
    Tier,
    tier_of,
)
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.nccl.interface import elements
from collectived_runtime.engine.cutting import Workers
from collectived_runtime.engine.topology import Topology
from collectived_runtime.plan.packs import tier_of_leaf

SEGMENT_BYTES = 8 << 20  # of a pack that passes between GPUs and hosts: while one is copied, others are on the wire
MOST_SEGMENTS = 64
NCCL = "nccl"
INSIDE = f"{NCCL}/"  # how algorithms begin that have it inside of workers alone
_HINTED = "the hint NCCL"
# A hint for NCCL where there are no GPUs falls back to the ring.
_NCCL = CommunicationImplementation.NCCL
_RING_HINTS = (CommunicationImplementation.RING, _NCCL)


class Carrier(NamedTuple):
    algorithm: str
    shards: int
    why: str


_LOCAL = Carrier("local", 1, "all ranks are on one worker")


def carrier_of(
    collective: Collective, topology: Topology, first: Mapping[int, int], number: int, pack: Pack
) -> Carrier:
    """What carries this pack across workers, in how many shards.

    Args:
        first: the first leaf of each pack that has one. number: of the pack.

    Raises:
        UnimplementedError: what was ordered cannot be had.
    """
    carrier = _chosen(collective, topology, first, number, pack)
    together = len(topology.peers) == 1 and len(topology.gpus) < 2  # on one GPU one kernel folds all of it
    if together or not topology.on_gpus or carrier.algorithm == NCCL:
        return carrier
    segments = min(MOST_SEGMENTS, -(-pack.count * pack.dtype.itemsize // SEGMENT_BYTES))
    return carrier._replace(shards=max(carrier.shards, segments))


def _chosen(collective: Collective, topology: Topology, first: Mapping[int, int], number: int, pack: Pack) -> Carrier:
    operation = collective.operation
    wanted = tier_of_leaf(collective, first[number]) if collective.all_reduce_spec and number in first else None
    if wanted is not None and wanted.algorithm.startswith(NCCL):
        _check_nccl(wanted, operation, topology, pack)
    hinted, refusal = collective.implementation is _NCCL, ""
    if hinted:
        refusal = _nccl_refuses(operation, topology, pack) or ("" if number in first else "there is no value")
    by_nccl = _by_nccl_alone(wanted, topology) if wanted is not None else hinted and not refusal
    if by_nccl and len(topology.gpus) > 1:
        return Carrier(NCCL, wanted.shards if wanted else 1, f"all_reduce_spec: {wanted}" if wanted else _HINTED)
    if isinstance(operation, (Reduce, Broadcast)):
        return Carrier("tree", 1, f"it carries every {'reduce' if isinstance(operation, Reduce) else 'broadcast'}")
    if len(topology.peers) == 1:
        return _LOCAL
    if wanted is not None:
        return Carrier(wanted.algorithm, wanted.shards, f"all_reduce_spec: {wanted}")
    nbytes = pack.count * pack.dtype.itemsize
    tier = tier_of(topology.table, nbytes)
    if collective.implementation in _RING_HINTS:
        where = f"here: {refusal}" if topology.on_gpus else "on CPU devices"
        falls = f", which falls back to RING {where}" if collective.implementation is _NCCL else ""
        return Carrier("ring", tier.shards, f"the hint {collective.implementation.value}{falls}")
    return Carrier(
        tier.algorithm, tier.shards, f"table of AUTO for {nbytes} {'byte' if nbytes == 1 else 'bytes'}: {tier}"
    )


def _by_nccl_alone(wanted: Tier, topology: Topology) -> bool:
    """Whether a tier is NCCL's own all-reduce: so is NCCL inside of a worker where there is no other one."""
    return wanted.algorithm == NCCL or (wanted.algorithm.startswith(INSIDE) and len(topology.peers) == 1)


def _check_nccl(tier: Tier, operation: Operation, topology: Topology, pack: Pack) -> None:
    """Refuses what was ordered of NCCL and cannot be."""
    inside = tier.algorithm.startswith(INSIDE)
    if inside and len(topology.gpus) == len(topology.peers):
        return  # there is nothing for it to join
    why = _nccl_refuses(operation, topology, pack, inside)
    if why:
        raise UnimplementedError(f"algorithm {tier.algorithm!r} cannot be had here: {why}; choose xring or pscpu")


def _nccl_refuses(operation: Operation, topology: Topology, pack: Pack, inside: bool = False) -> str:
    """Why NCCL cannot carry out an operation on a pack, between all GPUs or `inside` of workers, or ''."""
    if not isinstance(operation, (AllReduce, Reduce, Broadcast)):
        return f"NCCL is not asked for {operation}"
    if not isinstance(operation, Broadcast):
        how = Arithmetic(operation.reduce_op, pack.dtype, pack.result_dtype, topology.group.size)
        if elements(how) is None:
            return f"NCCL has no {operation.reduce_op.value} of {pack.dtype.label}"
    return topology.why_no_nccl or ("" if inside else topology.how_nccl_differs)


def carrier_of_cut(operation: Cutting, workers: Workers) -> tuple[str, str]:
    """The algorithm of what cuts values or joins them, and why."""
    if len(workers.ranks) == 1:
        return _LOCAL.algorithm, _LOCAL.why
    name = "ring" if isinstance(operation, (AllGather, ReduceScatter)) else "direct"
    return name, f"it carries every {str(operation).partition('(')[0]}"
