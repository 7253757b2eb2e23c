"""What is told to many workers is encoded once."""

from __future__ import annotations

from dataclasses import replace

from collectived_proto.codec import tiers_from_proto
from collectived_proto.group_codec import formed_from_bytes
from collectived_proto.types import GroupInfo, Member, Peer, Tier, Verdict
from collectived_runtime.coordinator.codec import CACHE_SIZE, Encoder
from collectived_runtime.coordinator.core.events import JoinDone

MEMBERS = tuple(Member(rank, "/job:worker/replica:0/task:0/device:CPU:0", 0, "a", rank) for rank in range(3))
GROUP = GroupInfo("job/train", 1, 2, MEMBERS)
PEERS = (Peer(0, "i", "a", "a:1", (0, 1, 2)),)
VERDICT = Verdict("job/train", 1, 2, 14, "lost", 0, members=MEMBERS)


def test_a_verdict_is_encoded_once_for_all_workers() -> None:
    encoder = Encoder()
    assert encoder.encode(VERDICT) is encoder.encode(VERDICT)


def test_two_verdicts_that_are_sent_at_the_same_time_are_each_encoded_once() -> None:
    encoder, other = Encoder(), replace(VERDICT, generation=3)
    first, second = encoder.encode(VERDICT), encoder.encode(other)
    assert encoder.encode(VERDICT) is first and encoder.encode(other) is second


def test_few_are_kept() -> None:
    encoder = Encoder()
    first = encoder.encode(VERDICT)
    for generation in range(CACHE_SIZE):
        assert encoder.encode(replace(VERDICT, generation=generation)).verdict.generation == generation
    again = encoder.encode(VERDICT)
    assert again is not first and again == first


def test_all_ranks_are_told_the_same_but_for_their_rank() -> None:
    encoder = Encoder()
    told = [encoder.encode(JoinDone(f"r{rank}", GROUP, rank, PEERS)).join_done for rank in range(3)]
    assert [(done.request, done.rank) for done in told] == [("r0", 0), ("r1", 1), ("r2", 2)]
    assert len({done.formed for done in told}) == 1


def test_a_group_with_another_table_is_told_with_it() -> None:
    encoder, tables = Encoder(), [(), (Tier("ring", 1, -1),)]
    for table in tables:
        done = encoder.encode(JoinDone("r", GROUP, 0, PEERS, table)).join_done
        assert tiers_from_proto(formed_from_bytes(done.formed).table) == table
