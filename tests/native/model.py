"""The protocol of the native core as threads that are stepped in random order, with a misfortune at any step.

Functions bear the names of those of the core (`word.c`, `engine.c`, `watcher_binding.c`), whose order of accesses they
repeat. `World.run` raises `Violation` when a result is not that of its instance, when an instance completes that
somebody had no part in, when the word changes after its last change, or when nobody will ever wake a sleeper;
misfortunes.py compares how survivors have ended. A *fault* leaves one precaution out; test_protocol_model.py shows that
each is then found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.native.machine import WORKER, Machine, Thread, Violation
from tests.native.memory_models import Memory

PENDING, COMPLETE = None, "complete"
NEVER = 1 << 40
PARTS = 3

Wait = tuple[int | None, tuple[int, int], bool, int]  # a seat (None: the word), how far, whether all, of which instance
NOTHING: Wait = (None, (NEVER, 0), False, NEVER)


@dataclass(frozen=True)
class Contract:
    """One collective: whole values take one tick, others `steps`, after a meeting or not; `depth` as in schedule.c."""

    steps: int = 0
    depth: int = 2
    meets: bool = False
    long: frozenset[int] = frozenset()  # seats whose value is not whole, where they meet
    describes: bool = False  # after the meeting it waits for what its caller makes of it

    def is_whole(self, seat: int) -> bool:
        return seat not in self.long if self.meets else not self.steps


@dataclass
class Job:
    contract: Contract
    instance: int
    digest: str = "same"
    stage: str = "queued"
    state: str | None = PENDING
    first: int = 0  # tick of its first step
    base: int = 0
    step: int = 0
    is_described: bool = False
    withdraws: bool = False  # its deadline passes while it is queued


@dataclass
class Engine:
    """What the threads of one seat share without a word in memory: under the lock, or the leader's alone."""

    seat: int
    queue: list[Job] = field(default_factory=list)
    ticks: int = 0
    wait: Wait = NOTHING
    submitted: int = 0


def outcome(decided: tuple[int, Any, str], n: int) -> str | None:
    return COMPLETE if decided[0] > n else decided[2] or PENDING


def full(n: int) -> tuple[int, int]:
    return (n + 1, 0)


