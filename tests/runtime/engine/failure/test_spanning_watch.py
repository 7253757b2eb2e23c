"""Ranks whose group has other workers too: nothing completes in their segment before their worker brings results."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.runtime.engine.failure.segment_host import COUNT, SUMS, Host

from collectived_native import core
from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.types import AllGather, Broadcast, Collective, DType, Leaf, ReportKind, Verdict
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.compile.negotiation import prepare
from collectived_runtime.engine.failure.spanning_watch import SpanningWatch
from collectived_runtime.engine.record.counters import POINT_TO_POINT
from collectived_runtime.engine.submit.tracker import Arrival

GATHERS = 7  # number of a description that is not carried out in the segment
SMALL, LARGE, COMES = 20, 21, 22  # broadcasts; the last takes what comes
JOINED = 23  # a small gather, of lengths that differ
WORKER_SEAT = 2
VERDICT = Verdict("world", 7, 100, Code.UNAVAILABLE, "rank 2 is gone", 0)


class SpanningHost(Host):
    """Ranks 0 and 1 are of this worker, rank 2 is of another."""

    def __init__(self) -> None:
        super().__init__((0, 0, 1))
        assert isinstance(self.watch, SpanningWatch)
        self.spanning = self.watch
        for rank in range(2):
            self.describe(self.ranks[rank], GATHERS, AllGather(), (Leaf("", DType.FLOAT32, (1 << 20,)),))
            self.describe(self.ranks[rank], JOINED, AllGather(), (Leaf("", DType.FLOAT32, (COUNT + rank,)),))
            for number, count in (SMALL, COUNT), (LARGE, (1 << 20) + 1):
                self.describe(self.ranks[rank], number, Broadcast(0), (Leaf("", DType.FLOAT32, (count,)),))
        described = Collective(Broadcast(0), "", (), site="train.py:3", open=True)
        self.ranks[1].prepared[COMES + 10] = prepare(described, 1, self.topology)
        self.engines = [self.attach(rank) for rank in range(2)]
        self.failed: list[tuple[int, int]] = []  # rank and instance

    @property
    def ranks(self) -> dict[int, LocalRank]:
        return self.doorbells.local_ranks

    def contribute(self, rank: int, value: float) -> tuple[core.Job, np.ndarray[tuple[int], np.dtype[np.float32]]]:
        """Have a rank begin a sum; its job, and where its result will be."""
        engine, out = self.engines[rank], np.zeros(COUNT, np.float32)
        phase = (int(DType.FLOAT32), (COUNT, COUNT, 0), (COUNT,), (COUNT,))
        plan = engine.plan(core.ACROSS, 1, WORKER_SEAT, (phase,), bytes(16), 0, False, core.MEETS_NOT, SUMS + 10 * rank)
        job = engine.enqueue(plan, (np.full(COUNT, value, np.float32),), (out,), 0, None)
        engine.advance(1 << 20)
        return job, out

    def come(self, rank: int, number: int, value: float | None = None) -> core.Job:
        """Have a rank begin a broadcast, with a value if it is the root."""
        engine, known = self.engines[rank], self.ranks[rank].prepared[number + 10 * rank]
        counts = (COUNT * (value is not None), 0, COUNT, 0)
        if number == JOINED:
            counts = (COUNT, COUNT, 3 * COUNT, 0)
        phase = (int(DType.FLOAT32), counts, (COUNT,) if value is not None else (), ())
        phases = () if known.collective.open else (phase,)
        terms, digest = int.from_bytes(known.terms, "little"), known.contract.ljust(16, b"\0")
        is_open, description = known.collective.open, number + 10 * rank
        plan = engine.plan(core.ACROSS, 0, WORKER_SEAT, phases, digest, terms, is_open, core.MEETS_NOT, description)
        values = () if value is None else (np.full(COUNT, value, np.float32),)
        job = engine.enqueue(plan, values, (), 0, None)
        engine.advance(1 << 20)
        return job

    def submit_gather(self, rank: int, instance: int, remaining: float = 0.0) -> bool:
        """Have a rank submit over the doorbell; whether that was taken in."""
        number = GATHERS + 10 * rank
        submission = messages.Submit(100, number, instance, remaining, False, ((0, 0),))
        return self.spanning.answer(self.ranks[rank], self.ranks[rank].prepared[number], submission, self.fail)

    def ask(self, rank: int, instance: int) -> bool:
        """Have a rank ask why a sum of its has failed."""
        number = SUMS + 10 * rank
        submission = messages.Submit(100, number, instance, 0.0, False, ())
        return self.spanning.answer(self.ranks[rank], self.ranks[rank].prepared[number], submission, self.fail)

    def submit(self, local_rank: LocalRank, submission: messages.Submit) -> None:
        super().submit(local_rank, submission)
        prepared = local_rank.prepared[submission.prepared]
        progress = self.tracker.progress[local_rank.rank]
        progress.received = submission.instance - 1
        self.tracker.record_arrival(local_rank.rank, submission.instance, Arrival(prepared, None, 0.0), 0.0)

    def complete_gather(self, instance: int) -> None:
        """Have what both ranks have submitted over the doorbell come to its end."""
        known = self.tracker.instances[instance]
        self.tracker.finish(known, time.monotonic())
        self.spanning.finish(known, is_brought=False)

    def map_words(self) -> tuple[mmap.mmap, np.ndarray[Any, np.dtype[np.uint64]]]:
        """The first page of the segment, as a hostile rank may write it."""
        self.watch.offer(self.ranks[0])
        received = [socket.recv_fds(self.ends[0], messages.MAX_MESSAGE, 1)[1] for _ in range(2)]
        memory = mmap.mmap(received[1][0], mmap.PAGESIZE)
        for [descriptor] in received:
            os.close(descriptor)
        return memory, np.frombuffer(memory, np.uint64)

    def fail(self, local_rank: LocalRank, instance: int, verdict: Verdict) -> None:
        self.failed.append((local_rank.rank, instance))

    def take_sums(self, instance: int) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
        """The partial sums of this host; None where not all have come."""
        found = np.zeros(COUNT, np.float32)
        phase = (int(DType.FLOAT32), (COUNT, COUNT, 0), (), (COUNT,))
        engine = self.spanning.seat.engine
        plan = engine.plan(core.ACROSS, 1, WORKER_SEAT, (phase,), bytes(16), 0, False, core.MEETS_NOT, 0)
        return found if engine.gather(plan, instance, (found,)) == core.COMPLETE else None

    def bring(self, instance: int, value: float) -> int:
        """Bring a result."""
        phase = (int(DType.FLOAT32), (COUNT, COUNT, 0), (COUNT,), ())
        engine = self.spanning.seat.engine
        plan = engine.plan(core.ACROSS, 1, WORKER_SEAT, (phase,), bytes(16), 0, False, core.MEETS_NOT, 0)
        return engine.bring(plan, instance, (np.full(COUNT, value, np.float32),), b"")

    def settle(self, fact: Callable[[], bool]) -> None:
        """Let the worker's loop turn until a fact has come about."""
        end = time.monotonic() + 20
        while not fact():
            assert time.monotonic() < end, "it did not come about"
            self.poller.wait(time.monotonic() + 0.05)

    def settle_report(self) -> None:
        """The same until something has been reported."""

        def is_reported() -> bool:
            self.watch.on_timer(time.monotonic())
            return bool(self.reports)

        self.settle(is_reported)

    def arrived(self, instance: int) -> set[int]:
        """Ranks that the worker has seen come."""
        found = self.tracker.instances.get(instance)
        return set(found.arrivals) if found else set()

    def close(self) -> None:
        for engine in self.engines:
            engine.detach()
        self.spanning.close()
        super().close()


