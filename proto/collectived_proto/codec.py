"""Protobuf messages to and from the frozen values of `types`: with `announcements` the only files that know both.

Everything read here came over a wire: what is out of range is an `InvalidArgumentError`, not a surprise later.
"""

from __future__ import annotations

from collections.abc import Iterable

from collectived_proto.all_reduce_spec import parse_all_reduce_spec
from collectived_proto.errors import InvalidArgumentError
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    CommunicationImplementation,
    DType,
    Gather,
    GroupInfo,
    Layout,
    Leaf,
    LeafPlacement,
    Member,
    Operation,
    Pack,
    Packing,
    Peer,
    RankPosition,
    Recv,
    Reduce,
    ReduceOp,
    ReduceScatter,
    Report,
    ReportKind,
    Scatter,
    Send,
    Submission,
    Tier,
    Verdict,
)
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import coordinator_pb2 as coordinator
from collectived_proto.version import VersionRange, sanitize_versions

_REDUCE_OPS = {int(common.ReduceOp.Value(op.name)): op for op in ReduceOp}


def _reduce_op(number: int) -> ReduceOp:
    try:
        return _REDUCE_OPS[number]
    except KeyError:
        raise InvalidArgumentError(f"reduce op number {number} is not known to this release") from None


def _dtype(number: int) -> DType:
    try:
        return DType(number)
    except ValueError:
        raise InvalidArgumentError(f"data type number {number} is not known to this release") from None


def tiers_to_proto(tiers: Iterable[Tier]) -> list[common.Tier]:
    return [
        common.Tier(algorithm=tier.algorithm, shards=tier.shards, limit=tier.limit, bytes_per_pack=tier.bytes_per_pack)
        for tier in tiers
    ]


def tiers_from_proto(messages: Iterable[common.Tier]) -> tuple[Tier, ...]:
    return tuple(Tier(tier.algorithm, tier.shards, tier.limit, tier.bytes_per_pack) for tier in messages)


def collective_to_proto(value: Collective) -> common.Collective:
    message = common.Collective(
        structure=value.structure,
        leaves=[common.Leaf(path=leaf.path, dtype=leaf.dtype.name, shape=leaf.shape) for leaf in value.leaves],
        options=common.CommunicationOptions(
            bytes_per_pack=value.bytes_per_pack,
            implementation=value.implementation.value,
            all_reduce_spec=tiers_to_proto(value.all_reduce_spec),
            packing=_packing_to_proto(value.packing),
        ),
        site=value.site,
        open=value.open,
    )
    match value.operation:
        case AllReduce(reduce_op):
            message.all_reduce.CopyFrom(common.AllReduce(reduce_op=reduce_op.name))
        case Reduce(reduce_op, root):
            message.reduce.CopyFrom(common.Reduce(reduce_op=reduce_op.name, root=root))
        case Broadcast(root):
            message.broadcast.root = root
        case Barrier():
            message.barrier.SetInParent()
        case AllGather(axis):
            message.all_gather.CopyFrom(common.AllGather(axis=axis))
        case Gather(root, axis):
            message.gather.CopyFrom(common.Gather(root=root, axis=axis))
        case Scatter(root, axis, sizes):
            message.scatter.CopyFrom(common.Scatter(root=root, axis=axis, sizes=sizes))
        case ReduceScatter(reduce_op, axis, sizes):
            message.reduce_scatter.CopyFrom(common.ReduceScatter(reduce_op=reduce_op.name, axis=axis, sizes=sizes))
        case AllToAll(axis, sizes):
            message.all_to_all.CopyFrom(common.AllToAll(axis=axis, sizes=sizes))
        case Send(to, tag):
            message.send.CopyFrom(common.SendTo(to=to, tag=tag))
        case Recv(source, tag):
            message.recv.CopyFrom(common.RecvFrom(source=source, tag=tag))
    return message


def collective_from_proto(message: common.Collective) -> Collective:
    operation = _operation(message)
    leaves = []
    for leaf in message.leaves:
        if any(length < 0 for length in leaf.shape):
            raise InvalidArgumentError(f"{leaf.path or 'value'}: negative length in shape {list(leaf.shape)}")
        leaves.append(Leaf(leaf.path, _dtype(leaf.dtype), tuple(leaf.shape)))
    if message.open and leaves:
        raise InvalidArgumentError(
            f"an open {operation} takes what comes: it has no leaves of its own, got {len(leaves)}"
        )
    if message.options.bytes_per_pack < 0:
        raise InvalidArgumentError(f"bytes_per_pack must not be negative, got {message.options.bytes_per_pack}")
    try:
        hint = CommunicationImplementation(common.Implementation.Name(message.options.implementation))
    except ValueError:
        raise InvalidArgumentError(
            f"implementation number {message.options.implementation} is not known to this release"
        ) from None
    return Collective(
        operation,
        message.structure,
        tuple(leaves),
        message.options.bytes_per_pack,
        hint,
        message.site,
        _spec_from_proto(message.options.all_reduce_spec),
        _packing_from_proto(message.options),
        message.open,
    )


