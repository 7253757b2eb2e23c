"""Errors as gRPC statuses: whole where that fits into trailers, and else cut from its least important end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest

from collectived_proto.codec import verdict_from_proto
from collectived_proto.errors import (
    AbortedError,
    Code,
    InvalidArgumentError,
    ResourceExhaustedError,
    error_from_verdict,
)
from collectived_proto.types import GroupInfo, Member, Verdict
from collectived_proto.v1 import common_pb2
from collectived_runtime.worker.grpc_errors import complete_verdict, error_to_status

TRAILERS = 8192  # bytes that every gRPC client takes


def member(rank: int) -> Member:
    return Member(
        rank,
        f"/job:worker/replica:0/task:{rank // 8}/device:GPU:{rank % 8}",
        rank // 8,
        f"host-{rank // 8}.cluster.example",
        10_000 + rank,
        f"trainer-{rank}",
        12,
        "all_reduce(sum)",
        "train.py:88",
        1.5,
    )


def verdict(size: int, missing: int, message: str) -> Verdict:
    members = tuple(member(rank) for rank in range(size))
    return Verdict("world", 7, 100, Code.ABORTED, message, 3, 3, "all_reduce(sum)", members[:missing], members=members)


def trailers(status: Any) -> int:
    """Bytes of the trailers: binary values travel as base64, characters outside ASCII as %XX each byte."""
    details = sum(len(key) + -(-len(value) // 3) * 4 + 32 for key, value in status.trailing_metadata)
    return details + sum(1 if " " <= letter <= "~" else 3 * len(letter.encode()) for letter in status.details) + 200


def packed(status: Any) -> Verdict:
    from google.rpc import status_pb2

    ((_, value),) = status.trailing_metadata
    (detail,) = status_pb2.Status.FromString(value).details
    found = common_pb2.Verdict()
    assert detail.Unpack(found)
    return verdict_from_proto(found)


def test_a_verdict_of_a_small_group_is_whole() -> None:
    decided = verdict(8, 1, "rank 0 left")
    status = error_to_status(error_from_verdict(decided))
    assert packed(status) == decided
    assert (status.code, status.details) == (grpc.StatusCode.ABORTED, "rank 0 left")


def test_stacks_that_do_not_fit_are_left_out_before_anything_that_is_not_said_elsewhere() -> None:
    decided = verdict(8, 4, "rank 0 has not come; now: data.py:88 in load")
    long = replace(decided, missing=tuple(replace(one, stack="a.py:1 in f\n" * 150) for one in decided.missing))
    assert packed(error_to_status(error_from_verdict(long))) == replace(decided, members=())


@pytest.mark.parametrize("size", [1, 64, 4096])
@pytest.mark.parametrize("missing", [1, 64, 4096])
@pytest.mark.parametrize("message", ["short", "x" * 8192, "Ж" * 8192], ids=["short", "long", "long in three bytes"])
def test_trailers_stay_below_what_clients_take(size: int, missing: int, message: str) -> None:
    status = error_to_status(error_from_verdict(verdict(size, missing, message)))
    assert trailers(status) < TRAILERS
    found = packed(status)
    assert found.code == Code.ABORTED and found.instance == 3 and found.missing[0].rank == 0


def test_who_was_missing_is_told_longer_than_who_was_there() -> None:
    decided = verdict(4096, 4, "ranks 0 to 3 are lost")
    found = packed(error_to_status(error_from_verdict(decided)))
    assert found.missing == decided.missing and found.members == ()


def test_an_error_without_a_verdict_is_cut() -> None:
    status = error_to_status(ResourceExhaustedError("much " * 10_000))
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED and trailers(status) < TRAILERS
    status = error_to_status(InvalidArgumentError("Ж" * 10_000))
    assert trailers(status) < TRAILERS


def test_members_that_group_loops_leave_out_are_filled_in() -> None:
    group = GroupInfo("world", 7, 100, tuple(member(rank) for rank in range(4)))
    bare = Member(2, "", 0, "", 0, "", 5, "barrier()", "a.py:1", 0.5)
    other = Member(9, "", 0, "", 0)
    told = complete_verdict(Verdict("world", 7, 100, Code.ABORTED, "", 0, missing=(bare, other)), group)
    assert (told.missing[0].host, told.missing[0].last_op) == ("host-0.cluster.example", "barrier()")
    assert told.missing[1] == other
    assert isinstance(error_from_verdict(told), AbortedError)
