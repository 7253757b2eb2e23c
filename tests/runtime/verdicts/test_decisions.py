"""Which ranks differ from which: what decides that, where it is known and where it is not."""

from __future__ import annotations

from dataclasses import replace

from collectived_proto.types import Broadcast, Collective, DType, Leaf, Member, RankPosition
from collectived_runtime.verdicts.decisions import bound_stacks, split_majority

GIVEN = Collective(Broadcast(0), "*", (Leaf("", DType.FLOAT32, (3,)),))
TAKING = Collective(Broadcast(0), "", (), open=True)


def make_position(rank: int, collective: Collective) -> RankPosition:
    contract = collective.contract().encode()
    return RankPosition(rank, 0, op=str(collective.operation), contract=contract, collective=collective)


def test_ranks_that_take_what_comes_are_with_a_value_of_their_operation() -> None:
    arrived = {0: make_position(0, GIVEN), 1: make_position(1, TAKING), 2: make_position(2, TAKING)}
    assert split_majority(arrived) == ([0, 1, 2], [])
    arrived[2] = make_position(2, replace(TAKING, operation=Broadcast(1)))
    assert split_majority(arrived) == ([0, 1], [[2]])


def test_a_value_too_large_to_be_described_differs_from_no_rank_that_takes_what_comes() -> None:
    large = replace(make_position(0, GIVEN), collective=None)
    arrived = {0: large, 1: make_position(1, TAKING)}
    assert split_majority(arrived) == ([0, 1], [])
    arrived[1] = make_position(1, replace(TAKING, operation=Broadcast(1)))
    assert split_majority(arrived) == ([0], [[1]])


def test_of_many_who_are_missing_the_first_few_say_where_their_threads_are() -> None:
    members = tuple(Member(rank, "", 0, "h", 1, stack="a.py:1 in f") for rank in range(9))
    told = bound_stacks(members, range(1, 9))
    assert [member.rank for member in told if member.stack] == [1, 2, 3, 4]