@pytest.fixture
def host() -> Iterator[SpanningHost]:
    made = SpanningHost()
    yield made
    made.close()


def test_the_worker_is_woken_when_all_of_its_ranks_have_come_and_brings_what_they_wait_for(
    host: SpanningHost,
) -> None:
    job, out = host.contribute(0, 1.0)
    assert host.take_sums(0) is None
    other, copy = host.contribute(1, 2.0)
    host.settle(lambda: host.arrived(0) == {0, 1})
    sums = host.take_sums(0)
    assert sums is not None and np.all(sums == 3.0) and job.state() == core.PENDING
    assert host.bring(0, 7.0) == core.COMPLETE
    for engine in host.engines:
        engine.advance(1 << 20)
    assert job.state() == other.state() == core.COMPLETE and np.all(out == 7.0) and np.all(copy == 7.0)


def test_one_rank_that_waits_for_the_others_is_known_when_the_worker_looks(host: SpanningHost) -> None:
    host.contribute(1, 2.0)
    host.watch.look()
    assert host.arrived(0) == {1} and host.tracker.progress[0].received == -1


def test_ranks_have_come_in_the_order_in_which_they_did_though_the_worker_looks_later(host: SpanningHost) -> None:
    host.contribute(1, 2.0)
    time.sleep(0.001)
    host.contribute(0, 1.0)
    host.watch.look()
    instance = host.tracker.instances[0]
    assert list(instance.arrivals) == [1, 0]
    assert instance.first_arrival.arrived_at < instance.last_arrival.arrived_at <= time.monotonic()


