"""The algorithms that users name, over hosts of any shape, in any number of shards."""

from __future__ import annotations

import pytest

from collectived_proto.spec import ALGORITHMS
from collectived_runtime.plan import goals
from collectived_runtime.plan.check import check
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.named import FLAT, all_reduce, sharded

SHAPES = (
    ((0,),),
    ((0, 1, 2, 3),),
    ((0,), (1,), (2,)),
    ((0, 1), (2, 3), (4, 5)),
    ((0, 1, 2), (3,)),
    ((0, 1), (2,), (3, 4, 5)),
)


@pytest.mark.parametrize("count", (0, 1, 7, 64))
@pytest.mark.parametrize("hosts", SHAPES)
@pytest.mark.parametrize("name", sorted({*ALGORITHMS, *FLAT}))
def test_every_name_is_an_all_reduce_with_and_without_cpus(
    name: str, hosts: tuple[tuple[int, ...], ...], count: int
) -> None:
    span = Span(0, count)
    members = [member for host in hosts for member in host]
    check({me: all_reduce(name, hosts, me, span) for me in members}, goals.all_reduced(members, span))
    if "pscpu" not in name or name == "nccl/pscpu":
        return
    cpus = range(100, 100 + len(hosts))
    shares = span.split(len(hosts)) if name == "pscpu" else [span] * len(hosts)
    plans = {me: all_reduce(name, hosts, me, span, cpus) for me in (*members, *cpus)}
    check(plans, goals.all_reduced(members, span, dict(zip(cpus, shares, strict=True))))


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        all_reduce("what", ((0, 1),), 0, Span(0, 1))


@pytest.mark.parametrize("shards", (1, 2, 3, 4))
@pytest.mark.parametrize("count", (0, 1, 3, 7, 64, 65, 1001))
@pytest.mark.parametrize("name", FLAT)
def test_shards_are_all_reduces_of_their_own_that_make_up_the_span(name: str, count: int, shards: int) -> None:
    members = range(5)
    span = Span(0, count)
    plans = {me: sharded(FLAT[name], members, me, span, shards) for me in members}
    for number, part in enumerate(span.split(shards)):
        check({me: plan[number] for me, plan in plans.items()}, goals.all_reduced(members, part))
