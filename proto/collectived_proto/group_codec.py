"""Messages of the coordinator to all workers of a group at once: that the group has formed, and verdicts.

Both name every member, so that what is sent in all grows with the square of the group. A group is therefore serialised
and compressed once for all, and a verdict says of the members, which workers know by then, only what is new.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace

from google.protobuf.message import DecodeError

from collectived_proto.codec import (
    group_to_proto,
    peer_to_proto,
    tiers_to_proto,
    verdict_from_proto,
    verdict_to_proto,
)
from collectived_proto.errors import InvalidArgumentError
from collectived_proto.types import GroupInfo, Member, Peer, Tier, Verdict, with_progress
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import coordinator_pb2 as coordinator

MAX_FORMED_BYTES = 64 << 20  # bytes, as much as a message may have


def formed_to_bytes(group: GroupInfo, peers: Iterable[Peer], table: Iterable[Tier], idle: bool) -> bytes:
    """Encode a `Formed` for all ranks of a generation. It is compressed once, instead of by gRPC for every rank."""
    formed = coordinator.Formed(group=group_to_proto(group), peers=map(peer_to_proto, peers), idle=idle)
    formed.table.extend(tiers_to_proto(table))
    return zlib.compress(formed.SerializeToString(), 1)


def formed_from_bytes(data: bytes) -> coordinator.Formed:
    """
    Raises:
        InvalidArgumentError: these bytes are none, or it is larger than any message may be.
    """
    unpacking = zlib.decompressobj()
    try:
        formed = coordinator.Formed.FromString(unpacking.decompress(data, MAX_FORMED_BYTES))
    except (zlib.error, DecodeError) as error:
        raise InvalidArgumentError(f"{len(data)} bytes that should describe a group cannot be read: {error}") from None
    if not unpacking.eof:
        raise InvalidArgumentError(
            f"{len(data)} bytes that should describe a group are incomplete, or more than {MAX_FORMED_BYTES} unpacked"
        )
    return formed


def compact_verdict_to_proto(verdict: Verdict) -> common.Verdict:
    """A verdict for workers, which know the members of their group: only what is new about these, by rank."""
    members, named = verdict.members, (*verdict.missing, *verdict.differing)
    by_rank = all(member.rank == rank for rank, member in enumerate(members))
    if not members or not by_rank or any(members[member.rank : member.rank + 1] != (member,) for member in named):
        return verdict_to_proto(verdict)
    texts: dict[str, int] = {}
    progress = common.Progress(
        last_instances=[member.last_instance for member in members],
        last_ops=[texts.setdefault(member.last_op, len(texts)) for member in members],
        last_sites=[texts.setdefault(member.last_site, len(texts)) for member in members],
        idle_seconds=[member.idle_seconds for member in members],
        texts=list(texts),
        missing=[member.rank for member in verdict.missing],
        differing=[member.rank for member in verdict.differing],
        stacks=[member.stack for member in verdict.missing] if any(member.stack for member in verdict.missing) else (),
    )
    message = verdict_to_proto(replace(verdict, members=(), missing=(), differing=()))
    message.progress.CopyFrom(progress)
    return message


def compact_verdict_from_proto(message: common.Verdict, known: tuple[Member, ...]) -> Verdict:
    """A verdict as `compact_verdict_to_proto` wrote it, for a worker whose group has the members `known`.

    `idle_seconds` has the precision of a float32. Where the verdict is about a group of another size, or names what
    there is not, it holds all the same, but names no members.
    """
    verdict = verdict_from_proto(message)
    if not message.HasField("progress"):
        return verdict
    progress, texts = message.progress, list(message.progress.texts)
    stacks = dict(zip(progress.missing, progress.stacks, strict=False))
    lists = (progress.last_instances, progress.last_ops, progress.last_sites, progress.idle_seconds)
    if any(len(column) != len(known) for column in lists):
        return verdict
    try:
        members = tuple(
            with_progress(member, last, texts[op], texts[site], idle, stacks.get(member.rank, ""))
            for member, last, op, site, idle in zip(known, *lists, strict=True)
        )
        missing = tuple(members[rank] for rank in progress.missing)
        differing = tuple(members[rank] for rank in progress.differing)
    except IndexError:
        return verdict
    return replace(verdict, members=members, missing=missing, differing=differing)
