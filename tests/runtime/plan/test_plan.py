"""Every algorithm reaches its goal: each contribution exactly once everywhere it is wanted, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from tests.runtime.plan import goals

from collectived_runtime.plan import (
    all_to_all,
    catalog,
    double_tree,
    halving_doubling,
    one_shot,
    ring,
    shuffle,
    tree,
)
from collectived_runtime.plan.errors import PlanDeadlock
from collectived_runtime.plan.moves import Buffer, FinishMove, SendMove, Span
from collectived_runtime.plan.verify import postconditions
from collectived_runtime.plan.verify.verifier import verify_plans
from collectived_runtime.plan.wide_moves import WidePlan, WideRound

SIZES = range(1, 18)
COUNTS = (0, 1, 3, 7, 64, 65, 1001)
ALL_REDUCE = catalog.FLAT_ALGORITHMS


def each(plan: Callable[..., Iterable[WideRound]], members: Sequence[int], *arguments: object) -> dict[int, WidePlan]:
    return {me: tuple(plan(members, me, *arguments)) for me in members}


def uneven(size: int, count: int) -> tuple[Span, ...]:
    """Neighbouring shares of which every third is empty."""
    parts = iter(Span(3, 3 + count).split(max(size - size // 3, 1)))
    stop = 3
    shares = []
    for number in range(size):
        share = Span(stop, stop) if size > 1 and number % 3 == 2 else next(parts)
        shares.append(share)
        stop = share.stop
    return tuple(shares)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_all_reduce_has_each_contribution_exactly_once_everywhere(name: str, size: int) -> None:
    for count in COUNTS:
        span = Span(5, 5 + count)
        verify_plans(each(ALL_REDUCE[name], range(size), span), postconditions.all_reduce_goal(range(size), span))


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_members_may_be_any_numbers_in_any_order(name: str) -> None:
    members = (7, 3, 11, 0, 5)
    span = Span(0, 23)
    verify_plans(each(ALL_REDUCE[name], members, span), postconditions.all_reduce_goal(members, span))


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_a_lone_member_only_finishes_its_input(name: str) -> None:
    span = Span(0, 4)
    moves = [move for moves in ALL_REDUCE[name]((6,), 6, span) for move in moves]
    assert all(isinstance(move, FinishMove) and move.source is Buffer.INPUT for move in moves)
    assert sum(len(move.span) for move in moves) == len(span)


@pytest.mark.parametrize("count", (16, 64, 160))
@pytest.mark.parametrize("size", (2, 4, 8, 16))
def test_each_member_of_a_ring_sends_exactly_the_lower_bound(size: int, count: int) -> None:
    span = Span(0, count)
    traffic = verify_plans(each(ring.all_reduce, range(size), span), postconditions.all_reduce_goal(range(size), span))
    assert set(traffic.elements.values()) == {2 * (size - 1) * count // size}


@pytest.mark.parametrize("size", SIZES)
def test_the_volume_of_a_ring_is_the_lower_bound_for_any_length(size: int) -> None:
    for count in COUNTS:
        span = Span(0, count)
        traffic = verify_plans(
            each(ring.all_reduce, range(size), span), postconditions.all_reduce_goal(range(size), span)
        )
        assert sum(traffic.elements.values()) == 2 * (size - 1) * count
        assert traffic.rounds == max(2 * (size - 1), 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_tree_reduces_to_and_broadcasts_from_any_root(size: int) -> None:
    for count in COUNTS:
        span = Span(0, count)
        for root in range(size):
            verify_plans(each(tree.reduce, range(size), span, root), goals.reduce_goal(range(size), span, root))
            verify_plans(each(tree.broadcast, range(size), span, root), goals.broadcast_goal(range(size), span, root))


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_scatters_sums_and_gathers_shares_of_any_size(size: int) -> None:
    for count in COUNTS:
        shares = uneven(size, count)
        verify_plans(each(ring.reduce_scatter, range(size), shares), goals.reduce_scatter_goal(range(size), shares))
        verify_plans(each(ring.all_gather, range(size), shares), goals.all_gather_goal(range(size), shares))


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_an_empty_span_still_meets_every_partner_of_a_full_one(name: str) -> None:
    def peers(span: Span, me: int) -> set[int]:
        return {
            move.peer for moves in ALL_REDUCE[name](range(6), me, span) for move in moves if isinstance(move, SendMove)
        }

    assert [peers(Span(0, 0), me) for me in range(6)] == [peers(Span(0, 60), me) for me in range(6)]


def test_empty_pieces_travel_once_per_partner_only() -> None:
    span = Span(0, 1)
    traffic = verify_plans(each(ring.all_reduce, range(9), span), postconditions.all_reduce_goal(range(9), span))
    assert sum(traffic.messages.values()) <= 16 + 9


@pytest.mark.parametrize("size", range(2, 18))
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_a_missing_partner_leaves_every_algorithm_stuck_and_named(name: str, size: int) -> None:
    span = Span(0, 10)
    for missing in range(size):
        plans = {me: tuple(ALL_REDUCE[name](range(size), me, span)) for me in range(size) if me != missing}
        with pytest.raises(PlanDeadlock, match=f"waits for {missing}"):
            verify_plans(plans, postconditions.all_reduce_goal(range(size), span))


@pytest.mark.parametrize("servers", ((2,), (0, 3), (4, 1, 0), (9,), (9, 8, 7), (1, 9)))
def test_a_shuffle_goes_onto_any_servers_members_or_not(servers: tuple[int, ...]) -> None:
    for count in COUNTS:
        members = range(5)
        span = Span(1, 1 + count)
        shares = dict(zip(servers, span.split(len(servers)), strict=True))
        beside = {server: share for server, share in shares.items() if server not in members}
        plans = {me: shuffle.all_reduce(members, me, span, servers) for me in (*members, *beside)}
        verify_plans(plans, postconditions.all_reduce_goal(members, span, beside))


@pytest.mark.parametrize("segments", (1, 2, 3, 8))
@pytest.mark.parametrize("size", SIZES)
def test_a_double_tree_takes_any_number_of_segments(size: int, segments: int) -> None:
    span = Span(0, 65)
    plans = {me: double_tree.all_reduce(range(size), me, span, segments) for me in range(size)}
    verify_plans(plans, postconditions.all_reduce_goal(range(size), span))


@pytest.mark.parametrize("size", (2, 4, 8, 16))
def test_halving_doubling_sends_the_lower_bound_in_few_rounds(size: int) -> None:
    span = Span(0, 160)
    traffic = verify_plans(
        each(halving_doubling.all_reduce, range(size), span), postconditions.all_reduce_goal(range(size), span)
    )
    assert set(traffic.elements.values()) == {2 * (size - 1) * 160 // size}
    assert traffic.rounds == 2 * (size - 1).bit_length()


@pytest.mark.parametrize("size", SIZES)
def test_inner_members_of_one_tree_are_leaves_of_the_other(size: int) -> None:
    span = Span(0, 64 * 64)
    traffic = verify_plans(
        each(double_tree.all_reduce, range(size), span), postconditions.all_reduce_goal(range(size), span)
    )
    assert all(elements <= 2 * len(span) for elements in traffic.elements.values())


@pytest.mark.parametrize("size", range(2, 18))
def test_one_shot_needs_one_exchange(size: int) -> None:
    span = Span(0, 7)
    traffic = verify_plans(
        each(one_shot.all_reduce, range(size), span), postconditions.all_reduce_goal(range(size), span)
    )
    assert set(traffic.messages.values()) == {size - 1}


@pytest.mark.parametrize("size", SIZES)
def test_shares_of_any_size_are_gathered_and_scattered_at_any_root(size: int) -> None:
    for count in COUNTS:
        shares = uneven(size, count)
        members = range(size)
        for root in members:
            verify_plans(each(all_to_all.gather, members, shares, root), goals.gather_goal(members, shares, root))
            verify_plans(each(all_to_all.scatter, members, shares, root), goals.scatter_goal(members, shares, root))


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_delivers_every_entry_of_any_table(size: int) -> None:
    for count in COUNTS:
        flat = iter(Span(0, count).split(size * size))
        table = [[next(flat) for _ in range(size)] for _ in range(size)]
        verify_plans(each(all_to_all.all_to_all, range(size), table), goals.all_to_all_goal(range(size), table))


@pytest.mark.parametrize("size", SIZES)
def test_nobody_leaves_a_barrier_before_everybody_has_come(size: int) -> None:
    plans = {me: all_to_all.barrier(range(size), me) for me in range(size)}
    heard = {me: {me} for me in range(size)}
    for number in range(len(plans[0])):
        before = {me: set(whom) for me, whom in heard.items()}
        for me, plan in plans.items():
            for move in plan[number]:
                if isinstance(move, SendMove):
                    heard[move.peer] |= before[me]
    assert all(whom == set(range(size)) for whom in heard.values())
    verify_plans(plans, postconditions.all_reduce_goal(range(size), Span(0, 0)))