def _operation(message: common.Collective) -> Operation:
    match message.WhichOneof("operation"):
        case "all_reduce":
            return AllReduce(_reduce_op(message.all_reduce.reduce_op))
        case "reduce":
            return Reduce(_reduce_op(message.reduce.reduce_op), message.reduce.root)
        case "broadcast":
            return Broadcast(message.broadcast.root)
        case "barrier":
            return Barrier()
        case "all_gather":
            return AllGather(message.all_gather.axis)
        case "gather":
            return Gather(message.gather.root, message.gather.axis)
        case "scatter":
            return Scatter(message.scatter.root, message.scatter.axis, _sizes_from_proto(message.scatter.sizes))
        case "reduce_scatter":
            scattered = message.reduce_scatter
            return ReduceScatter(_reduce_op(scattered.reduce_op), scattered.axis, _sizes_from_proto(scattered.sizes))
        case "all_to_all":
            return AllToAll(message.all_to_all.axis, _sizes_from_proto(message.all_to_all.sizes))
        case "send":
            return Send(message.send.to, message.send.tag)
        case "recv":
            return Recv(message.recv.source, message.recv.tag)
        case _:
            raise InvalidArgumentError("a collective without an operation that this release knows")


def _sizes_from_proto(sizes: Iterable[int]) -> tuple[int, ...]:
    found = tuple(sizes)
    if any(size < 0 for size in found):
        raise InvalidArgumentError(f"sizes must not be negative, got {list(found)}")
    return found


def _spec_from_proto(messages: Iterable[common.Tier]) -> tuple[Tier, ...]:
    """A specification that some client has sent: whatever its library let pass is refused here."""
    tiers = tiers_from_proto(messages)
    try:
        return parse_all_reduce_spec([(tier.algorithm, tier.shards, tier.limit) for tier in tiers]) if tiers else ()
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None


def _packing_to_proto(packing: Packing | None) -> common.Packing | None:
    if packing is None:
        return None
    return common.Packing(num_packs=packing.num_packs, max_bytes=packing.max_bytes, max_group=packing.max_group)


def _packing_from_proto(options: common.CommunicationOptions) -> Packing | None:
    if not options.HasField("packing"):
        return None
    if options.packing.max_bytes < 0:
        raise InvalidArgumentError(f"agg_small_grads_max_bytes must not be negative, got {options.packing.max_bytes}")
    return Packing(options.packing.num_packs, options.packing.max_bytes, options.packing.max_group)


def layout_to_proto(layout: Layout) -> common.Layout:
    return common.Layout(
        packs=[
            common.Pack(
                dtype=pack.dtype.name,
                result_dtype=pack.result_dtype.name,
                count=pack.count,
                staging_offset=pack.staging_offset,
                result_offset=pack.result_offset,
            )
            for pack in layout.packs
        ],
        places=[common.Place(pack=place.pack, offset=place.offset) for place in layout.places],
        staging_bytes=layout.staging_bytes,
        result_bytes=layout.result_bytes,
    )


def layout_from_proto(message: common.Layout) -> Layout:
    return Layout(
        tuple(
            Pack(_dtype(p.dtype), _dtype(p.result_dtype), p.count, p.staging_offset, p.result_offset)
            for p in message.packs
        ),
        tuple(LeafPlacement(place.pack, place.offset) for place in message.places),
        message.staging_bytes,
        message.result_bytes,
    )


def member_to_proto(member: Member) -> common.Member:
    return common.Member(
        rank=member.rank,
        device=member.device,
        worker=member.worker,
        host=member.host,
        pid=member.pid,
        label=member.label,
        last_instance=member.last_instance,
        last_op=member.last_op,
        last_site=member.last_site,
        idle_seconds=member.idle_seconds,
    )


def member_from_proto(message: common.Member) -> Member:
    return Member(
        message.rank,
        message.device,
        message.worker,
        message.host,
        message.pid,
        message.label,
        message.last_instance,
        message.last_op,
        message.last_site,
        message.idle_seconds,
    )


def _members(messages: Iterable[common.Member]) -> tuple[Member, ...]:
    return tuple(member_from_proto(message) for message in messages)


def group_to_proto(group: GroupInfo) -> common.Group:
    return common.Group(
        name=group.name,
        key=group.key,
        generation=group.generation,
        members=[member_to_proto(member) for member in group.members],
    )


def group_from_proto(message: common.Group) -> GroupInfo:
    return GroupInfo(message.name, message.key, message.generation, _members(message.members))