class World(Machine):
    """Seats, their engines, and a worker that watches; with several `hosts` the last seat is the worker's."""

    def __init__(
        self,
        seats: int,
        memory: Callable[[dict[Hashable, Any], Random], Memory],
        chance: Random,
        *,
        hosts: bool = False,
        fault: str = "",
    ) -> None:
        initial: dict[Hashable, Any] = {
            "decided": (0, 0, ""),
            "limit": (NEVER, "", None),
            "sleepers": frozenset(),
            "waiting": 0,
        }
        for seat in range(seats):
            initial |= {
                ("progress", seat): (0, 0),
                ("waiters", seat): frozenset(),
                ("bell", seat): 0,
                ("asleep", seat): 0,
            }
            initial |= {("leader", seat): 0, ("followers", seat): 0, ("news", seat): 0, ("mutex", seat): 0}
            initial |= {("missing", seat): None, ("user", seat): 0}
            initial |= {(part, seat, number): None for part in ("input", "result") for number in range(PARTS)}
            initial |= {("record", seat, n, what): None for n in (0, 1) for what in ("instance", "digest", "whole")}
        super().__init__(memory(initial | {("missing", WORKER): None}, chance), chance)
        self.seats, self.hosts, self.fault = seats, hosts, fault
        self.engines = [Engine(seat) for seat in range(seats)]
        self.parts = 2 if fault == "two parts" else PARTS

    # ---- word.c ----

    def ring(self, seat: int) -> Thread:
        yield "change", ("bell", seat), lambda value: value + 1
        yield "wake", ("bell", seat)

    def ring_all(self) -> Thread:
        for seat in range(self.seats):
            yield from self.ring(seat)

    def wake(self, bits: Hashable) -> Thread:
        if not (yield "load_sc", bits):
            return
        for seat in sorted((yield "change", bits, lambda _: frozenset())):
            yield from self.ring(seat)

    def all_published(self, want: tuple[int, int]) -> Thread:
        for seat in range(self.seats - (self.hosts and self.fault == "no gate")):
            if (yield "load_sc", ("progress", seat)) < want:
                return False
        return True

    def all_there(self, n: int) -> Thread:
        partly = False
        for seat in range(self.seats - (self.hosts and self.fault == "no gate")):
            progress = yield "load_sc", ("progress", seat)
            if progress >= full(n):
                continue
            if progress <= (n, 0) or not (yield "load", ("record", seat, n & 1, "whole")):
                return False
            partly = True
        return not partly or (yield from self.all_whole(n))

    def all_whole(self, n: int) -> Thread:
        for seat in range(self.seats):
            if not (yield "load", ("record", seat, n & 1, "whole")):
                return False
        return True

    def find_dispute(self, n: int) -> Thread:
        first = None
        for seat in range(self.seats):
            if (yield "load_sc", ("progress", seat)) <= (n, 0):
                continue
            if (yield "load", ("record", seat, n & 1, "instance")) != n:
                continue
            digest = yield "load", ("record", seat, n & 1, "digest")
            first = first or digest
            if digest != first:
                return seat
        return None

    def end_generation(self, n: int, reason: str, culprit: Any) -> Thread:
        while True:
            was = yield "load_sc", "decided"
            if outcome(was, n) != PENDING or was[0] < n:
                return outcome(was, n)
            expected = (n, 0, "") if self.fault == "waiting forgotten" else was
            if not (yield from self.compare_and_swap("decided", expected, (n, culprit, reason))):
                continue
            if self.fault != "silent verdict":
                yield from self.ring_all()
            return reason

    def compare_and_swap(self, at: Hashable, expected: Any, value: Any) -> Thread:
        return (yield "change", at, lambda was: value if was == expected else was) == expected

    def decide(self, n: int) -> Thread:
        disputed = yield from self.find_dispute(n)
        if disputed is not None:
            return (yield from self.end_generation(n, "MISMATCH", disputed))
        waiting = yield "load", "waiting"
        while True:
            was = yield "load_sc", "decided"
            if outcome(was, n) != PENDING or was[0] < n:
                return outcome(was, n)
            if self.fault == "no compare-and-swap":
                yield "store", "decided", (n + 1, waiting, "")
            elif not (yield from self.compare_and_swap("decided", was, (n + 1, waiting, ""))):
                continue
            yield from self.wake("sleepers")
            return COMPLETE

    def lower_limit(self, n: int, reason: str, culprit: Any) -> Thread:
        yield "change", "limit", lambda was: (n, reason, culprit) if n < was[0] else was

    def apply_limit(self, n: int) -> Thread:
        limit = yield "load", "limit"
        if n >= limit[0] and self.fault != "limit ignored":
            return (yield from self.end_generation(n, limit[1], limit[2]))
        return outcome((yield "load", "decided"), n)

    def expire(self, n: int, decider: Any) -> Thread:
        if (yield from self.all_there(n)):
            return (yield from self.decide(n))
        missing = set()
        for seat in range(self.seats):
            if (yield "load", ("progress", seat)) <= (n, 0):
                missing.add(seat)
        yield "store", ("missing", decider), frozenset(missing)
        return (yield from self.end_generation(n, "DEADLINE", decider))

    # ---- engine.c: one instance ----

    def announce(self, e: Engine, job: Job) -> Thread:
        record = ("record", e.seat, job.instance & 1)
        yield "store", (*record, "instance"), None
        yield "store", (*record, "digest"), job.digest
        yield "store", (*record, "whole"), job.contract.is_whole(e.seat)
        yield "store", (*record, "instance"), job.instance

    def publish(self, e: Engine, progress: tuple[int, int]) -> Thread:
        e.ticks += 1
        if self.fault == "no fence":
            yield "store", ("progress", e.seat), progress
        else:
            yield "change", ("progress", e.seat), lambda _: progress
        yield from self.wake(("waiters", e.seat))

    def put(self, e: Engine, part: str, tick: int, value: Any) -> Thread:
        yield "store_relaxed", (part, e.seat, tick % self.parts), value

    def read(self, part: str, seat: int, tick: int, value: Any) -> Thread:
        found = yield "load_relaxed", (part, seat, tick % self.parts)
        if found != value:
            raise Violation(f"{part} of seat {seat} in tick {tick} is {found}, not {value}")

    def begin(self, e: Engine, job: Job) -> Thread:
        n, contract = job.instance, job.contract
        found = outcome((yield "load", "decided"), n)
        if found == PENDING:
            found = yield from self.apply_limit(n)
        if found != PENDING:
            return (yield from self.finish(e, job, found))
        job.first, job.stage = e.ticks, "steps"
        if self.hosts and e.seat == self.seats - 1 and not (yield from self.pass_gate(e, job)):
            return False
        if contract.is_whole(e.seat):
            yield from self.put(e, "input", e.ticks, (n, e.seat, "whole"))
        if self.fault != "announced late":
            yield from self.announce(e, job)
        if contract.steps and not contract.meets:
            return True
        job.stage = "meeting" if contract.meets else "whole"
        yield from self.publish(e, (n, 1) if contract.meets else full(n))
        if self.fault == "announced late":
            yield from self.announce(e, job)
        if (yield from self.all_there(n)):
            yield from self.decide(n)
        return True

    def pass_gate(self, e: Engine, job: Job) -> Thread:
        """The worker's seat: first all others, then the network."""
        n = job.instance
        job.stage = "queued"
        for seat in range(self.seats - 1):
            if (yield "load_sc", ("progress", seat)) < full(n):
                e.wait = (seat, full(n), False, n)
                return False
            yield from self.read("input", seat, e.ticks, (n, seat, "whole"))
        return True

    def take_whole(self, e: Engine, job: Job) -> Thread:
        for seat in [self.seats - 1] if self.hosts else range(self.seats):
            yield from self.read("input", seat, job.first, (job.instance, seat, "whole"))
        return (yield from self.finish(e, job, COMPLETE))

    def whole(self, e: Engine, job: Job) -> Thread:
        found = outcome((yield "load", "decided"), job.instance)
        if found == PENDING:
            e.wait = (None, (0, 0), False, job.instance)
            return False
        return (yield from (self.take_whole(e, job) if found == COMPLETE else self.finish(e, job, found)))

    def meeting(self, e: Engine, job: Job) -> Thread:
        n = job.instance
        found = outcome((yield "load", "decided"), n)
        if found == PENDING:
            if not (yield from self.all_published((n, 1))):
                e.wait = (None, (n, 1), True, n)
                return False
            if (yield from self.all_whole(n)):
                found = yield from self.decide(n)
            else:
                disputed = yield from self.find_dispute(n)
                if disputed is not None:
                    found = yield from self.end_generation(n, "MISMATCH", disputed)
                else:
                    yield from self.wake("sleepers")  # nobody will decide yet: all go on
        if found not in (PENDING, COMPLETE):
            return (yield from self.finish(e, job, found))
        if job.contract.describes and not job.is_described:
            return (yield from self.ask(e, job))
        if found == COMPLETE:
            return (yield from self.take_whole(e, job))
        job.stage, job.base, job.step, job.first = "steps", 1, 0, e.ticks
        return True

    def step(self, e: Engine, job: Job) -> Thread:
        n, k, depth, base = job.instance, job.step, job.contract.depth, job.base
        steps, last, tick, me = job.contract.steps, job.contract.steps + depth - 1, job.first + k, e.seat
        others = [(me + i) % self.seats for i in range(1, self.seats)]
        if k + base:
            want = full(n) if k == last else (n, base + k)
            for other in others:
                before = outcome((yield "load", "decided"), n) if self.fault != "decided read late" else PENDING
                if (yield "load_sc", ("progress", other)) >= want:
                    continue
                found = outcome((yield "load", "decided"), n) if self.fault == "decided read late" else before
                if found == COMPLETE:
                    raise Violation(f"instance {n} is complete, and seat {other} has not come so far")
                if found != PENDING:
                    return (yield from self.finish(e, job, found))
                e.wait = (other, want, False, n)
                return False
            disputed = (yield from self.find_dispute(n)) if k + base == 1 else None
            if disputed is not None:
                found = yield from self.end_generation(n, "MISMATCH", disputed)
            elif k == last:
                found = yield from self.decide(n)
            else:
                found = outcome((yield "load", "decided"), n)
            if found not in (PENDING, COMPLETE):
                return (yield from self.finish(e, job, found))
        if k < last and self.fault == "published before it is put":
            yield from self.publish(e, full(n) if k + 1 == last else (n, base + k + 1))
        if k < steps:
            yield from self.put(e, "input", tick, (n, me, k))
        if depth == 2 and 0 < k <= steps:
            for seat in range(self.seats):
                yield from self.read("input", seat, tick - 1, (n, seat, k - 1))
            yield from self.put(e, "result", tick, (n, me, k - 1))
        if k < last and self.fault != "published before it is put":
            yield from self.publish(e, full(n) if k + 1 == last else (n, base + k + 1))
        if k >= depth:
            for seat in others:
                yield from self.read("result" if depth == 2 else "input", seat, tick - 1, (n, seat, k - depth))
        job.step += 1
        return (yield from self.finish(e, job, COMPLETE)) if k == last else True

    # ---- engine.c: the queue, leading, waiting ----

    def submit(self, e: Engine, job: Job) -> Thread:
        yield from self.lock(e)
        e.queue.append(job)
        e.submitted += 1
        yield from self.tell(e)
        if (yield "load_sc", ("asleep", e.seat)):
            yield from self.ring(e.seat)

    def lock(self, e: Engine) -> Thread:
        """Take the engine's lock and give it back; what stands until the next access happens under it."""
        yield "change", ("mutex", e.seat), lambda value: value

    def ask(self, e: Engine, job: Job) -> Thread:
        """The caller has to say how it goes on (`DESCRIBE`)."""
        yield from self.lock(e)
        job.state = "describe"
        yield from self.notify(e)
        return False

    def describe(self, e: Engine, job: Job) -> Thread:
        """`engine_resume`."""
        yield from self.lock(e)
        job.is_described, job.state = True, PENDING
        e.submitted += 1
        yield from self.tell(e)
        if self.fault != "resumed unheard" and (yield "load_sc", ("asleep", e.seat)):
            yield from self.ring(e.seat)

    def tell(self, e: Engine) -> Thread:
        yield "change", ("news", e.seat), lambda value: value + 1
        yield "wake", ("news", e.seat)

    def finish(self, e: Engine, job: Job, state: str | None) -> Thread:
        yield from self.lock(e)
        job.state, job.stage = state, "done"
        e.queue.remove(job)
        yield from self.notify(e)
        return True

    def notify(self, e: Engine) -> Thread:
        """A job has ended, or wants to be described: whoever waits for it looks up."""
        if (yield "load_sc", ("followers", e.seat)):
            yield from self.tell(e)
        if (yield "load_sc", ("asleep", e.seat)):
            yield from self.ring(e.seat)

    def advance(self, e: Engine) -> Thread:
        yield from self.lock(e)
        e.wait = NOTHING
        if not e.queue:
            return False
        job = e.queue[0]
        if job.state != PENDING:
            return False
        stages = {"queued": self.begin, "whole": self.whole, "meeting": self.meeting, "steps": self.step}
        return (yield from stages[job.stage](e, job))

    def resign(self, e: Engine) -> Thread:
        yield "change", ("leader", e.seat), lambda _: 0
        if self.fault != "silent resignation" and (yield "load_sc", ("followers", e.seat)):
            yield from self.tell(e)

    def look(self, e: Engine) -> Thread:
        seat, want, everybody, n = e.wait
        found = outcome((yield "load_sc", "decided"), n)
        if seat is not None:
            return found not in (PENDING, COMPLETE) or (yield "load_sc", ("progress", seat)) >= want
        return found != PENDING or (everybody and (yield from self.all_published(want)))

    def look_at_queue(self, e: Engine) -> Thread:
        """A job whose deadline passes while others are before it ends the open instance, and with it the generation."""
        yield from self.lock(e)
        late = next((job for job in e.queue if job.withdraws and job.stage == "queued"), None)
        if late is None or self.chance.random() < (0.3 if late in e.queue[:2] else 0.9):
            return
        if self.fault == "late alone":
            return (yield from self.finish(e, late, "DEADLINE"))
        yield from self.expire((yield "load_sc", "decided")[0], e.seat)

    def look_around(self, e: Engine) -> Thread:
        yield from self.look_at_queue(e)
        yield from self.lock(e)
        if not e.queue or e.queue[0].stage == "queued":
            return
        n = e.queue[0].instance
        if (yield from self.apply_limit(n)) != PENDING:
            return
        if self.fault != "no help" and (yield from self.all_there(n)):
            yield from self.decide(n)
        elif self.fault != "late dispute" and (disputed := (yield from self.find_dispute(n))) is not None:
            yield from self.end_generation(n, "MISMATCH", disputed)
        elif self.worker_gone:
            yield from self.end_generation(n, "WORKER", WORKER)

    def sleep_leading(self, e: Engine, job: Job | None, submitted: int) -> Thread:
        me = e.seat
        rung = yield "load_sc", ("bell", me)
        yield "change", ("asleep", me), lambda value: value + 1
        yield from self.look_around(e)
        bits = "sleepers" if e.wait[0] is None else ("waiters", e.wait[0])
        yield "change", bits, lambda was: was | {me}
        came = self.fault != "no second look" and (yield from self.look(e))
        yield from self.resign(e)
        yield from self.lock(e)
        if (
            not came
            and (e.submitted == submitted or self.fault == "resumed unheard")
            and self.state_of(e, job) == PENDING
        ):
            yield "sleep", ("bell", me), rung
        yield "change", ("asleep", me), lambda value: value - 1

    def state_of(self, e: Engine, job: Job | None) -> str | None:
        return job.state if job else PENDING if e.queue else COMPLETE

    def wait(self, e: Engine, job: Job | None) -> Thread:
        """`engine_wait`; without a job: until the queue is empty, as the engine's own thread does."""
        while self.state_of(e, job) == PENDING:
            if not (yield from self.compare_and_swap(("leader", e.seat), 0, 1)):
                yield from self.follow(e, job)
                continue
            submitted = e.submitted
            moved = True
            while self.state_of(e, job) == PENDING and moved:
                moved = yield from self.advance(e)
            if self.state_of(e, job) != PENDING or (self.chance.random() < 0.3 and (yield from self.look(e))):
                yield from self.resign(e)
            else:
                yield from self.sleep_leading(e, job, submitted)
        yield from self.lock(e)  # its last word is stored under it

    def follow(self, e: Engine, job: Job | None) -> Thread:
        yield "change", ("followers", e.seat), lambda value: value + 1
        heard = yield "load_sc", ("news", e.seat)
        if self.state_of(e, job) == PENDING and (yield "load_sc", ("leader", e.seat)):
            yield "sleep", ("news", e.seat), heard
        yield "change", ("followers", e.seat), lambda value: value - 1

    # ---- Threads ----

    def rank(self, e: Engine, jobs: list[Job], window: int) -> Thread:
        """A program that has up to `window` collectives in flight."""
        begun: list[Job] = []
        for job in jobs:
            if len(begun) >= window:
                yield from self.see_through(e, begun.pop(0))
            begun.append(job)
            yield from self.submit(e, job)
        if window > 1 and begun and self.chance.random() < 0.5:  # it computes meanwhile: its engine's thread drives
            for job in begun:
                if job is begun[0] or job.contract.describes:
                    yield from self.wait(e, job)
                if job.state == "describe":
                    yield from self.describe(e, job)
            yield "sleep", ("user", e.seat), 0
        for job in begun:
            yield from self.see_through(e, job)
        failed = next((job for job in jobs if job.state != COMPLETE), None)
        if failed is None:
            return (len(jobs), "", None, None)
        decided = yield "load", "decided"
        missing = (yield "load", ("missing", decided[1])) if decided[2] == "DEADLINE" else None
        return (decided[0], decided[2], decided[1], missing)

    def see_through(self, e: Engine, job: Job) -> Thread:
        yield from self.wait(e, job)
        while job.state == "describe":
            yield from self.describe(e, job)
            yield from self.wait(e, job)

    def engine_thread(self, e: Engine, jobs: list[Job]) -> Thread:
        while any(job.stage != "done" for job in jobs):
            heard = yield "load_sc", ("news", e.seat)
            yield from self.lock(e)
            if e.queue:
                yield from self.wait(e, None)
            elif any(job.stage != "done" for job in jobs):
                yield "sleep", ("news", e.seat), heard
        yield "change", ("user", e.seat), lambda _: 1
        yield "wake", ("user", e.seat)

    def lost(self, seat: int, reason: str) -> Thread:
        """`watcher.lost`, `watcher.left`: what the seat has published may complete, nothing later."""
        complete = (yield "load_sc", "decided")[0]
        first = (yield "load", ("progress", seat))[0]
        if first == complete and (yield from self.is_whole_there(seat, first)):
            first += 1
        if self.fault != "no help" and (yield from self.all_there(complete)):
            yield from self.decide(complete)
        yield from self.lower_limit(first, reason, seat)
        if self.fault != "no bells":
            yield from self.ring_all()
        complete = (yield "load_sc", "decided")[0]
        if complete >= first:
            yield from self.end_generation(complete, reason, seat)

    def is_whole_there(self, seat: int, n: int) -> Thread:
        """All of the value lies in the first tick, and nobody who has come needs more of this seat (`first_lost`)."""
        for other in range(self.seats):
            if (yield "load_sc", ("progress", other)) <= (n, 0):
                if other == seat:
                    return False
            elif not (yield "load", ("record", other, n & 1, "whole")):
                return False
        return True

    def review(self, seats: frozenset[int], reason: str) -> Thread:
        """What the worker does at every knock while somebody is gone."""
        for seat in sorted(seats):
            yield from self.lost(seat, reason)

    def announce_joiners(self) -> Thread:
        for number in (1, 2, 0, 3):
            yield "store", "waiting", number

    def end_now(self, reason: str) -> Thread:
        while not (decided := (yield "load_sc", "decided"))[2]:
            yield from self.end_generation(decided[0], reason, WORKER)

    def check(self, at: Hashable, before: Any) -> None:
        if at != "decided":
            return
        after = self.memory.latest(at)
        if after != before and before[2]:
            raise Violation(f"the word changed from {before} to {after}")
        if after[0] > before[0]:
            short = [seat for seat in range(self.seats) if self.memory.latest(("progress", seat)) <= (before[0], 0)]
            if short:
                raise Violation(f"instance {before[0]} completed without {short}")

    def ranks(self) -> list[tuple[int, str]]:
        """Threads of ranks, where they are about to take a step; not that of the worker's seat."""
        last = self.seats - self.hosts
        return [one for one in self.threads if isinstance(one, tuple) and one[0] < last and self.has_begun(one)]
