"""Values survive the trip through protobuf, and numbers that nobody should send are refused."""

from __future__ import annotations

import pytest

from collectived_proto import codec
from collectived_proto.cause import Cause
from collectived_proto.errors import InvalidArgumentError
from collectived_proto.types import (
    AllReduce,
    Barrier,
    Broadcast,
    Collective,
    CommunicationImplementation,
    Compression,
    DType,
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
    Reduce,
    ReduceOp,
    Report,
    ReportKind,
    Tier,
    Verdict,
)
from collectived_proto.v1 import common_pb2 as common

MEMBER = Member(1, "/job:worker/replica:0/task:0/device:CPU:0", 0, "a", 12, "label", 5, "op", "x.py:1", 0.5)
OPERATIONS: list[Operation] = [
    *(AllReduce(op) for op in ReduceOp),
    Reduce(ReduceOp.MEAN, 3),
    Broadcast(0),
    Broadcast(7),
    Barrier(),
]


def collective(operation: Operation) -> Collective:
    leaves = tuple(Leaf(f"[{number}]", dtype, (number, 0, 2)) for number, dtype in enumerate(DType))
    spec = (Tier("xring", 2, 1000), Tier("pscpu", 1, -1))
    return Collective(
        operation,
        "[*]",
        leaves,
        7,
        CommunicationImplementation.RING,
        "train.py:88",
        spec,
        Packing(2, 3, 4),
        compression=Compression.INT8,
    )


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_a_collective(operation: Operation) -> None:
    value = collective(operation)
    assert codec.collective_from_proto(codec.collective_to_proto(value)) == value


@pytest.mark.parametrize("hint", CommunicationImplementation)
def test_every_hint(hint: CommunicationImplementation) -> None:
    value = Collective(Barrier(), "", (), 0, hint)
    assert codec.collective_from_proto(codec.collective_to_proto(value)) == value


def test_a_layout() -> None:
    value = Layout((Pack(DType.INT8, DType.FLOAT32, 3, 64, 128),), (LeafPlacement(0, 1), LeafPlacement(0, 2)), 200, 300)
    assert codec.layout_from_proto(codec.layout_to_proto(value)) == value


def test_a_group_a_peer_and_a_verdict() -> None:
    group = GroupInfo("train", 2**62, 2**62 + 1, (MEMBER,))
    assert codec.group_from_proto(codec.group_to_proto(group)) == group
    peer = Peer(3, "incarnation", "host", "127.0.0.1:5", (0, 2))
    assert codec.peer_from_proto(codec.peer_to_proto(peer)) == peer
    verdict = Verdict("train", 1, 2, 14, "lost", 5, 6, "barrier()", (MEMBER,), (MEMBER,), 9, "worker", (MEMBER,))
    assert codec.verdict_from_proto(codec.verdict_to_proto(verdict)) == verdict


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("origin", [None, 0, 3])
def test_the_cause_and_the_origin_of_a_verdict(cause: Cause, origin: int | None) -> None:
    verdict = Verdict("train", 1, 2, 14, "lost", 5, cause=cause, origin=origin)
    assert codec.verdict_from_proto(codec.verdict_to_proto(verdict)) == verdict


def test_a_verdict_of_an_older_peer_and_one_with_a_newer_cause_have_none() -> None:
    assert codec.verdict_from_proto(common.Verdict(code=14)).cause is Cause.UNSPECIFIED
    newer = common.Verdict.FromString(common.Verdict(code=14).SerializeToString() + b"\x80\x01\x63")  # cause: 99
    read = codec.verdict_from_proto(newer)
    assert (newer.cause, read.cause, read.origin) == (99, Cause.UNSPECIFIED, None)


@pytest.mark.parametrize("kind", ReportKind)
def test_a_report_with_positions(kind: ReportKind) -> None:
    position = RankPosition(1, 5, 4, "op", "x.py:1", 0.25, True, "op", "x.py:1", b"contract", collective(Barrier()))
    report = Report(1, 2, kind, 3, 4, 5, "text", 0.5, (position, RankPosition(2)))
    assert codec.report_from_proto(codec.report_to_proto(report)) == report


def test_two_different_collectives_have_different_contracts_and_the_site_is_not_part_of_it() -> None:
    texts = [collective(operation).contract() for operation in OPERATIONS]
    assert len(set(texts)) == len(texts)
    here, there = Collective(Barrier(), "", (), site="a.py:1"), Collective(Barrier(), "", (), site="b.py:2")
    assert here.contract() == there.contract()


def _of_shape(*shape: int) -> common.Collective:
    return common.Collective(barrier=common.Barrier(), leaves=[common.Leaf(dtype="INT8", shape=shape)])


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (common.Collective(), "operation"),
        (common.Collective(all_reduce=common.AllReduce()), "reduce op number 0"),
        (common.Collective(barrier=common.Barrier(), leaves=[common.Leaf()]), "data type number 0"),
        (common.Collective(barrier=common.Barrier(), leaves=[common.Leaf(dtype="INT8", shape=[-1])]), "negative"),
        (_of_shape(1 << 62, 4), r"value: int8\[.*more bytes than 2\^63 - 1"),
        (_of_shape(*[1] * 65), "an array of 65 dimensions, and at most 64 may be"),
        (
            common.Collective(barrier=common.Barrier(), options=common.CommunicationOptions(bytes_per_pack=-1)),
            "bytes_per_pack",
        ),
        (
            common.Collective(
                barrier=common.Barrier(),
                options=common.CommunicationOptions(
                    all_reduce_spec=[common.Tier(algorithm="gossip", shards=1, limit=-1)]
                ),
            ),
            "gossip",
        ),
        (
            common.Collective(
                barrier=common.Barrier(),
                options=common.CommunicationOptions(
                    all_reduce_spec=[common.Tier(algorithm="xring", shards=1, limit=9)]
                ),
            ),
            "must be -1",
        ),
    ],
    ids=[
        "no operation",
        "no reduce op",
        "no type",
        "negative shape",
        "too many bytes",
        "too many dimensions",
        "negative pack",
        "unknown algorithm",
        "no last tier",
    ],
)
def test_what_no_client_should_send_is_an_invalid_argument(message: common.Collective, word: str) -> None:
    with pytest.raises(InvalidArgumentError, match=word):
        codec.collective_from_proto(message)


def test_compression_is_a_part_of_the_contract_and_its_absence_leaves_that_as_it_was() -> None:
    plain = Collective(Barrier(), "", ())
    texts = {Collective(Barrier(), "", (), compression=one).contract() for one in Compression}
    assert len(texts) == len(Compression)
    assert plain.contract() in texts
    assert "compression" not in plain.contract()


def test_an_unknown_compression_is_refused() -> None:
    message = codec.collective_to_proto(Collective(Barrier(), "", ()))
    message.options.compression = 9  # type: ignore[assignment]
    with pytest.raises(InvalidArgumentError, match="compression number 9 is not known to this release"):
        codec.collective_from_proto(message)
