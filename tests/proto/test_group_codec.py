"""What all workers of a group are told at once survives the trip, and is small however many there are."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

from collectived_proto import codec, group_codec
from collectived_proto.errors import InvalidArgumentError
from collectived_proto.types import GroupInfo, Member, Peer, Tier, Verdict
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import coordinator_pb2 as coordinator


def members(size: int) -> tuple[Member, ...]:
    return tuple(
        Member(rank, f"/job:worker/replica:0/task:{rank}/device:CPU:0", rank, f"node-{rank:04}", 20_000 + rank)
        for rank in range(size)
    )


def moved(group: tuple[Member, ...]) -> tuple[Member, ...]:
    """They have done something, each something else but for the site."""
    return tuple(
        replace(
            member, last_instance=member.rank - 1, last_op=f"op {member.rank % 3}", last_site="a.py:1", idle_seconds=0.5
        )
        for member in group
    )


def verdict(known: tuple[Member, ...], missing: tuple[Member, ...] = (), differing: tuple[Member, ...] = ()) -> Verdict:
    return Verdict(
        "train", 1, 2, 14, "lost", 5, 6, "barrier()", missing, differing, 9, "coordinator", known, orderly=True
    )


def test_a_group_that_has_formed() -> None:
    group = GroupInfo("job/train", 2**62, 2**62 + 1, members(3))
    peers = tuple(Peer(task, "i", "h", "h:1", (task,)) for task in range(3))
    table = (Tier("xring", 2, 1000, 64), Tier("pscpu", 1, -1))
    formed = group_codec.formed_from_bytes(group_codec.formed_to_bytes(group, peers, table, True))
    assert codec.group_from_proto(formed.group) == group
    assert tuple(map(codec.peer_from_proto, formed.peers)) == peers
    assert codec.tiers_from_proto(formed.table) == table
    assert formed.idle


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zlib",
        zlib.compress(b"\xff"),
        zlib.compress(coordinator.Formed(idle=True).SerializeToString())[:-1],
        zlib.compress(bytes(group_codec.MAX_FORMED_BYTES + 1)),
    ],
    ids=["nothing", "not compressed", "no message", "cut off", "too large"],
)
def test_what_tells_of_no_group_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{len(data)} bytes that should describe a group"):
        group_codec.formed_from_bytes(data)


def test_a_ruling_tells_what_is_new_about_members_that_are_known() -> None:
    known = members(5)
    now = moved(known)
    now = (*now[:3], replace(now[3], stack="data.py:88 in load\nthread 'pin': wait.py:1 in wait"), now[4])
    told = verdict(now, missing=(now[3], now[1]), differing=(now[4],))
    message = group_codec.compact_verdict_to_proto(told)
    assert not message.members and not message.missing and not message.differing
    assert group_codec.compact_verdict_from_proto(message, known) == told


def test_what_was_known_before_is_replaced() -> None:
    told = verdict(members(2))
    assert group_codec.compact_verdict_from_proto(group_codec.compact_verdict_to_proto(told), moved(members(2))) == told


def test_a_ruling_grows_by_a_few_bytes_per_rank() -> None:
    now = moved(members(1024))
    assert group_codec.compact_verdict_to_proto(verdict(now, missing=now)).ByteSize() < 12 * 1024


def _stranger(now: tuple[Member, ...]) -> Member:
    return replace(now[0], label="as it was known elsewhere")


@pytest.mark.parametrize(
    "told",
    [
        verdict(()),
        verdict((), missing=members(1)),
        verdict(members(2), missing=(_stranger(members(2)),)),
        verdict(members(2), differing=(replace(members(1)[0], rank=2),)),
        verdict(members(2)[::-1]),
    ],
    ids=["no members", "only missing", "another's word", "unknown rank", "out of order"],
)
def test_members_that_a_rank_does_not_stand_for_are_told_in_full(told: Verdict) -> None:
    message = group_codec.compact_verdict_to_proto(told)
    assert not message.HasField("progress")
    assert group_codec.compact_verdict_from_proto(message, members(2)) == told


@pytest.mark.parametrize(
    "progress",
    [
        common.Progress(),
        common.Progress(last_instances=[1, 1], last_ops=[0, 0], last_sites=[0, 0], idle_seconds=[0.0], texts=[""]),
        common.Progress(last_instances=[1, 1], last_ops=[0, 1], last_sites=[0, 0], idle_seconds=[0.0] * 2, texts=[""]),
        common.Progress(
            last_instances=[1, 1], last_ops=[0] * 2, last_sites=[0] * 2, idle_seconds=[0.0] * 2, texts=[""], missing=[2]
        ),
    ],
    ids=["another size", "too few", "unknown text", "unknown rank"],
)
def test_a_ruling_holds_even_where_its_members_cannot_be_named(progress: common.Progress) -> None:
    message = codec.verdict_to_proto(verdict(()))
    message.progress.CopyFrom(progress)
    assert group_codec.compact_verdict_from_proto(message, members(2)) == verdict(())
