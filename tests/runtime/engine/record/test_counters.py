"""What group loops count, and what the account of a worker makes of it when group loops come and go."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tests.runtime.engine.conftest import World, wait_for

from collectived_proto.errors import Code
from collectived_proto.types import AllReduce, Barrier, Broadcast, Recv, ReduceOp, Send
from collectived_runtime.engine.loop.group_loop import GroupLoop
from collectived_runtime.engine.record.counters import BOUNDS, NOT_STARTED, POINT_TO_POINT, Counters, Histogram
from collectived_runtime.metrics.labels import GroupLabelAllocator
from collectived_runtime.worker.observe.totals import LoopTotals, WorkerTotals

Make = Callable[..., World]


def everything(account: LoopTotals, now: float = 0.0) -> WorkerTotals:
    *_, total = account.iterate_totals(now)
    return total


def test_a_duration_lies_in_the_first_bucket_that_takes_it() -> None:
    histogram = Histogram()
    for bound in BOUNDS:
        histogram.add(bound)
    histogram.add(BOUNDS[-1] + 1)
    assert histogram.counts == [1] * (len(BOUNDS) + 1)
    histogram.merge(histogram)
    assert histogram.counts == [2] * (len(BOUNDS) + 1)


def test_counters_of_group_loops_add_up() -> None:
    one, two = Counters(done=1, stalls=2), Counters(done=3, folded_bytes=4)
    for counters in (one, two):
        counters.count_completed(Barrier(), "ring", 8, 0.5)
        counters.observe_wait(Barrier(), 0.1)
        counters.count_failure(Barrier(), NOT_STARTED, 4)
        counters.count_verdict(4)
    two.count_completed(Broadcast(0), "tree", 16, 0.5)
    one.merge(two)
    assert (one.done, one.stalls, one.folded_bytes) == (4, 2, 4)
    assert {key: (tally.nbytes, sum(tally.durations.counts)) for key, tally in one.totals.items()} == {
        ("barrier", "ring"): (16, 2),
        ("broadcast", "tree"): (16, 1),
    }
    assert sum(one.waits["barrier"].counts) == 2
    assert (one.failures, one.verdicts) == ({("barrier", NOT_STARTED, 4): 2}, {4: 2})


def test_a_group_loop_counts_by_operation_and_algorithm(world: Make) -> None:
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
    counters = here.group_loops[0].counters
    wait_for(lambda: len(counters.totals) == 4)
    assert {key: (tally.nbytes, sum(tally.durations.counts)) for key, tally in counters.totals.items()} == {
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
    group_loop = here.group_loops[0]
    wait_for(lambda: group_loop.tracker.list_open() and group_loop.pending_ops)
    here.rule(here.verdict(Code.DEADLINE_EXCEEDED))
    assert {here.ranks[0].failed()[1].code for _ in range(2)} == {Code.DEADLINE_EXCEEDED}
    assert group_loop.counters.verdicts == {Code.DEADLINE_EXCEEDED: 1}
    wait_for(lambda: len(group_loop.counters.failures) == 2)
    assert group_loop.counters.failures == {
        ("barrier", NOT_STARTED, Code.DEADLINE_EXCEEDED): 1,
        ("recv", POINT_TO_POINT, Code.DEADLINE_EXCEEDED): 1,
    }


def test_what_stalls_is_counted_once(world: Make) -> None:
    here = world(2, stall_after=0.01)
    here.ranks[0].submit(operation=Barrier())
    group_loop = here.group_loops[0]
    wait_for(
        lambda: (
            group_loop.tracker.list_open()
            and group_loop.tracker.list_open()[0].stall_at
            > group_loop.tracker.list_open()[0].first_arrival.arrived_at + 0.03
        )
    )
    assert group_loop.counters.stalls == 1
    account = LoopTotals()
    account.add_loop(group_loop)
    flight = everything(account, group_loop.tracker.list_open()[0].first_arrival.arrived_at + 5).in_flight["world"]
    assert (flight.open, flight.stalled, flight.oldest, flight.ranks) == (1, 1, 5.0, 2)


def test_in_an_idle_group_nothing_is_old_and_nothing_stalls(world: Make) -> None:
    here = world(2, stall_after=0.01, idle=True)
    here.ranks[0].submit(operation=Barrier())
    group_loop = here.group_loops[0]
    wait_for(group_loop.tracker.list_open)
    account = LoopTotals()
    account.add_loop(group_loop)
    flight = everything(account, group_loop.tracker.list_open()[0].first_arrival.arrived_at + 5).in_flight["world"]
    assert (flight.open, flight.stalled, flight.oldest) == (1, 0, 0.0)


def test_who_comes_last_has_waited_least(world: Make) -> None:
    here = world(2)
    tracker = here.group_loops[0].tracker
    for _ in range(3):
        here.ranks[1].submit()
        wait_for(tracker.list_open)
        here.ranks[0].submit()
        for rank in here.ranks:
            rank.done()
    wait_for(lambda: all(progress.waits == 3 for progress in tracker.progress.values()))
    early, late = tracker.progress[1], tracker.progress[0]
    assert 0 < late.waited_seconds < early.waited_seconds
    for rank in here.ranks:
        rank.submit(operation=Broadcast(0))
    for rank in here.ranks:
        rank.done()
    assert late.waits == 3, "the root of a broadcast waits for nobody"


def test_what_a_group_loop_has_done_stays_counted_when_it_has_ended(world: Make) -> None:
    here = world(1, 1)
    account = LoopTotals()
    for group_loop in here.group_loops:
        account.add_loop(group_loop)
    for rank in here.ranks:
        rank.submit()
    for rank in here.ranks:
        rank.done()
    wait_for(lambda: all(group_loop.counters.done for group_loop in here.group_loops))
    before = everything(account)
    assert before.group_loops == 2 and before.groups["world"].sent > 0
    for group_loop in here.group_loops:
        group_loop.stop()
        group_loop.join()
        account.remove_loop(group_loop)
        account.remove_loop(group_loop)  # said twice, it counts once
    after = everything(account)
    assert after.group_loops == 0 and not after.in_flight
    assert after.counters == before.counters
    assert after.groups["world"].done == 2
    assert after.groups["world"].sent >= before.groups["world"].sent, "its farewell was sent too"


def test_traffic_is_never_shown_smaller_than_before(world: Make) -> None:
    here = world(1)
    account = LoopTotals()
    account.add_loop(here.group_loops[0])
    told = iter([(10, 20), (5, 30), (12, 25)])
    here.group_loops[0].traffic = lambda: next(told)  # type: ignore[method-assign]
    shown = [(group.sent, group.received) for group in (everything(account).groups["world"] for _ in range(3))]
    assert shown == [(10, 20), (10, 30), (12, 30)]


def test_bytes_of_earlier_generations_are_not_forgotten(world: Make) -> None:
    here = world(1, 1)
    for rank in here.ranks:
        rank.submit()
    for rank in here.ranks:
        rank.done()
    before = [group_loop.traffic() for group_loop in here.group_loops]
    assert all(sent and received for sent, received in before)
    here.rule(here.verdict(Code.INVALID_ARGUMENT, from_instance=1, successor=101))
    wait_for(lambda: all(group_loop.tracker.generation == 101 for group_loop in here.group_loops))
    assert all(
        now[0] >= then[0]
        for now, then in zip((group_loop.traffic() for group_loop in here.group_loops), before, strict=True)
    )


def test_the_numbers_of_a_name_that_is_given_up_go_with_it(world: Make) -> None:
    account = LoopTotals()
    account._label_allocator = GroupLabelAllocator(1)
    first, second = world(1), world(1)

    def began(group_loop: GroupLoop, name: str) -> None:
        object.__setattr__(group_loop.topology.group, "name", name)
        account.add_loop(group_loop)

    began(first.group_loops[0], "job/one")
    account.remove_loop(first.group_loops[0])
    assert set(everything(account).groups) == {"one"}
    began(second.group_loops[0], "job/two")
    assert set(everything(account).groups) == {"two"}
