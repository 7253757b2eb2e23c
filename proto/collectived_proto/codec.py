"""Protobuf messages to and from the frozen values of `types`.

Everything read here came over a wire: what is out of range is an `InvalidArgumentError`, not a surprise later.
"""

from __future__ import annotations

from typing import Any

from collectived_proto.all_reduce_spec import parse_all_reduce_spec
from collectived_proto.errors import InvalidArgumentError
from collectived_proto.field_codec import Codec, register
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
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
    ReduceScatter,
    Report,
    Scatter,
    Send,
    Submission,
    Tier,
    Verdict,
)
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import coordinator_pb2 as coordinator
from collectived_proto.version import VersionRange, sanitize_versions

MAX_DIMENSIONS = 64  # of an array, as in NumPy
MAX_BYTES = (1 << 63) - 1  # of a value: what a message can say


def _check_leaf(leaf: Leaf) -> None:
    name, shape = leaf.path or "value", leaf.shape
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidArgumentError(f"{name}: an array of {len(shape)} dimensions, and at most {MAX_DIMENSIONS} may be")
    if shape and min(shape) < 0:
        raise InvalidArgumentError(f"{name}: negative length in shape {list(shape)}")
    if leaf.nbytes > MAX_BYTES:
        raise InvalidArgumentError(f"{name}: {leaf} has more bytes than 2^63 - 1")


def _check_packing(packing: Packing) -> None:
    if packing.max_bytes < 0:
        raise InvalidArgumentError(f"agg_small_grads_max_bytes must not be negative, got {packing.max_bytes}")


def _check_sizes(operation: Scatter | ReduceScatter | AllToAll) -> None:
    if operation.sizes and min(operation.sizes) < 0:
        raise InvalidArgumentError(f"sizes must not be negative, got {list(operation.sizes)}")


_TIER = Codec(Tier, common.Tier)
tiers_to_proto, tiers_from_proto = _TIER.encode_all, _TIER.decode_all

_LEAF = Codec(Leaf, common.Leaf, check=_check_leaf)
_PACKING = Codec(Packing, common.Packing, check=_check_packing)
_DESCRIPTION = Codec(Collective, common.Collective, only=("structure", "leaves", "site", "open"))
_OPTIONS = Codec(
    Collective,
    common.CommunicationOptions,
    only=("bytes_per_pack", "implementation", "all_reduce_spec", "packing", "compression"),
)
_OPERATIONS: dict[str, Codec[Any, Any]] = {
    "all_reduce": Codec(AllReduce, common.AllReduce),
    "reduce": Codec(Reduce, common.Reduce),
    "broadcast": Codec(Broadcast, common.Broadcast),
    "barrier": Codec(Barrier, common.Barrier),
    "all_gather": Codec(AllGather, common.AllGather),
    "gather": Codec(Gather, common.Gather),
    "scatter": Codec(Scatter, common.Scatter, check=_check_sizes),
    "reduce_scatter": Codec(ReduceScatter, common.ReduceScatter, check=_check_sizes),
    "all_to_all": Codec(AllToAll, common.AllToAll, check=_check_sizes),
    "send": Codec(Send, common.SendTo),
    "recv": Codec(Recv, common.RecvFrom),
}  # by the name of the field that has it
_OPERATION_FIELDS = {codec.value: name for name, codec in _OPERATIONS.items()}


def collective_to_proto(value: Collective) -> common.Collective:
    message = _DESCRIPTION.encode(value)
    message.options.CopyFrom(_OPTIONS.encode(value))
    name = _OPERATION_FIELDS[type(value.operation)]
    getattr(message, name).CopyFrom(_OPERATIONS[name].encode(value.operation))
    return message


def collective_from_proto(message: common.Collective) -> Collective:
    name = message.WhichOneof("operation")
    if name is None:
        raise InvalidArgumentError("a collective without an operation that this release knows")
    operation: Operation = _OPERATIONS[name].decode(getattr(message, name))
    structure, leaves, site, is_open = _DESCRIPTION.decode_fields(message)
    if is_open and leaves:
        raise InvalidArgumentError(
            f"an open {operation} takes what comes: it has no leaves of its own, got {len(leaves)}"
        )
    bytes_per_pack, implementation, spec, packing, compression = _OPTIONS.decode_fields(message.options)
    if bytes_per_pack < 0:
        raise InvalidArgumentError(f"bytes_per_pack must not be negative, got {bytes_per_pack}")
    spec = _check_spec(spec)
    return Collective(
        operation, structure, leaves, bytes_per_pack, implementation, site, spec, packing, is_open, compression
    )


def _check_spec(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    """A specification that some client has sent: whatever its library let pass is refused here."""
    try:
        return parse_all_reduce_spec([(tier.algorithm, tier.shards, tier.limit) for tier in tiers]) if tiers else ()
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None


_PACK = Codec(Pack, common.Pack)
_PLACE = Codec(LeafPlacement, common.Place)
_LAYOUT = Codec(Layout, common.Layout)
layout_to_proto, layout_from_proto = _LAYOUT.encode, _LAYOUT.decode

_MEMBER = Codec(Member, common.Member)
member_to_proto, member_from_proto = _MEMBER.encode, _MEMBER.decode
_GROUP = Codec(GroupInfo, common.Group)
group_to_proto, group_from_proto = _GROUP.encode, _GROUP.decode
_PEER = Codec(Peer, coordinator.Peer)
peer_to_proto, peer_from_proto = _PEER.encode, _PEER.decode

_VERSIONS = Codec(VersionRange, common.Protocol, make=sanitize_versions)
versions_to_proto, versions_from_proto = _VERSIONS.encode, _VERSIONS.decode

_VERDICT = Codec(Verdict, common.Verdict)
verdict_to_proto, verdict_from_proto = _VERDICT.encode, _VERDICT.decode

register(Collective, collective_to_proto, collective_from_proto)
_POSITION = Codec(RankPosition, coordinator.RankPosition)
positions_to_proto, positions_from_proto = _POSITION.encode_all, _POSITION.decode_all
_SUBMISSION = Codec(Submission, coordinator.Submission)
_REPORT = Codec(Report, coordinator.Report)
report_to_proto, report_from_proto = _REPORT.encode, _REPORT.decode
