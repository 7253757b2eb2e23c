"""Two levels reach the goal for any hosts, any inner stage and any algorithm across."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectived_runtime.plan import double_tree, halving_doubling, one_shot, ring, shuffle, tree
from collectived_runtime.plan.errors import PlanDeadlock
from collectived_runtime.plan.hierarchical import FlatAlgorithm, InnerStage, all_reduce
from collectived_runtime.plan.moves import SendMove, Span
from collectived_runtime.plan.verify import postconditions
from collectived_runtime.plan.verify.verifier import verify_plans

ACROSS: dict[str, FlatAlgorithm] = {
    "ring": ring.all_reduce,
    "tree": tree.all_reduce,
    "halving_doubling": halving_doubling.all_reduce,
    "shuffle": shuffle.all_reduce,
    "double_tree": double_tree.all_reduce,
    "one_shot": one_shot.all_reduce,
}
SHAPES = ((1,), (4,), (1, 1), (2, 2), (3, 1), (1, 3), (2, 2, 2), (8, 8), (4, 1, 3, 2), (1, 1, 1, 1, 5), (3, 3, 3, 3, 3))
COUNTS = (0, 1, 3, 7, 64, 65, 1001)


def hosts_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    hosts, begin = [], 0
    for size in shape:
        hosts.append(tuple(range(begin, begin + size)))
        begin += size
    return tuple(hosts)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inside", (InnerStage.LEADER, InnerStage.LANES, InnerStage.NATIVE))
@pytest.mark.parametrize("across", ACROSS)
def test_two_levels_count_everybody_once(across: str, inside: InnerStage, shape: tuple[int, ...]) -> None:
    for count in COUNTS:
        hosts, span = hosts_of(shape), Span(2, 2 + count)
        members = range(sum(shape))
        plans = {me: all_reduce(hosts, me, span, ACROSS[across], inside) for me in members}
        verify_plans(plans, postconditions.all_reduce_goal(members, span))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("across", ACROSS)
def test_a_server_beside_the_members_folds_for_its_host(across: str, shape: tuple[int, ...]) -> None:
    hosts, span = hosts_of(shape), Span(0, 65)
    members = range(sum(shape))
    servers = range(100, 100 + len(shape))
    plans = {me: all_reduce(hosts, me, span, ACROSS[across], InnerStage.SERVER, servers) for me in (*members, *servers)}
    verify_plans(plans, postconditions.all_reduce_goal(members, span, dict.fromkeys(servers, span)))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(0, 70),
    st.sampled_from(sorted(ACROSS)),
    st.sampled_from((InnerStage.LEADER, InnerStage.LANES, InnerStage.SERVER, InnerStage.NATIVE)),
    st.randoms(use_true_random=False),
)
@settings(max_examples=300, deadline=None)
def test_hosts_may_list_their_members_in_any_order(sizes, count, across, inside, random) -> None:  # type: ignore[no-untyped-def]
    names = list(range(sum(sizes)))
    random.shuffle(names)
    hosts = [tuple(names[at] for at in places) for places in hosts_of(tuple(sizes))]
    servers = [random.choice(host) for host in hosts]
    span = Span(0, count)
    plans = {me: all_reduce(hosts, me, span, ACROSS[across], inside, servers) for me in names}
    verify_plans(plans, postconditions.all_reduce_goal(names, span))


def test_group_loops_send_across_only_their_piece_of_the_span() -> None:
    hosts, span = hosts_of((4, 4)), Span(0, 64)

    def across_hosts(inside: InnerStage, me: int) -> int:
        mine = next(host for host in hosts if me in host)
        plan = all_reduce(hosts, me, span, ring.all_reduce, inside)
        return sum(len(m.span) for moves in plan for m in moves if isinstance(m, SendMove) and m.peer not in mine)

    assert [across_hosts(InnerStage.LANES, me) for me in range(8)] == [16] * 8
    assert [across_hosts(InnerStage.LEADER, me) for me in range(8)] == [64, 0, 0, 0] * 2


@pytest.mark.parametrize("inside", (InnerStage.LEADER, InnerStage.LANES, InnerStage.NATIVE))
def test_a_missing_member_of_a_host_is_named(inside: InnerStage) -> None:
    hosts, span = hosts_of((2, 2)), Span(0, 8)
    for missing in range(4):
        plans = {me: all_reduce(hosts, me, span, inside=inside) for me in range(4) if me != missing}
        with pytest.raises(PlanDeadlock, match=f"waits for {missing}"):
            verify_plans(plans, postconditions.all_reduce_goal(range(4), span))
