"""The checker refuses what is wrong, and says what."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from tests.runtime.plan import goals

from collectived_runtime.plan import halving_doubling, ring, tree
from collectived_runtime.plan.errors import (
    BufferOverwrite,
    ContributionError,
    FoldDivergence,
    FoldOrderError,
    PlanDeadlock,
)
from collectived_runtime.plan.hierarchical import FlatAlgorithm
from collectived_runtime.plan.moves import Buffer, FinishMove, FoldMove, Plan, RecvMove, SendMove, Span
from collectived_runtime.plan.verify import postconditions
from collectived_runtime.plan.verify.verifier import verify_plans

SPAN = Span(0, 10)
LOW, HIGH = Span(0, 5), Span(5, 10)
LEFT, RIGHT = FoldMove(Buffer.INPUT, True), FoldMove(Buffer.INPUT, False)
PAIR = postconditions.all_reduce_goal((0, 1), SPAN)


def send(peer: int, span: Span = SPAN, source: Buffer = Buffer.INPUT) -> SendMove:
    return SendMove(peer, span, source)


def recv(peer: int, span: Span = SPAN, fold: FoldMove | None = None, target: Buffer = Buffer.SCRATCH) -> RecvMove:
    return RecvMove(peer, span, target, fold)


def result(peer: int, span: Span = SPAN) -> RecvMove:
    return RecvMove(peer, span, Buffer.OUTPUT)


GOOD: dict[int, Plan] = {
    0: ((recv(1, fold=RIGHT),), (FinishMove(SPAN, Buffer.SCRATCH), send(1, source=Buffer.OUTPUT))),
    1: ((send(0),), (result(0),)),
}


def test_a_right_pair_of_plans_passes() -> None:
    traffic = verify_plans(GOOD, PAIR)
    assert (traffic.rounds, traffic.elements, traffic.messages) == (2, {0: 10, 1: 10}, {0: 1, 1: 1})


@pytest.mark.parametrize("size", range(2, 18))
@pytest.mark.parametrize("algorithm", (ring.all_reduce, tree.all_reduce))
def test_a_missing_partner_is_reported_as_stuck(algorithm: object, size: int) -> None:
    assert callable(algorithm)
    for missing in range(size):
        plans = {me: algorithm(range(size), me, SPAN) for me in range(size) if me != missing}
        with pytest.raises(PlanDeadlock, match=f"waits for {missing}"):
            verify_plans(plans, postconditions.all_reduce_goal(range(size), SPAN))


def test_a_receive_that_nobody_sends_names_both_sides() -> None:
    with pytest.raises(PlanDeadlock, match="round 0: 0 waits for 1$"):
        verify_plans({0: GOOD[0], 1: ()}, PAIR)


def test_a_send_that_nobody_takes_names_both_sides() -> None:
    with pytest.raises(PlanDeadlock, match="1 waits for 0 to take its send"):
        verify_plans({0: (), 1: GOOD[1]}, PAIR)


def test_a_partner_in_another_round_is_stuck() -> None:
    with pytest.raises(PlanDeadlock):
        verify_plans({0: GOOD[0], 1: ((), *GOOD[1])}, PAIR)


def test_unequal_spans_are_stuck() -> None:
    with pytest.raises(PlanDeadlock, match="expects"):
        verify_plans({0: GOOD[0], 1: ((send(0, LOW),), GOOD[1][1])}, PAIR)


def test_a_forgotten_fold_is_miscounted() -> None:
    with pytest.raises(ContributionError, match="without 0"):
        verify_plans({0: ((recv(1),), GOOD[0][1]), 1: GOOD[1]}, PAIR)


def test_a_forgotten_half_is_miscounted() -> None:
    one = ((send(0, LOW),), GOOD[1][1])
    other = ((recv(1, LOW, RIGHT),), (FinishMove(LOW, Buffer.SCRATCH), FinishMove(HIGH, Buffer.INPUT), GOOD[0][1][1]))
    with pytest.raises(ContributionError, match="without 1"):
        verify_plans({0: other, 1: one}, PAIR)


def test_a_contribution_folded_twice_is_miscounted() -> None:
    twice: Plan = ((recv(1, fold=RIGHT),), (recv(1, fold=FoldMove(Buffer.SCRATCH, False)),))
    with pytest.raises(ContributionError, match="folds 1 twice"):
        verify_plans({0: twice, 1: ((send(0),), (send(0),))}, PAIR)


def test_a_result_that_does_not_arrive_is_miscounted() -> None:
    with pytest.raises(ContributionError, match="1 ends without"):
        verify_plans({0: (GOOD[0][0], GOOD[0][1][:1]), 1: GOOD[1][:1]}, PAIR)


def test_a_result_where_none_is_wanted_is_miscounted() -> None:
    with pytest.raises(ContributionError, match="1 ends with more"):
        verify_plans(GOOD, goals.reduce_goal((0, 1), SPAN, 0))


def test_a_result_that_was_never_finished_is_miscounted() -> None:
    with pytest.raises(ContributionError, match="has not finished"):
        verify_plans({0: (GOOD[0][0], (send(1, source=Buffer.SCRATCH),)), 1: GOOD[1]}, PAIR)


def test_swapped_operands_are_misordered() -> None:
    with pytest.raises(FoldOrderError, match="with 1 left of 0"):
        verify_plans({0: ((recv(1, fold=LEFT),), GOOD[0][1]), 1: GOOD[1]}, PAIR)


def test_reading_what_the_round_writes_is_refused() -> None:
    exchange: dict[int, Plan] = {me: ((send(1 - me), recv(1 - me, fold=RIGHT if me == 0 else LEFT)),) for me in (0, 1)}
    with pytest.raises(BufferOverwrite, match="in the same round"):
        verify_plans(exchange, PAIR)


def test_two_receives_into_one_span_in_one_round_are_refused() -> None:
    twice: Plan = ((recv(1, fold=RIGHT), recv(2, fold=FoldMove(Buffer.SCRATCH, False))),)
    with pytest.raises(BufferOverwrite, match="in the same round"):
        verify_plans({0: twice, 1: ((send(0),),), 2: ((send(0),),)}, goals.reduce_goal((0, 1, 2), SPAN, 0))


def test_input_is_not_read_after_scratch_was_written() -> None:
    with pytest.raises(BufferOverwrite, match="0 reads INPUT"):
        verify_plans({0: (GOOD[0][0], (send(1),)), 1: (GOOD[1][0], (recv(0),))}, PAIR)


def test_input_is_not_read_after_output_was_written() -> None:
    with pytest.raises(BufferOverwrite, match="1 reads INPUT"):
        verify_plans({0: (*GOOD[0], (recv(1),)), 1: (*GOOD[1], (send(0),))}, PAIR)


def test_scratch_is_not_read_after_output_was_written() -> None:
    with pytest.raises(BufferOverwrite, match="reads SCRATCH"):
        verify_plans({0: (GOOD[0][0], (GOOD[0][1][0], send(1, source=Buffer.SCRATCH))), 1: GOOD[1]}, PAIR)


def test_scratch_is_not_written_after_output_was() -> None:
    late: dict[int, Plan] = {0: (*GOOD[0], (recv(1),)), 1: (*GOOD[1], (send(0, source=Buffer.SCRATCH),))}
    with pytest.raises(BufferOverwrite):
        verify_plans(late, PAIR)


def test_a_partial_sum_is_handed_on_once() -> None:
    plans: dict[int, Plan] = {
        0: ((recv(1, fold=RIGHT),), (send(1, source=Buffer.SCRATCH),), (send(1, source=Buffer.SCRATCH),)),
        1: ((send(0),), (recv(0),), (recv(0),)),
    }
    with pytest.raises(BufferOverwrite, match="holds nothing"):
        verify_plans(plans, PAIR)


def test_output_is_written_once() -> None:
    with pytest.raises(BufferOverwrite):
        verify_plans({0: (*GOOD[0], (send(1, source=Buffer.OUTPUT),)), 1: (*GOOD[1], (result(0),))}, PAIR)


def test_only_its_own_contribution_is_read_as_input() -> None:
    plans = {me: tree.broadcast((0, 1), me, SPAN, 1) for me in (0, 1)}
    with pytest.raises(BufferOverwrite, match="nothing to contribute"):
        verify_plans(plans, goals.broadcast_goal((0, 1), SPAN, 0))


def test_another_fold_tree_is_divergent() -> None:
    """Both ends finish a sum of three, but 0 folds (0 1) 2 and 3 folds 0 (1 2)."""
    more = FoldMove(Buffer.SCRATCH, False)
    plans: dict[int, Plan] = {
        0: ((send(3),), (recv(1, fold=RIGHT),), (recv(2, fold=more),), (FinishMove(SPAN, Buffer.SCRATCH),)),
        1: ((), (send(0),), (), (send(2),)),
        2: ((), (), (send(0),), (recv(1, fold=LEFT),), (send(3, source=Buffer.SCRATCH),)),
        3: ((recv(0),), (), (), (), (recv(2, fold=more),), (FinishMove(SPAN, Buffer.SCRATCH),)),
    }
    goal = postconditions.Goal(dict.fromkeys((0, 1, 2), (SPAN,)), ((SPAN, (0, 1, 2)),), {0: (SPAN,), 3: (SPAN,)})
    with pytest.raises(FoldDivergence, match="3 folds"):
        verify_plans(plans, goal)


def test_memory_of_a_check_grows_with_the_participants_and_not_with_their_square() -> None:
    def peak(size: int) -> int:
        span = Span(0, 100_000)
        tracemalloc.start()
        verify_plans({me: ring.all_reduce_rounds(range(size), me, span) for me in range(size)}, all_reduced(size, span))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    assert peak(96) < 6 * peak(24)


def all_reduced(size: int, span: Span) -> postconditions.Goal:
    return postconditions.all_reduce_goal(range(size), span)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ring_of_512_is_checked_in_seconds() -> None:
    members = range(512)
    span = Span(0, 100_000)
    begin = time.thread_time()  # of a processor: what else the machine does is not counted
    traffic = verify_plans({me: ring.all_reduce_rounds(members, me, span) for me in members}, all_reduced(512, span))
    assert sum(traffic.elements.values()) == 2 * 511 * len(span)
    assert time.thread_time() - begin < 15


@pytest.mark.parametrize("algorithm", (tree.all_reduce_rounds, halving_doubling.all_reduce_rounds))
def test_4096_participants_of_a_short_plan_are_checked_too(algorithm: FlatAlgorithm) -> None:
    members = range(4096)
    span = Span(0, 1 << 16)
    verify_plans({me: algorithm(members, me, span) for me in members}, all_reduced(4096, span))
