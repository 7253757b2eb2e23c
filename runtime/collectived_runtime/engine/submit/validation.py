"""Validation of collectives: those that no rank of a group could mean, or that its devices cannot do, are refused."""

from __future__ import annotations

from collectived_proto.devices import DeviceName
from collectived_proto.errors import InvalidArgumentError, UnimplementedError
from collectived_proto.ipc.messages import MAX_PACKS
from collectived_proto.types import (
    ANY_SOURCE,
    AllGather,
    AxisOperation,
    Broadcast,
    Collective,
    Compression,
    DType,
    Gather,
    GroupInfo,
    Leaf,
    Operation,
    Recv,
    Reduce,
    ReduceOp,
    Reduction,
    Scatter,
    Send,
    Tier,
)
from collectived_runtime.device.arithmetic import unsupported_reason
from collectived_runtime.plan.catalog import ACROSS_ALGORITHMS

MAX_TIERS = 64
GPU_ALGORITHMS = ("nccl", "nccl/xring", "nccl/rechd", "nccl/pscpu")


def check(collective: Collective, group: GroupInfo, rank: int | None = None) -> None:
    """Refuses what no rank of the group could mean.

    Args:
        rank: whose description it is; None: one that has been agreed on.

    Raises:
        InvalidArgumentError: a root outside the group, rows that do not add up, no value where one is needed, a number
            beyond what can be carried out.
        UnimplementedError: these devices cannot do it.
    """
    operation = collective.operation
    match operation:
        case Reduce(_, root) | Broadcast(root) | Gather(root) | Scatter(root):
            _check_rank("root", root, group)
        case Send(to):
            _check_rank("to", to, group)
        case Recv(source) if source != ANY_SOURCE:
            _check_rank("source", source, group)
        case _:
            pass
    if isinstance(operation, Reduction):
        for leaf in collective.leaves:
            if why := unsupported_reason(operation.reduce_op, leaf.dtype):
                raise UnimplementedError(f"{leaf.path or 'value'}: {why}")
        if collective.compression is not Compression.NONE:
            _check_compression(collective, operation, group)
    if isinstance(operation, AxisOperation):
        _check_rows(collective, operation, group)
    if collective.open and not _may_omit_value(operation, rank):
        raise InvalidArgumentError(f"{operation} needs a value on this rank, and has none")
    if collective.packing is not None:
        _check_at_most("num_packs", collective.packing.num_packs, MAX_PACKS)
    _check_at_most("the number of tiers in all_reduce_spec", len(collective.all_reduce_spec), MAX_TIERS)
    for tier in collective.all_reduce_spec:
        _check_tier(tier, group)


def _check_compression(collective: Collective, operation: Reduction, group: GroupInfo) -> None:
    asked = f'compression="{collective.compression.value}"'
    instead = 'use compression="none"'
    if operation.reduce_op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise InvalidArgumentError(f"{asked} is for sums and means, not for {operation}; {instead}")
    for leaf in collective.leaves:
        if leaf.dtype not in (DType.FLOAT32, DType.BFLOAT16):
            raise InvalidArgumentError(
                f"{leaf.path or 'the value'} is {leaf}, and {asked} is for float32 and bfloat16; "
                f"{instead}, or reduce it apart"
            )
    on_gpu = next((member for member in group.members if DeviceName.parse(member.device).kind == "GPU"), None)
    if on_gpu is not None:
        raise UnimplementedError(
            f"{asked} is for groups on CPU devices, and rank {on_gpu.rank} is on {on_gpu.device}; {instead}"
        )


def _check_at_most(name: str, value: int, most: int) -> None:
    if value > most:
        raise InvalidArgumentError(f"{name} must be at most {most}, got {value}")


def _check_rank(name: str, rank: int, group: GroupInfo) -> None:
    if rank >= group.size:
        raise InvalidArgumentError(
            f"{name} {rank} is not a rank of this group of {group.size}: expected 0 to {group.size - 1}"
        )


def _check_rows(collective: Collective, operation: AxisOperation, group: GroupInfo) -> None:
    if isinstance(operation, (AllGather, Gather)):
        return  # an array without an axis fails on all ranks: see `explain_missing_axis`
    sizes = operation.sizes
    if sizes and len(sizes) != group.size:
        raise InvalidArgumentError(f"sizes has {len(sizes)} entries, expected one per rank: {group.size}")
    for leaf in collective.leaves:
        if not leaf.shape:
            raise InvalidArgumentError(_missing_axis_text(operation, leaf))
        if sizes and sum(sizes) != leaf.shape[0]:
            raise InvalidArgumentError(
                f"{leaf.path or 'value'} has {leaf.shape[0]} rows, but sizes {list(sizes)} add up to {sum(sizes)}"
            )


def explain_missing_axis(collective: Collective) -> str:
    """Why a gather of this value fails on all ranks, whatever the others give: an array is 0-d. '' where none is."""
    operation = collective.operation
    if not isinstance(operation, (AllGather, Gather)):
        return ""
    return next((_missing_axis_text(operation, leaf) for leaf in collective.leaves if not leaf.shape), "")


def _missing_axis_text(operation: Operation, leaf: Leaf) -> str:
    return (
        f"{leaf.path or 'the value'} is 0-d: {operation} needs an axis along which it cuts or joins; give it an axis, "
        "for example with numpy.reshape(value, 1)"
    )


def _may_omit_value(operation: Operation, rank: int | None) -> bool:
    if isinstance(operation, (Broadcast, Scatter)):
        return rank is not None and rank != operation.root
    return isinstance(operation, Recv)


def _check_tier(tier: Tier, group: GroupInfo) -> None:
    if tier.algorithm not in ACROSS_ALGORITHMS and tier.algorithm not in GPU_ALGORITHMS:
        raise InvalidArgumentError(f"unknown algorithm {tier.algorithm!r} in all_reduce_spec")
    _check_at_most("shards in all_reduce_spec", tier.shards, MAX_PACKS)
    host = next((member for member in group.members if DeviceName.parse(member.device).kind != "GPU"), None)
    if tier.algorithm in GPU_ALGORITHMS and host is not None:
        raise UnimplementedError(
            f"algorithm {tier.algorithm!r} needs GPUs, and rank {host.rank} of this group is on {host.device}; "
            "choose xring, pscpu or pscpu/pscpu"
        )