def test_what_goes_over_the_doorbell_takes_its_turn_after_what_the_segment_shows(host: SpanningHost) -> None:
    assert host.submit_gather(0, 1), "instance 0 is yet to be seen"
    with pytest.raises(messages.MalformedMessage, match="twice"):
        host.submit_gather(0, 1)
    assert not host.submit_gather(0, 0), "its turn is now: the group loop takes it"
    assert not host.submit_gather(0, messages.MAX_OUTSTANDING + 1), "nor is it kept where there would be too many"
    assert host.submitted == []
    host.contribute(0, 1.0)
    host.watch.look()
    assert host.submitted == [(0, 1)]


def test_an_instance_that_was_carried_out_elsewhere_makes_way_for_the_next_in_the_segment(host: SpanningHost) -> None:
    for engine in host.engines:
        assert engine.skip() == 0
    jobs = [host.contribute(rank, 1.0)[0] for rank in range(2)]
    assert host.take_sums(1) is None and all(job.state() == core.PENDING for job in jobs), "0 is open"
    assert not host.submit_gather(0, 0) and not host.submit_gather(1, 0)
    for rank in range(2):
        submission = messages.Submit(100, GATHERS + 10 * rank, 0, 0.0, False, ((0, 0),))
        host.submit(host.ranks[rank], submission)
    host.complete_gather(0)
    for engine in host.engines:
        engine.advance(1 << 20)
    host.settle(lambda: host.arrived(1) == {0, 1})
    sums = host.take_sums(1)
    assert sums is not None and np.all(sums == 2.0)


def test_what_comes_by_the_segment_alone_is_brought_there_if_it_is_small(host: SpanningHost) -> None:
    job = host.come(0, SMALL, 3.0)
    assert host.come(1, COMES).state() == core.PENDING
    host.settle(lambda: host.arrived(0) == {0, 1})
    instance = host.tracker.instances[0]
    assert instance.open_ranks == (1,) and host.spanning.brings(instance)
    assert job.state() == core.PENDING
    large = host.ranks[0].prepared[LARGE]
    instance.describe(large.collective, large.contract)
    instance.reference = host.ranks[1].prepared[COMES + 10]
    assert not host.spanning.brings(instance), "nobody here knows, and it is large"


def test_values_of_ranks_that_have_come_are_taken_where_others_submit_over_the_doorbell(host: SpanningHost) -> None:
    job = host.come(0, SMALL, 3.0)
    other = host.come(1, COMES)
    host.settle(lambda: host.arrived(0) == {0, 1})
    instance = host.tracker.instances[0]
    assert host.spanning.seat.take_values(instance)
    taken = instance.arrivals[0].inputs.contiguous_pack(0)
    assert taken.tobytes() == np.full(COUNT, 3.0, np.float32).tobytes()
    assert instance.arrivals[1].inputs is not None
    host.tracker.finish(instance, time.monotonic())
    host.spanning.finish(instance, is_brought=False)
    for engine in host.engines:
        engine.advance(1 << 20)
    assert job.state() == other.state() == core.BY_DOORBELL, "they hear from their worker what has come"


def test_what_is_small_for_some_and_large_for_others_is_carried_out_over_the_doorbell(host: SpanningHost) -> None:
    """The worker sees at once who comes to the segment, before or after the others submit."""
    for instance, first in enumerate((0, 1)):
        if first == 0:
            job = host.come(0, JOINED, 1.0)
        assert not host.submit_gather(1, instance), "the group loop takes it"
        host.submit(host.ranks[1], messages.Submit(100, GATHERS + 10, instance, 0.0, False, ((0, 0),)))
        if first == 1:
            assert host.arrived(instance) == {1}
            job = host.come(0, JOINED, 1.0)
            host.settle(lambda at=instance: host.arrived(at) == {0, 1})  # type: ignore[misc]
        known = host.tracker.instances[instance]
        assert set(known.arrivals) == {0, 1} and not host.spanning.brings(known)
        known.arrivals[1].inputs = "of the doorbell"
        assert host.spanning.seat.take_values(known)
        assert known.arrivals[0].inputs.contiguous_pack(0).tobytes() == np.full(COUNT, 1.0, np.float32).tobytes()
        host.tracker.finish(known, time.monotonic())
        host.spanning.finish(known, is_brought=False)
        assert host.engines[1].skip() == instance
        host.engines[0].advance(1 << 20)
        assert job.state() == core.BY_DOORBELL