def peer_to_proto(peer: Peer) -> coordinator.Peer:
    return coordinator.Peer(
        task=peer.task,
        incarnation=peer.incarnation,
        host=peer.host,
        link_address=peer.link_address,
        ranks=peer.ranks,
        nccl=peer.nccl,
    )


def peer_from_proto(message: coordinator.Peer) -> Peer:
    ranks = tuple(message.ranks)
    return Peer(message.task, message.incarnation, message.host, message.link_address, ranks, message.nccl)


def versions_to_proto(versions: VersionRange) -> common.Protocol:
    return common.Protocol(lowest=versions.lowest, highest=versions.highest, release=versions.release)


def versions_from_proto(message: common.Protocol) -> VersionRange:
    """What another side says that it speaks; of one that says nothing, the first version."""
    return sanitize_versions(message.lowest, message.highest, message.release)


def verdict_to_proto(verdict: Verdict) -> common.Verdict:
    return common.Verdict(
        group=verdict.group,
        key=verdict.key,
        generation=verdict.generation,
        code=verdict.code,
        message=verdict.message,
        from_instance=verdict.from_instance,
        instance=verdict.instance,
        op=verdict.op,
        missing=[member_to_proto(member) for member in verdict.missing],
        differing=[member_to_proto(member) for member in verdict.differing],
        successor=verdict.successor,
        decided_by=verdict.decided_by,
        members=[member_to_proto(member) for member in verdict.members],
        orderly=verdict.orderly,
    )


def verdict_from_proto(message: common.Verdict) -> Verdict:
    return Verdict(
        group=message.group,
        key=message.key,
        generation=message.generation,
        code=message.code,
        message=message.message,
        from_instance=message.from_instance,
        instance=message.instance,
        op=message.op,
        missing=_members(message.missing),
        differing=_members(message.differing),
        successor=message.successor,
        decided_by=message.decided_by,
        members=_members(message.members),
        orderly=message.orderly,
    )


def _position_to_proto(position: RankPosition) -> coordinator.RankPosition:
    return coordinator.RankPosition(
        rank=position.rank,
        submitted=position.submitted,
        finished=position.finished,
        last_op=position.last_op,
        last_site=position.last_site,
        idle_seconds=position.idle_seconds,
        arrived=position.arrived,
        op=position.op,
        site=position.site,
        contract=position.contract,
        collective=collective_to_proto(position.collective) if position.collective else None,
        waits=position.waits,
        waited_seconds=position.waited_seconds,
    )


def _position_from_proto(message: coordinator.RankPosition) -> RankPosition:
    return RankPosition(
        message.rank,
        message.submitted,
        message.finished,
        message.last_op,
        message.last_site,
        message.idle_seconds,
        message.arrived,
        message.op,
        message.site,
        message.contract,
        collective_from_proto(message.collective) if message.HasField("collective") else None,
        message.waits,
        message.waited_seconds,
    )


def positions_to_proto(positions: Iterable[RankPosition]) -> list[coordinator.RankPosition]:
    return [_position_to_proto(position) for position in positions]


def positions_from_proto(messages: Iterable[coordinator.RankPosition]) -> tuple[RankPosition, ...]:
    return tuple(_position_from_proto(message) for message in messages)


def _submission_to_proto(submission: Submission) -> coordinator.Submission:
    return coordinator.Submission(
        instance=submission.instance,
        op=submission.op,
        site=submission.site,
        contract=submission.contract,
        collective=collective_to_proto(submission.collective) if submission.collective else None,
    )


def _submission_from_proto(message: coordinator.Submission) -> Submission:
    collective = collective_from_proto(message.collective) if message.HasField("collective") else None
    return Submission(message.instance, message.op, message.site, message.contract, collective)


def report_to_proto(report: Report) -> coordinator.Report:
    return coordinator.Report(
        key=report.key,
        generation=report.generation,
        kind=coordinator.Report.Kind.Name(report.kind),
        instance=report.instance,
        rank=report.rank,
        worker=report.worker,
        text=report.text,
        timeout_seconds=report.timeout_seconds,
        ranks=positions_to_proto(report.ranks),
        peer=report.peer,
        last=[_submission_to_proto(submission) for submission in report.last],
    )


def report_from_proto(message: coordinator.Report) -> Report:
    try:
        kind = ReportKind(message.kind)
    except ValueError:
        raise InvalidArgumentError(f"report kind {message.kind} is not known to this release") from None
    return Report(
        message.key,
        message.generation,
        kind,
        message.instance,
        message.rank,
        message.worker,
        message.text,
        message.timeout_seconds,
        positions_from_proto(message.ranks),
        message.peer,
        tuple(_submission_from_proto(submission) for submission in message.last),
    )
