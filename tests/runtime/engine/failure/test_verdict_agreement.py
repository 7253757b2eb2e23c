"""Three workers come to one verdict, however what they decide and what the coordinator says cross."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectived_proto.errors import Code
from collectived_proto.types import Member, Verdict
from collectived_runtime.engine.failure.verdict_agreement import (
    AgreementEffect,
    TakeVerdict,
    TellVerdict,
    VerdictAgreement,
    precedence,
)

WORKERS = range(3)
LISTEN = 3.0  # of which a message takes a third at the most
NEVER = math.inf
MEMBERS = tuple(Member(rank, "CPU:0", rank, f"host{rank}", 70 + rank) for rank in WORKERS)
COORDINATOR = Verdict("train", 7, 100, Code.DEADLINE_EXCEEDED, "the coordinator's", 5, missing=MEMBERS[2:])


def own(worker: int, *missing: int, first: int = 5) -> Verdict:
    named = tuple(MEMBERS[rank] for rank in missing)
    name = f"worker {worker}"
    return replace(COORDINATOR, message=f"of {name}", from_instance=first, missing=named, decided_by=name)


@dataclass
class Network:
    """Workers, and messages that take a given time from each to each. At one time messages come before timers.

    Attributes:
        delays: inf for what never arrives.
        lateness: how much later than asked for timers fire, by worker.
        listen: seconds after which a silent worker is given up.
    """

    delays: dict[tuple[int, int], float]
    lateness: tuple[float, ...] = (0.0,) * len(WORKERS)
    listen: float = LISTEN
    workers: list[VerdictAgreement] = field(init=False)
    taken: list[list[Verdict]] = field(default_factory=lambda: [[] for _ in WORKERS])
    events: list[tuple[float, int, int, int, TellVerdict | None]] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=itertools.count)
    sent: int = 0
    absent: dict[int, int] = field(default_factory=dict)  # ranks of workers that have not come

    def __post_init__(self) -> None:
        self.workers = [VerdictAgreement(self.listen, [w for w in WORKERS if w != worker]) for worker in WORKERS]

    def play(self, decided: dict[int, tuple[float, Verdict]], coordinator: dict[int, float]) -> None:
        """Who decides alone, when and what; and when whom the coordinator's verdict reaches."""
        said = [(at, worker, TellVerdict(verdict, only=worker)) for worker, (at, verdict) in decided.items()]
        said += [(at, worker, TellVerdict(COORDINATOR, only=worker)) for worker, at in coordinator.items()]
        for at, worker, message in said:
            if at != NEVER:
                heapq.heappush(self.events, (at, 0, next(self.order), worker, message))
        own_words = {worker: verdict for worker, (_, verdict) in decided.items()}
        while True:
            now, worker, told = self._next()
            if now == NEVER:
                return
            mind = self.workers[worker]
            if told is None:
                self._carry_out(worker, mind.on_timer(now), now)
            elif told.only != worker:
                improved = self._improve(worker, told.verdict)
                effects = mind.hear_worker(told.only or 0, told.verdict, told.final, now, improved)
                self._carry_out(worker, effects, now)
            elif told.verdict is COORDINATOR:
                self._carry_out(worker, mind.hear_coordinator(told.verdict, now), now)
            elif not self.taken[worker]:  # else it knows already what to tell its ranks
                self._carry_out(worker, mind.decide_alone(own_words[worker], now), now)

    def _improve(self, worker: int, verdict: Verdict) -> Verdict:
        if verdict.orderly or verdict.missing or worker not in self.absent:
            return verdict
        adds = f"{verdict.message}; worker {worker} adds"
        missing = (MEMBERS[self.absent[worker]],)
        return replace(verdict, message=adds, missing=missing, decided_by=f"worker {worker}")

    def _next(self) -> tuple[float, int, TellVerdict | None]:
        at, worker = NEVER, 0
        for timed, mind in enumerate(self.workers):
            if (due := mind.next_deadline + self.lateness[timed]) < at:
                at, worker = due, timed
        if self.events and self.events[0][0] <= at:
            now, _, _, worker, message = heapq.heappop(self.events)
            return now, worker, message
        return at, worker, None

    def _carry_out(self, worker: int, effects: list[AgreementEffect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, TakeVerdict):
                self.taken[worker].append(effect.verdict)
                continue
            for other in WORKERS:
                if other != worker and effect.only in (None, other):
                    self.sent += 1
                    at = now + self.delays[worker, other]
                    if at != NEVER:
                        message = TellVerdict(effect.verdict, effect.final, only=worker)
                        heapq.heappush(self.events, (at, 0, next(self.order), other, message))

    def outcome(self, instance: int, workers: Iterable[int] = WORKERS) -> set[str]:
        """What clients of the workers are told of an instance: with one verdict, one text."""
        covering = [[one for one in self.taken[w] if one.from_instance <= instance] for w in workers]
        return {found[0].message if found else "" for found in covering}


TIMES = (0.0, 0.5, 1.0, 1.5, 2.5, 4.0, NEVER)
REACHED = (0.0, 0.5, 1.5, 4.0, NEVER)
PAIRS = list(itertools.permutations(WORKERS, 2))
SPEEDS = [dict(zip(PAIRS, delays, strict=True)) for delays in itertools.product((0.0, 1.0), repeat=len(PAIRS))]


SECONDS = {"as little": own(1), "better": own(1, 2), "earlier": own(1, 0, first=4)}
SECOND_WORDS = [
    pytest.param(second, late, id=f"{name}-the second decides at {late}")
    for late in TIMES
    for name, second in SECONDS.items()
    if late != NEVER or name == "as little"  # what is never said is the same for all
]


@pytest.mark.parametrize(("second", "late"), SECOND_WORDS)
def test_every_interleaving_of_a_flood_and_the_coordinators_verdict_ends_in_one(second: Verdict, late: float) -> None:
    first = own(0)
    for delays in SPEEDS:
        for reached in itertools.product(REACHED, repeat=len(WORKERS)):
            network = Network(delays)
            network.play({0: (0.0, first), 1: (late, second)}, dict(enumerate(reached)))
            said = network.outcome(5)
            assert len(said) == 1 and "" not in said, (delays, reached)
            assert len(network.outcome(4)) == 1, (delays, reached)


MOMENTS = st.floats(0.0, 8.0)
FIRST = st.sampled_from((4, 5))


@st.composite
def words(draw: st.DrawFn, worker: int) -> tuple[float, Verdict]:
    """When a worker decides alone, and what."""
    named, first, orderly = draw(st.tuples(st.sets(st.sampled_from(WORKERS), max_size=1), FIRST, st.booleans()))
    said = own(worker, *named, first=first)
    if named and orderly:
        said = replace(said, orderly=True, message=f"left, says worker {worker}")
    return draw(MOMENTS), said


@settings(max_examples=500, deadline=None)
@given(
    delays=st.tuples(*[st.floats(0.0, 1000.0)] * len(PAIRS)),
    decided=st.tuples(*[words(worker) for worker in WORKERS]),
    reached=st.tuples(*[MOMENTS | st.just(NEVER)] * len(WORKERS)),
    absent=st.dictionaries(st.sampled_from(WORKERS), st.sampled_from(WORKERS)),
)
def test_three_that_decide_alone_come_to_one_verdict_too(
    delays: tuple[float, ...],
    decided: tuple[tuple[float, Verdict], ...],
    reached: tuple[float, ...],
    absent: dict[int, int],
) -> None:
    """However long messages take: nobody is given up here."""
    network = Network(dict(zip(PAIRS, delays, strict=True)), listen=1e9, absent=absent)
    network.play(dict(enumerate(decided)), dict(enumerate(reached)))
    assert len(network.outcome(5)) == 1 and "" not in network.outcome(5)
    assert len(network.outcome(4)) == 1


MOST = LISTEN / 4  # a message takes, for workers that live to agree where one is dead


@settings(max_examples=500, deadline=None)
@given(
    dead=st.sampled_from(WORKERS),
    delays=st.tuples(*[st.floats(0.0, MOST)] * len(PAIRS)),
    decided=st.tuples(*[words(worker) for worker in WORKERS]),
    reached=st.tuples(*[MOMENTS | st.just(NEVER)] * len(WORKERS)),
)
def test_two_that_live_agree_without_the_third(
    dead: int, delays: tuple[float, ...], decided: tuple[tuple[float, Verdict], ...], reached: tuple[float, ...]
) -> None:
    network = Network({pair: NEVER if dead in pair else delay for pair, delay in zip(PAIRS, delays, strict=True)})
    alive = [worker for worker in WORKERS if worker != dead]
    network.play({worker: decided[worker] for worker in alive}, {worker: reached[worker] for worker in alive})
    assert len(network.outcome(5, alive)) == 1 and "" not in network.outcome(5, alive)
    assert len(network.outcome(4, alive)) == 1


def test_whoever_wakes_late_waits_longer_for_those_who_may_be_as_late() -> None:
    """Messages take as long as a listening: with timers in time nobody would wait for them."""
    slow = dict.fromkeys(PAIRS, LISTEN)
    for late, outcome in [(0.0, {own(0, 2).message, own(1, 0).message}), (LISTEN, {own(1, 0).message})]:
        network = Network(slow, lateness=(late,) * len(WORKERS))
        network.play({0: (0.0, own(0, 2)), 1: (0.1, own(1, 0))}, {})
        assert network.outcome(5) == outcome


def test_what_all_say_alike_counts_at_once() -> None:
    network = Network(dict.fromkeys(PAIRS, 0.25))
    network.play({0: (0.0, own(0, 1))}, {})
    assert network.outcome(5) == {own(0, 1).message}
    words_of_each, told_of_each = 2, 2  # to each of the two others: what is best, and what was taken
    assert network.sent == len(WORKERS) * (words_of_each + told_of_each)
    assert all(mind.next_deadline == NEVER for mind in network.workers)


def test_what_the_coordinator_says_in_time_goes_before_what_a_worker_decides_that_names_nobody() -> None:
    for delays in SPEEDS:
        for first in WORKERS:
            network = Network({pair: max(delay, 0.2) for pair, delay in delays.items()})
            network.play({0: (0.0, own(0))}, {first: 0.1})
            assert network.outcome(5) == {COORDINATOR.message}


@pytest.mark.parametrize("heard", [0.1, LISTEN / 6, LISTEN / 3])
@pytest.mark.parametrize("heard_by", [(0,), (1,), (0, 1)])
def test_whom_the_coordinator_names_in_a_third_of_the_listening_is_named_though_a_worker_is_silent(
    heard: float, heard_by: tuple[int, ...]
) -> None:
    """It asks that worker too before it decides, and so comes just when the others decide alone."""
    for fast in itertools.product((0.0, MOST), repeat=2):
        delays = dict.fromkeys(PAIRS, NEVER) | dict(zip([(0, 1), (1, 0)], fast, strict=True))
        network = Network(delays)
        network.play({0: (0.0, own(0)), 1: (0.0, own(1))}, dict.fromkeys(heard_by, heard))
        assert network.outcome(5, (0, 1)) == {COORDINATOR.message}


def test_what_the_coordinator_says_later_is_passed_on_when_another_verdict_counts() -> None:
    one = VerdictAgreement(LISTEN, [1])
    assert one.decide_alone(own(0, 1), 0.0) == [TellVerdict(own(0, 1))]
    assert one.hear_coordinator(COORDINATOR, LISTEN / 2) == []
    taken = [TakeVerdict(own(0, 1)), TakeVerdict(COORDINATOR)]
    assert one.hear_worker(1, own(0, 1), False, LISTEN / 2) == [TellVerdict(own(0, 1), final=True), *taken]


def test_whoever_hears_of_it_says_what_it_knows_itself() -> None:
    one = VerdictAgreement(LISTEN, [1])
    assert one.hear_worker(1, own(1), False, 0.0, improved=own(0, 0)) == [TellVerdict(own(0, 0))]
    assert one.hear_worker(1, own(0, 0), False, 0.1)[-1] == TakeVerdict(own(0, 0))


def test_the_word_of_the_coordinator_is_not_improved() -> None:
    one = VerdictAgreement(LISTEN, [1])
    improved = replace(own(0, 0), message="and more")
    assert one.hear_worker(1, COORDINATOR, False, 0.0, improved)[:1] == [TellVerdict(COORDINATOR)]


def test_a_fault_and_a_departure_of_one_rank_said_by_one_worker_are_taken_in_one_order() -> None:
    """A worker says that its rank has left, and adds to what another says of a deadline that it has not come."""
    left = replace(own(2, 2), orderly=True, message="left")
    network = Network(dict.fromkeys(PAIRS, 1.0), listen=1e9, absent={2: 2})
    network.play({2: (0.0, left), 0: (0.5, own(0))}, {})
    assert [[one.message for one in taken] for taken in network.taken] == [
        ["left", f"{own(0).message}; worker 2 adds"]
    ] * 3


def test_who_says_it_again_is_told_once_what_counts() -> None:
    one = VerdictAgreement(LISTEN, [1, 2])
    for _ in range(3):  # from a coordinator that was restarted
        assert one.hear_coordinator(COORDINATOR, 0.0) == [TakeVerdict(COORDINATOR)]
    assert one.hear_worker(1, own(1), False, 0.1) == [TellVerdict(COORDINATOR, final=True)]
    assert one.hear_worker(1, own(1), False, 0.2) == [TellVerdict(COORDINATOR, final=True, only=1)]


def test_without_the_coordinator_the_lowest_instance_and_rank_counts() -> None:
    for delays in SPEEDS:
        for words in ([own(0), own(1, 2), own(2, 1)], [own(0, 1), own(1, 0), own(2)]):
            network = Network(delays)
            network.play({worker: (0.0, verdict) for worker, verdict in enumerate(words)}, {})
            assert network.outcome(5) == {min(words, key=precedence).message}


def test_what_clients_have_been_told_goes_before_what_is_said_after_it() -> None:
    early, late = VerdictAgreement(LISTEN, [1, 2]), VerdictAgreement(LISTEN, [0, 1])
    early.decide_alone(own(0, 1), 0.0)
    while early.next_deadline != NEVER:
        effects = early.on_timer(early.next_deadline)
    assert effects == [TellVerdict(own(0, 1), final=True), TakeVerdict(own(0, 1))]
    assert late.decide_alone(own(2, 0), 40.0) == [TellVerdict(own(2, 0))]  # the flood has not reached it
    assert early.hear_worker(2, own(2, 0), False, 41.0) == [TellVerdict(own(0, 1), final=True, only=2)]
    assert TakeVerdict(own(0, 1)) in late.hear_worker(0, own(0, 1), True, 42.0)
    assert late.next_deadline == NEVER


def test_ranks_that_left_are_told_beside_a_fault_in_one_order() -> None:
    left = replace(own(0, 2, first=4), orderly=True, message="left")
    network = Network(dict.fromkeys(PAIRS, 0.5))
    network.play({0: (0.0, left), 1: (0.2, own(1, 0))}, {})
    assert [[one.message for one in taken] for taken in network.taken] == [["left", "of worker 1"]] * len(WORKERS)


def test_a_worker_without_peers_waits_for_nobody() -> None:
    alone = VerdictAgreement(LISTEN, [])
    assert alone.decide_alone(own(0), 0.0) == [TakeVerdict(own(0))] and alone.next_deadline == NEVER


def test_a_fault_that_reaches_further_back_than_what_was_taken_is_settled_anew() -> None:
    network = Network(dict.fromkeys(PAIRS, 0.5))
    network.play({0: (0.0, own(0)), 1: (0.7, own(1, 2, first=3))}, {})
    assert network.outcome(3) == {"of worker 1"} and network.outcome(5) == {"of worker 0"}