def test_lengths_that_differ_are_not_brought(host: SpanningHost) -> None:
    host.come(0, JOINED, 1.0)
    host.come(1, JOINED, 1.0)
    host.settle(lambda: host.arrived(0) == {0, 1})
    instance = host.tracker.instances[0]
    instance.rows = ((COUNT,), (COUNT,), (COUNT,))
    assert host.spanning.brings(instance)
    instance.rows = ((COUNT,), (COUNT,), (COUNT + 1,))
    assert not host.spanning.brings(instance)


def test_nothing_is_taken_when_the_generation_is_over(host: SpanningHost) -> None:
    host.come(0, SMALL, 3.0)
    host.come(1, SMALL)
    host.settle(lambda: host.arrived(0) == {0, 1})
    host.engines[1].abort(core.ABORTED, 1)
    assert not host.spanning.seat.take_values(host.tracker.instances[0])


def test_who_has_missed_what_the_worker_told_hears_it_again(host: SpanningHost) -> None:
    host.come(0, SMALL, 3.0)
    host.come(1, SMALL)
    host.settle(lambda: host.arrived(0) == {0, 1})
    instance = host.tracker.instances[0]
    host.tracker.finish(instance, time.monotonic())
    submission = messages.Submit(100, SMALL, 0, 0.0, False, ())
    host.ranks[0].record_outcome(0, b"told")
    prepared = host.ranks[0].prepared[SMALL]
    assert not host.spanning.answer(host.ranks[0], prepared, submission, host.fail), "the group loop sends it once more"


def test_a_verdict_ends_what_waits_in_the_segment_and_what_waits_for_its_turn(host: SpanningHost) -> None:
    job, _ = host.contribute(0, 1.0)
    assert host.submit_gather(1, 1) and host.failed == []
    host.watch.apply_verdict(VERDICT)
    host.tracker.apply_verdict(VERDICT)
    assert host.submit_gather(1, 3), "it comes late, and is told at once"
    host.engines[0].advance(1 << 20)
    assert job.state() not in (core.PENDING, core.COMPLETE) and host.failed == [(1, 1), (1, 3)]
    assert host.bring(0, 7.0) not in (core.PENDING, core.COMPLETE), "nothing completes any more"


def test_a_rank_that_is_lost_before_its_value_was_there_has_not_submitted_it(host: SpanningHost) -> None:
    host.contribute(0, 1.0)
    host.watch.lost(1)
    assert host.tracker.progress[1].submitted == -1 and host.tracker.progress[0].submitted == 0


def test_what_a_rank_had_submitted_over_the_doorbell_before_it_was_lost_counts(host: SpanningHost) -> None:
    assert host.submit_gather(0, 1) and host.submitted == []
    host.contribute(0, 1.0)  # which its worker has yet to see
    host.ranks[0].close()
    host.watch.lost(0)
    assert host.submitted == [(0, 1)] and host.tracker.progress[0].submitted == 1


def test_what_a_rank_that_has_left_would_have_submitted_is_forgotten(host: SpanningHost) -> None:
    assert host.submit_gather(0, 2) and host.spanning.has_open(3) and not host.spanning.has_open(2)
    host.tracker.progress[0].has_departed = True
    host.watch.look()
    assert host.submitted == [] and not host.spanning.has_open(3)


def test_a_rank_may_know_before_its_worker_that_a_later_sum_cannot_complete(host: SpanningHost) -> None:
    """Another one has left, say: it asks for the verdict, which is on its way."""
    host.contribute(0, 1.0)
    assert host.ask(0, 1) and host.failed == []
    with pytest.raises(messages.MalformedMessage, match="in shared memory"):
        host.ask(1, 0)  # but of what is open its worker knows as much


def test_the_deadline_of_what_waits_for_its_turn_ends_what_is_open_once(host: SpanningHost) -> None:
    host.contribute(0, 1.0)
    assert host.submit_gather(0, 2, 0.01)
    time.sleep(0.02)
    assert host.watch.next_deadline() <= time.monotonic()
    host.watch.on_timer(time.monotonic())
    host.settle_report()
    [report] = host.reports
    assert (report.kind, report.instance) == (ReportKind.EXPIRED, 0)
    assert host.watch.next_deadline() > time.monotonic(), "the verdict is waited for, not the deadline"


