"""What lanes count, and what the account of a worker makes of it when lanes come and go."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from collectived_proto.errors import Code
from collectived_proto.types import AllReduce, Barrier, Broadcast, Recv, ReduceOp, Send
from collectived_runtime.engine.counters import BOUNDS, NOT_STARTED, POINT_TO_POINT, Counters, Histogram
from collectived_runtime.engine.lane import Lane
from collectived_runtime.metrics.labels import GroupNames
from collectived_runtime.worker.account import Account, Sum

from .conftest import World, wait_for

Make = Callable[..., World]


def everything(account: Account, now: float = 0.0) -> Sum:
    *_, total = account.sums(now)
    return total


def test_a_duration_lies_in_the_first_bucket_that_takes_it() -> None:
    histogram = Histogram()
    for bound in BOUNDS:
        histogram.add(bound)
    histogram.add(BOUNDS[-1] + 1)
    assert histogram.counts == [1] * (len(BOUNDS) + 1)
    histogram.merge(histogram)
    assert histogram.counts == [2] * (len(BOUNDS) + 1)


def test_counters_of_lanes_add_up() -> None:
    one, two = Counters(done=1, stalls=2), Counters(done=3, folded_bytes=4)
    for counters in (one, two):
        counters.tally(Barrier(), "ring", 8, 0.5)
        counters.waited(Barrier(), 0.1)
        counters.failure(Barrier(), NOT_STARTED, 4)
        counters.verdict(4)
    two.tally(Broadcast(0), "tree", 16, 0.5)
    one.merge(two)
    assert (one.done, one.stalls, one.folded_bytes) == (4, 2, 4)
    assert {key: (tally.nbytes, sum(tally.lasted.counts)) for key, tally in one.tallies.items()} == {
        ("barrier", "ring"): (16, 2),
        ("broadcast", "tree"): (16, 1),
    }
    assert sum(one.waits["barrier"].counts) == 2
    assert (one.failures, one.verdicts) == ({("barrier", NOT_STARTED, 4): 2}, {4: 2})


def test_a_lane_counts_by_operation_and_algorithm(world: Make) -> None:
    here = world(2)
    for operation in (AllReduce(ReduceOp.SUM), AllReduce(ReduceOp.SUM), Broadcast(0)):
        for rank in here.ranks:
            rank.submit(np.ones(8, np.float32), operation=operation)
        for rank in here.ranks:
            rank.done()
    here.ranks[0].post(Send(1), np.ones(2, np.float32))
    here.ranks[1].post(Recv(0))
    for rank in here.ranks:
        rank.done()
    counters = here.lanes[0].counters
    wait_for(lambda: len(counters.tallies) == 4)
    assert {key: (tally.nbytes, sum(tally.lasted.counts)) for key, tally in counters.tallies.items()} == {
        ("all_reduce", "local"): (64, 2),
        ("broadcast", "tree"): (32, 1),
        ("send", POINT_TO_POINT): (8, 1),
        ("recv", POINT_TO_POINT): (0, 1),
    }
    assert {name: sum(waits.counts) for name, waits in counters.waits.items()} == {"all_reduce": 2, "broadcast": 1}


def test_what_fails_is_counted_with_its_code(world: Make) -> None:
    here = world(2)
    here.ranks[0].submit(operation=Barrier())
    here.ranks[0].post(Recv(1))
    lane = here.lanes[0]
    wait_for(lambda: lane.ledger.open() and lane.posts)
    here.rule(here.verdict(Code.DEADLINE_EXCEEDED))
    assert {here.ranks[0].failed()[1].code for _ in range(2)} == {Code.DEADLINE_EXCEEDED}
    assert lane.counters.verdicts == {Code.DEADLINE_EXCEEDED: 1}
    wait_for(lambda: len(lane.counters.failures) == 2)
    assert lane.counters.failures == {
        ("barrier", NOT_STARTED, Code.DEADLINE_EXCEEDED): 1,
        ("recv", POINT_TO_POINT, Code.DEADLINE_EXCEEDED): 1,
    }


def test_what_stalls_is_counted_once(world: Make) -> None:
    here = world(2, stall_after=0.01)
    here.ranks[0].submit(operation=Barrier())
    lane = here.lanes[0]
    wait_for(lambda: lane.ledger.open() and lane.ledger.open()[0].stall_at > lane.ledger.open()[0].first.at + 0.03)
    assert lane.counters.stalls == 1
    account = Account()
    account.began(lane)
    flight = everything(account, lane.ledger.open()[0].first.at + 5).flights["world"]
    assert (flight.open, flight.stalled, flight.oldest, flight.ranks) == (1, 1, 5.0, 2)


def test_in_an_idle_group_nothing_is_old_and_nothing_stalls(world: Make) -> None:
    here = world(2, stall_after=0.01, idle=True)
    here.ranks[0].submit(operation=Barrier())
    lane = here.lanes[0]
    wait_for(lane.ledger.open)
    account = Account()
    account.began(lane)
    flight = everything(account, lane.ledger.open()[0].first.at + 5).flights["world"]
    assert (flight.open, flight.stalled, flight.oldest) == (1, 0, 0.0)


def test_who_comes_last_has_waited_least(world: Make) -> None:
    here = world(2)
    ledger = here.lanes[0].ledger
    for _ in range(3):
        here.ranks[1].submit()
        wait_for(ledger.open)
        here.ranks[0].submit()
        for rank in here.ranks:
            rank.done()
    wait_for(lambda: ledger.standings[0].waits == 3)
    early, late = ledger.standings[1], ledger.standings[0]
    assert early.waits == late.waits == 3
    assert 0 < late.waited < early.waited
    for rank in here.ranks:
        rank.submit(operation=Broadcast(0))
    for rank in here.ranks:
        rank.done()
    assert late.waits == 3, "the root of a broadcast waits for nobody"


def test_what_a_lane_has_done_stays_counted_when_it_has_ended(world: Make) -> None:
    here = world(1, 1)
    account = Account()
    for lane in here.lanes:
        account.began(lane)
    for rank in here.ranks:
        rank.submit()
    for rank in here.ranks:
        rank.done()
    wait_for(lambda: all(lane.counters.done for lane in here.lanes))
    before = everything(account)
    assert before.lanes == 2 and before.groups["world"].sent > 0
    for lane in here.lanes:
        lane.stop()
        lane.join()
        account.ended(lane)
        account.ended(lane)  # said twice, it counts once
    after = everything(account)
    assert after.lanes == 0 and not after.flights
    assert after.counters == before.counters
    assert after.groups["world"].done == 2
    assert after.groups["world"].sent >= before.groups["world"].sent, "its farewell was sent too"


def test_traffic_is_never_shown_smaller_than_before(world: Make) -> None:
    here = world(1)
    account = Account()
    account.began(here.lanes[0])
    told = iter([(10, 20), (5, 30), (12, 25)])
    here.lanes[0].traffic = lambda: next(told)  # type: ignore[method-assign]
    shown = [(group.sent, group.received) for group in (everything(account).groups["world"] for _ in range(3))]
    assert shown == [(10, 20), (10, 30), (12, 30)]


def test_bytes_of_earlier_generations_are_not_forgotten(world: Make) -> None:
    here = world(1, 1)
    for rank in here.ranks:
        rank.submit()
    for rank in here.ranks:
        rank.done()
    before = [lane.traffic() for lane in here.lanes]
    assert all(sent and received for sent, received in before)
    here.rule(here.verdict(Code.INVALID_ARGUMENT, from_instance=1, successor=101))
    wait_for(lambda: all(lane.ledger.generation == 101 for lane in here.lanes))
    assert all(now[0] >= then[0] for now, then in zip((lane.traffic() for lane in here.lanes), before, strict=True))


def test_the_numbers_of_a_name_that_is_given_up_go_with_it(world: Make) -> None:
    account = Account()
    account._names = GroupNames(1)
    first, second = world(1), world(1)

    def began(lane: Lane, name: str) -> None:
        object.__setattr__(lane.topology.group, "name", name)
        account.began(lane)

    began(first.lanes[0], "job/one")
    account.ended(first.lanes[0])
    assert set(everything(account).groups) == {"one"}
    began(second.lanes[0], "job/two")
    assert set(everything(account).groups) == {"two"}
