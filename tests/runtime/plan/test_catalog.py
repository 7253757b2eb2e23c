"""The algorithms that users name, over hosts of any shape, in any number of shards."""

from __future__ import annotations

import pytest

from collectived_proto.all_reduce_spec import ALGORITHMS
from collectived_runtime.plan.catalog import FLAT_ALGORITHMS, all_reduce
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.verify import postconditions
from collectived_runtime.plan.verify.verifier import verify_plans

SHAPES = (
    ((0,),),
    ((0, 1, 2, 3),),
    ((0,), (1,), (2,)),
    ((0, 1), (2, 3), (4, 5)),
    ((0, 1, 2), (3,)),
    ((0, 1), (2,), (3, 4, 5)),
)


@pytest.mark.parametrize("hosts", SHAPES)
@pytest.mark.parametrize("name", sorted({*ALGORITHMS, *FLAT_ALGORITHMS}))
def test_every_name_is_an_all_reduce_with_and_without_cpus(name: str, hosts: tuple[tuple[int, ...], ...]) -> None:
    for count in (0, 1, 7, 64):
        span = Span(0, count)
        members = [member for host in hosts for member in host]
        verify_plans(
            {me: all_reduce(name, hosts, me, span) for me in members}, postconditions.all_reduce_goal(members, span)
        )
        if "pscpu" not in name or name == "nccl/pscpu":
            continue
        cpus = range(100, 100 + len(hosts))
        shares = span.split(len(hosts)) if name == "pscpu" else [span] * len(hosts)
        plans = {me: all_reduce(name, hosts, me, span, cpus) for me in (*members, *cpus)}
        verify_plans(plans, postconditions.all_reduce_goal(members, span, dict(zip(cpus, shares, strict=True))))


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        all_reduce("what", ((0, 1),), 0, Span(0, 1))


@pytest.mark.parametrize("shards", (1, 2, 3, 4))
@pytest.mark.parametrize("count", (0, 1, 3, 7, 64, 65, 1001))
@pytest.mark.parametrize("name", FLAT_ALGORITHMS)
def test_shards_are_all_reduces_of_their_own_that_make_up_the_span(name: str, count: int, shards: int) -> None:
    members = range(5)
    span = Span(0, count)
    for part in span.split(shards):
        plans = {me: tuple(FLAT_ALGORITHMS[name](members, me, part)) for me in members}
        verify_plans(plans, postconditions.all_reduce_goal(members, part))