def test_the_worker_notices_at_once_that_a_rank_has_ended_the_generation(host: SpanningHost) -> None:
    for rank in range(2):
        host.contribute(rank, 1.0)
    host.settle(lambda: host.arrived(0) == {0, 1})
    host.tracker.instances[0].started = True
    host.engines[0].abort(core.INTERRUPTED, 0)
    host.settle_report()
    assert [(one.kind, one.rank) for one in host.reports] == [(ReportKind.ABORT, 0)]


@pytest.mark.parametrize("has_said", [False, True], ids=["waits", "has ended it since"])
def test_what_a_rank_has_said_since_its_deadline_goes_before_that_deadline(host: SpanningHost, has_said: bool) -> None:
    """Its worker was stopped, and finds both when it goes on."""
    host.contribute(0, 1.0)
    host.engines[0].abort(core.DEADLINE, 0)
    host.watch.look()
    assert host.reports == [] and host.watch.next_deadline() <= time.monotonic()
    if has_said:
        host.watch.abort(0)
        assert host.watch.next_deadline() > time.monotonic()
    host.watch.on_timer(time.monotonic())
    assert [(one.kind, one.instance) for one in host.reports] == [(ReportKind.EXPIRED, 0)] * (not has_said)


@pytest.mark.parametrize("forged", [7, 1 << 39])
def test_a_word_that_says_what_only_the_worker_can_bring_about_is_a_mismatch(host: SpanningHost, forged: int) -> None:
    memory, words = host.map_words()
    before = words.copy()
    for rank in range(2):
        host.contribute(rank, 1.0)
    host.settle(lambda: host.arrived(0) == {0, 1})
    assert host.bring(0, 7.0) == core.COMPLETE
    [decided] = [place for place in np.flatnonzero(words - before) if words[place] >> np.uint64(24) == 1]
    host.tracker.finish(host.tracker.instances[0], time.monotonic())
    words[decided] = np.uint64(forged << 24)
    host.watch.look()
    host.settle_report()
    [report] = host.reports
    assert (report.kind, report.instance) == (ReportKind.MISMATCH, 1) and "shared memory" in report.text
    del words
    memory.close()


def test_an_instance_that_a_rank_has_not_come_to_after_all_is_stopped_and_reported(host: SpanningHost) -> None:
    host.contribute(0, 1.0)
    assert host.take_sums(0) is None
    host.spanning.on_stopped()
    host.settle_report()
    assert [(one.kind, one.instance) for one in host.reports] == [(ReportKind.MISMATCH, 0)]


def test_who_still_waits_when_the_worker_has_gone_on_to_the_next_generation_asks_why(host: SpanningHost) -> None:
    job, _ = host.contribute(0, 1.0)
    host.spanning.close()
    host.engines[0].advance(1 << 20)
    assert job.state() == core.STOPPED
    host.watch, host.tracker = host.begin(101, 0)
    assert isinstance(host.watch, SpanningWatch)
    host.spanning = host.watch


def test_how_many_wait_to_join_is_read_with_the_sum_though_the_worker_is_ahead(host: SpanningHost) -> None:
    jobs = [host.contribute(rank, 1.0)[0] for rank in range(2)]
    host.settle(lambda: host.arrived(0) == {0, 1})
    host.watch.set_waiting(1)
    assert host.bring(0, 7.0) == core.COMPLETE
    host.tracker.finish(host.tracker.instances[0], time.monotonic())
    host.engines[0].advance(1 << 20)
    for rank in range(2):
        assert host.engines[rank].skip() == 1
        host.submit(host.ranks[rank], messages.Submit(100, GATHERS + 10 * rank, 1, 0.0, False, ((0, 0),)))
    host.watch.set_waiting(2)
    host.complete_gather(1)
    host.engines[1].advance(1 << 20)
    assert [job.waiting() for job in jobs] == [1, 1]


def test_messages_that_ranks_send_and_receive_by_themselves_count_until_the_end(host: SpanningHost) -> None:
    def counted() -> dict[str, tuple[int, int, float]]:
        return {
            op: (sum(total.durations.counts), total.nbytes, total.durations.seconds)
            for (op, algorithm), total in host.counters.totals.items()
            if algorithm == POINT_TO_POINT
        }

    for engine in host.engines:
        engine.count_message(core.SENDS, 100, 500_000_000)
    for _ in range(3):
        host.watch.look()
        assert counted() == {"send": (2, 200, 1.0)}
    host.engines[1].count_message(core.RECEIVES, 100, 250_000_000)
    host.spanning.close()
    assert counted() == {"send": (2, 200, 1.0), "recv": (1, 0, 0.25)}
    successor, _ = host.begin(101, 0)
    assert isinstance(successor, SpanningWatch)
    host.spanning = successor  # which is closed with the host
