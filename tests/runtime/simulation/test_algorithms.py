"""Every name that can be simulated has plans, and the checker proves them on hosts of all shapes."""

from __future__ import annotations

import pytest

from collectived_proto.all_reduce_spec import ALGORITHMS
from collectived_runtime.plan.catalog import FLAT_ALGORITHMS
from collectived_runtime.plan.moves import SendMove, Span
from collectived_runtime.plan.verify import postconditions
from collectived_runtime.plan.verify.verifier import verify_plans
from collectived_runtime.simulation.algorithms import (
    TIMED_ALGORITHMS,
    all_names,
    default_names,
    is_known,
    list_names,
    make_plan,
    merge_shard_plans,
    participants,
    qualify_auto_name,
)

SHAPES = ((1,), (8,), (1, 1, 1), (3, 1, 2), (2, 2, 2), (1, 4))


def test_devices_are_numbered_host_by_host() -> None:
    assert participants((3, 1, 2)) == (range(3), range(3, 4), range(4, 6))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_algorithm_leaves_every_contribution_exactly_once(shape: tuple[int, ...]) -> None:
    hosts, everybody = participants(shape), range(sum(shape))
    for name in (*all_names(shape), "server/tree", "native/ring"):
        for count in (1, 65):
            plans = {me: make_plan(name, hosts, me, Span(0, count)) for me in everybody}
            verify_plans(plans, postconditions.all_reduce_goal(everybody, Span(0, count)))


def test_every_name_of_the_specification_and_every_flat_one_is_known() -> None:
    assert all(is_known(name) for name in (*ALGORITHMS, *FLAT_ALGORITHMS, *list_names()[:-1]))
    assert not any(is_known(name) for name in ("", "all", "leader", "leader/", "/ring", "leader/nccl", "lanes/rings"))


def test_hosts_with_one_device_need_no_inner_stage() -> None:
    assert default_names((1, 1)) == TIMED_ALGORITHMS
    assert qualify_auto_name("ring", (1, 1)) == "ring"
    assert qualify_auto_name("ring", (2, 1)) == "leader/ring"


def test_group_loops_are_compared_where_hosts_are_equally_large() -> None:
    assert "lanes/ring" in default_names((2, 2))
    assert not any(name.startswith("lanes") for name in default_names((2, 1)))


def test_no_name_is_compared_twice() -> None:
    for shape in SHAPES:
        assert len(set(all_names(shape))) == len(all_names(shape))


def test_shards_go_side_by_side_in_the_same_rounds() -> None:
    hosts = participants((1, 1, 1))
    span = Span(0, 27)
    alone = [list(make_plan("ring", hosts, 0, part)) for part in span.split(3)]
    together = list(merge_shard_plans("ring", hosts, 0, span.split(3)))
    assert len(together) == len(alone[0])
    for number, moves in enumerate(together):
        assert moves == tuple(move for shard in alone for move in shard[number])
    sent = sum(len(move.span) for moves in together for move in moves if isinstance(move, SendMove))
    assert sent == 2 * 27 * 2 // 3
