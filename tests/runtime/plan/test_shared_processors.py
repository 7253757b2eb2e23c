"""What the simulator predicts of hosts that share processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from collectived_runtime.plan import hierarchical, ring
from collectived_runtime.plan.catalog import FLAT_ALGORITHMS
from collectived_runtime.plan.cost_model import LinkClass, Model
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.shared_processors import simulate_shared
from collectived_runtime.plan.wide_moves import NativeKind, NativeMove, WideRound

FREE = LinkClass(0.0, 1e15)


def make_model(processors: int, hosts: int, link: LinkClass = FREE, copied: float = 1e15) -> Model:
    """A message costs each of its ends 1 ms of a processor."""
    return Model(link, FREE, overhead=0.4e-3, wakeup=0.6e-3, fold=1e15, crowd=hosts / processors, copied=copied)


PAIRS = ((0, 1), (2, 3))


def make_pairs(inside: hierarchical.InnerStage) -> Callable[[int], Sequence[WideRound]]:
    """A sum of 4 MB over two hosts of two participants."""
    return lambda me: hierarchical.all_reduce(PAIRS, me, Span(0, 1_000_000), ring.all_reduce, inside)


def flat(name: str, size: int, nbytes: int, model: Model) -> tuple[float, int]:
    members, hosts = range(size), [(member,) for member in range(size)]
    return simulate_shared(lambda me: FLAT_ALGORITHMS[name](members, me, Span(0, nbytes // 4)), hosts, 4, model)


def test_two_hosts_on_one_processor_take_turns() -> None:
    # Two rounds of a ring: each of the two sends and receives in both.
    seconds, rounds = flat("ring", 2, 8, make_model(1, 2))
    assert seconds == pytest.approx(8e-3) and rounds == 2
    assert flat("ring", 2, 8, make_model(2, 2))[0] == pytest.approx(4e-3)


def test_more_hosts_than_processors_share_out_the_work() -> None:
    seconds, rounds = flat("one_shot", 8, 4, make_model(2, 8))
    assert seconds == pytest.approx(8 * 14 * 1e-3 / 2, rel=0.02) and rounds == 2  # in the second it only finishes


def test_a_host_does_not_wait_for_the_rounds_of_others() -> None:
    # 1 sends to 0 and 3 to 2 side by side, then 2 to 0, and all that back: four messages in a row, each with two ends.
    assert flat("tree", 4, 4, make_model(4, 4))[0] == pytest.approx(8e-3)
    # With one processor all twelve ends come one after the other.
    assert flat("tree", 4, 4, make_model(1, 4))[0] == pytest.approx(12e-3)


def test_bytes_cost_a_processor_at_both_ends_and_the_link_in_between() -> None:
    # 2 MB in all each way, in two halves; half of `copied` a second counts for each direction.
    slow_copies = make_model(2, 2, copied=1e6)
    assert flat("ring", 2, 2_000_000, slow_copies)[0] == pytest.approx(4e-3 + 4 * 0.5)
    slow_link = make_model(2, 2, LinkClass(0.1, 1e6))
    assert flat("ring", 2, 2_000_000, slow_link)[0] == pytest.approx(2 * (0.1 + 1.0 + 1e-3), rel=0.01)


@pytest.mark.parametrize("inside", (hierarchical.InnerStage.LEADER, hierarchical.InnerStage.LANES))
def test_participants_of_a_host_share_its_link(inside: hierarchical.InnerStage) -> None:
    # A ring of two hosts: 2 MB each way in each of its two rounds, however many participants send them.
    model = Model(LinkClass(0.0, 1e6), FREE, overhead=0.0, wakeup=0.0, fold=1e15, crowd=1.0, copied=1e15)
    assert simulate_shared(make_pairs(inside), PAIRS, 4, model)[0] == pytest.approx(4.0, rel=1e-3)


def test_participants_of_a_host_wake_each_other_for_nothing() -> None:
    model = Model(LinkClass(0.0, 1e6), FREE, overhead=0.0, wakeup=1.0, fold=1e15, crowd=1.0, copied=1e15)
    leader = make_pairs(hierarchical.InnerStage.LEADER)
    # Two rounds of a ring between the leaders: 2 MB take 2 s, the sender's wakeup meanwhile; then the receiver's.
    assert simulate_shared(leader, PAIRS, 4, model)[0] == pytest.approx(2 * (2.0 + 1.0), rel=0.01)


def test_what_an_engine_carries_out_costs_as_much_as_its_ring() -> None:
    def plan(members: tuple[int, ...]) -> Callable[[int], Sequence[WideRound]]:
        return lambda me: ((NativeMove(NativeKind.ALL_REDUCE, members, Span(0, 250_000), 0),),)

    slow_link = make_model(2, 2, LinkClass(0.0, 1e6))
    assert simulate_shared(plan((0, 1)), ((0,), (1,)), 4, slow_link)[0] == pytest.approx(1.0, rel=0.01)
    assert simulate_shared(plan((0,)), ((0,),), 4, make_model(1, 1)) == (0.0, 1)


def test_a_plan_that_waits_for_ever_is_a_defect() -> None:
    from collectived_runtime.plan.moves import Buffer, RecvMove

    with pytest.raises(AssertionError, match="no other plan sends"):
        simulate_shared(
            lambda me: ((RecvMove(1 - me, Span(0, 1), Buffer.OUTPUT, None),),), ((0,), (1,)), 4, make_model(1, 2)
        )
