"""The knowledge of the coordinator: workers, groups that form, generations that run, questions that are open.

A *generation* is one complete incarnation of a group. A rank has *departed* when it left, was lost or joined again
elsewhere. *Evidence* is what is known about the ranks at one instance that waits, expired or differs. A generation is
*over* when it has failed or all ranks have departed; the last of these are kept so that late reporters get their
verdict. Everything here is data; it is changed by `membership`, `rendezvous` and `faults`.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from collectived_proto.types import (
    GroupInfo,
    Member,
    Peer,
    RankPosition,
    ReportKind,
    Submission,
    Tier,
    Verdict,
    with_progress,
)
from collectived_proto.version import VersionRange
from collectived_runtime.coordinator.core.events import (
    AbandonedCollective,
    FaultReported,
    JoinAsk,
    LinkMeasured,
    WorkerHello,
)
from collectived_runtime.coordinator.core.timers import Timer
from collectived_runtime.limits.quota_settings import NO_LIMITS, GroupLimits
from collectived_runtime.limits.rejections import Limit

MAX_FAILURES = 64
MAX_FAILURE_MEMBERS = 64  # that each of these names
MAX_FINISHED_GENERATIONS = 256
MAX_FINISHED_BYTES = 4 << 20  # of what is kept of them, but for the latest
_MEMBER_BYTES = 1000  # of a member, its progress and what a verdict says of it, beside their texts
MAX_EVIDENCE = 64
INQUIRY_SECONDS = 0.08  # less than workers wait before they decide alone: what it knows goes before that
REFUSED_INQUIRY_SECONDS = 0.8  # the same where a link cannot be had: a worker that is only busy is not to be blamed
UNNAMED_INQUIRY_SECONDS = 0.8  # the same where ranks differ, and the worker of one that does has not answered yet
INQUIRY_RETRY_SECONDS = 0.01  # while ranks that are still to come decide the majority


@dataclass(slots=True)
class WorkerRecord:
    hello: WorkerHello
    last_seen_at: float
    connected: bool = True
    synced_at: float = -math.inf  # when its heartbeats last left nothing unsaid about where its ranks stand
    draining: bool = False  # it takes no new ranks
    drained: bool = False  # it has reported that nothing runs there any more


@dataclass(slots=True)
class PendingJoin:
    """A rank-to-be that waits for the others."""

    task: int
    ask: JoinAsk
    arrival: int

    @property
    def identity(self) -> Identity:
        return (self.task, self.ask.pid, self.ask.device)

    @property
    def place(self) -> Identity | int:
        """The rank that was asked for, else the process that asked."""
        return self.identity if self.ask.rank is None else self.ask.rank


Identity = tuple[int, int, str]


def identity(member: Member) -> Identity:
    return (member.worker, member.pid, member.device)


@dataclass(slots=True)
class FormingGroup:
    """The generation of a name that is forming; all its ranks asked for the same size."""

    name: str
    min_size: int
    max_size: int
    settle_seconds: float
    since: float
    pending_joins: dict[tuple[int, str], PendingJoin] = field(default_factory=dict)
    joins_by_rank: dict[int, PendingJoin] = field(default_factory=dict)  # by the rank asked for
    previous_ranks: dict[Identity, int] = field(default_factory=dict)  # ranks of the previous generation not here yet
    worker_by_versions: dict[VersionRange, int] = field(default_factory=dict)  # one of those that wait, for each
    rejected: dict[Identity | int, str] = field(default_factory=dict)  # processes that were refused lately; why
    withdrawn: dict[Identity | int, str] = field(default_factory=dict)  # processes that lately stopped waiting; why
    complete_at: float | None = None  # elastic: when the settling ends
    progress_sent_at: float | None = None
    is_progress_armed: bool = False  # a timer for the next progress is armed


class Departure(enum.Enum):
    LEFT = "left"
    LOST = "lost"
    MOVED = "moved"


@dataclass(slots=True)
class ReportedProgress:
    """The position of a rank, and when its report came; `worker`: the one whose heartbeat reported it, or None."""

    position: RankPosition
    received_at: float
    worker: WorkerRecord | None = None

    def age(self, now: float) -> float:
        """Seconds since a heartbeat said so, or that nothing has moved since; 0 for what was reported for a reason."""
        return now - max(self.received_at, self.worker.synced_at) if self.worker else 0.0


@dataclass(slots=True)
class WaitStats:
    """How long a rank has waited for others, as its heartbeats report; `mean`: seconds per collective of late."""

    waits: int = 0
    waited_seconds: float = 0.0
    mean: float = 0.0
    updated_at: float = -math.inf


@dataclass(slots=True)
class Evidence:
    """The knowledge about one instance.

    Attributes:
        warned_after_seconds: of waiting, when all workers were last asked and it was logged.
        warned_of: the missing ranks that the latest warning named.
    """

    since: float
    positions: dict[int, RankPosition] = field(default_factory=dict)
    warned_after_seconds: float = 0.0
    warned_of: list[int] = field(default_factory=list)


@dataclass(slots=True)
class GenerationRecord:
    """The coordinator's record of one generation of a group, until it is over."""

    info: GroupInfo
    peers: tuple[Peer, ...] = ()
    table: tuple[Tier, ...] = ()  # the choices of AUTO
    requests: dict[tuple[int, str], int] = field(default_factory=dict)
    ranks_by_worker: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by task
    progress: dict[int, ReportedProgress] = field(default_factory=dict)
    departed: dict[int, Departure] = field(default_factory=dict)
    verdicts: list[Verdict] = field(
        default_factory=list
    )  # from_instance falls strictly, but for a fault after a departure
    failed: bool = False
    successor: int = 0
    predecessor: int = 0
    first_instance: int = 0  # beyond those of its predecessor
    idle: bool = False  # waiting is normal here: no warnings
    last_instances: tuple[int, ...] = ()  # by rank, what it had finished in an earlier generation; (): nothing known
    waiting_count: int = 0  # processes that wait to join, as the ranks know
    proposal: int = 0  # under way, about the number of newcomers
    drained_from: int | None = None  # it is drained: nothing begins from this instance on
    evidence: dict[int, Evidence] = field(default_factory=dict)
    wait_stats: dict[int, WaitStats] = field(default_factory=dict)  # by rank
    departed_positions: dict[int, dict[int, RankPosition]] = field(
        default_factory=dict
    )  # by instance, of ranks that have gone
    # After a restart of the coordinator: workers that have not come back yet, those that came back without this
    # generation, and what was reported meanwhile.
    awaited_workers: set[int] = field(default_factory=set)
    absent_workers: set[int] = field(default_factory=set)
    deferred_reports: list[FaultReported] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks: dict[int, list[int]] = {}
        for member in self.info.members:
            ranks.setdefault(member.worker, []).append(member.rank)
        self.ranks_by_worker = {task: tuple(ranks[task]) for task in sorted(ranks)}

    @property
    def has_ended(self) -> bool:
        return bool(self.successor) or len(self.departed) == self.info.size

    @property
    def is_over(self) -> bool:
        return self.failed or self.has_ended

    def estimate_bytes(self) -> int:
        """Return what it takes of memory, about."""
        members = self.info.members
        texts = (one.device + one.host + one.label + one.last_op + one.last_site for one in members)
        return len(self.info.name) + sum(map(len, texts)) + _MEMBER_BYTES * len(members)

    def active_ranks(self, task: int) -> tuple[int, ...]:
        """Return the ranks of a worker that have not departed."""
        return tuple(rank for rank in self.ranks_by_worker.get(task, ()) if rank not in self.departed)

    def find_verdict(self, instance: int) -> Verdict | None:
        """The verdict with which an instance fails: the first one that covers it."""
        return next((verdict for verdict in self.verdicts if verdict.from_instance <= instance), None)

    def last_submitted(self, rank: int) -> int:
        standing = self.progress.get(rank)
        return standing.position.submitted if standing else -1

    def last_finished(self, rank: int) -> int:
        standing = self.progress.get(rank)
        return standing.position.finished if standing else -1

    def has_submitted(self, rank: int, instance: int) -> bool:
        """Whether a rank is known to have submitted an instance."""
        evidence = self.evidence.get(instance)
        known = evidence.positions.get(rank) if evidence else None
        return (known is not None and known.arrived) or self.last_submitted(rank) >= instance

    def missing_ranks(self, instance: int) -> list[int]:
        """The ranks that are not known to have submitted an instance."""
        return [rank for rank in range(self.info.size) if not self.has_submitted(rank, instance)]

    def member(self, rank: int, now: float) -> Member:
        """A member with what it is known to have done last."""
        member = self.info.members[rank]
        standing = self.progress.get(rank)
        if standing is None:
            return member
        position = standing.position
        idle = position.idle_seconds + max(0.0, now - standing.received_at)
        return with_progress(member, position.finished, position.last_op, position.last_site, idle, position.stack)

    def members(self, now: float, ranks: Iterable[int] | None = None) -> tuple[Member, ...]:
        chosen = range(self.info.size) if ranks is None else ranks
        return tuple(self.member(rank, now) for rank in chosen)

    def update_progress(
        self,
        task: int,
        instance: int,
        positions: Iterable[RankPosition],
        now: float,
        worker: WorkerRecord | None = None,
    ) -> None:
        """Take over a worker's report about its own ranks. Its words about other ranks are not believed.

        `worker`: where its heartbeat says so, which it does in its own time.
        """
        own = self.ranks_by_worker.get(task, ())
        for position in positions:
            if position.rank not in own:
                continue
            known = self.progress.get(position.rank)
            if known is None or position.submitted >= known.position.submitted:
                self.progress[position.rank] = ReportedProgress(position, now, worker)
            if instance in self.evidence:
                self.evidence[instance].positions[position.rank] = position

    def update_last_submitted(self, rank: int, last: int, now: float) -> None:
        """Take over the last instance that a rank submitted, where its position has not been reported."""
        if self.last_submitted(rank) < last:
            standing = self.progress.get(rank)
            position = standing.position if standing else RankPosition(rank)
            self.progress[rank] = ReportedProgress(replace(position, submitted=last, last_op="", last_site=""), now)

    def record_submissions(self, rank: int, submissions: Iterable[Submission]) -> None:
        """Keep the last submissions of a rank that has gone.

        Its group loop may be gone too when another rank finds out that it differs.
        """
        for one in submissions:
            told = (one.op, one.site, one.contract, one.collective)
            position = RankPosition(rank, one.instance, -1, one.op, one.site, 0.0, True, *told)
            self.departed_positions.setdefault(one.instance, {})[rank] = position
            if one.instance in self.evidence:
                self.evidence[one.instance].positions.setdefault(rank, position)


@dataclass(slots=True)
class Inquiry:
    """A question to the workers of a generation about one instance; ends when all have answered, or in time."""

    query: int
    generation: int
    instance: int
    kind: ReportKind
    pending_workers: set[int]  # those that have not answered
    timeout_seconds: float = 0.0
    text: str = ""
    peer: int = -1  # LINK: the worker whose link broke
    reporter: int = -1  # LINK: the worker at its other end, which says so
    is_refused: bool = False  # LINK: there never was one, and `reporter` does not say that `peer` is gone
    deadline: float = 0.0  # judged then, whatever is known
    is_extended: bool = False  # MISMATCH: the deadline is the second one, or there is to be none
    native_errors: dict[int, str] = field(default_factory=dict)  # messages of NCCL, by worker, in the order of reports


@dataclass(slots=True)
class Proposal:
    """Workers that have not promised yet, and the highest instance of those that have."""

    generation: int
    pending_workers: set[int]
    from_instance: int = 0
    drain: int = 0  # it is about what runs when a drain begins, not about newcomers


@dataclass(slots=True)
class Drain:
    """A drain under way: of workers, or of a group. `pending_workers`: workers that have not reported the outcome."""

    request: int
    target: str
    tasks: list[int]
    timeout_seconds: float
    stay: bool
    group: str = ""
    generations: list[int] = field(default_factory=list)
    undecided_generations: set[int] = field(default_factory=set)  # generations of which it is not known yet what runs
    is_ordered: bool = False
    pending_workers: set[int] = field(default_factory=set)
    abandoned: list[AbandonedCollective] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Measurement:
    """The links of a complete generation that are being measured, (from, to) by task; None: no answer yet."""

    links: dict[tuple[int, int], LinkMeasured | None]


@dataclass(frozen=True, slots=True)
class Failure:
    at: float
    verdict: Verdict


@dataclass(slots=True)
class Counts:
    """The counts of events since this coordinator started. They only grow.

    Attributes:
        heartbeats: of all workers.
        attached: workers that came, or came back. lost: that went without a goodbye, and did not come back.
        granted, refused, withdrawn: joins.
        verdicts: generations that failed, by the code of their first verdict.
        limited: joins that a limit refused, by its name.
    """

    heartbeats: int = 0
    attached: int = 0
    lost: int = 0
    granted: int = 0
    refused: int = 0
    withdrawn: int = 0
    verdicts: dict[int, int] = field(default_factory=dict)
    limited: dict[Limit, int] = field(default_factory=dict)


@dataclass(slots=True)
class Registry:
    epoch: int
    heartbeat_seconds: float
    stall_seconds: float
    tune: bool = False  # whether links are measured
    stored_tables: dict[str, tuple[Tier, ...]] = field(default_factory=dict)  # tables of earlier measurements
    link_secret: str = field(default="", repr=False)  # for links, where the job has no secret
    link_secret_given: bool = False
    measurements: dict[int, Measurement] = field(default_factory=dict)  # by generation, while they go on
    workers: dict[int, WorkerRecord] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    forming: dict[str, FormingGroup] = field(default_factory=dict)
    generations: dict[int, GenerationRecord] = field(default_factory=dict)
    latest_generations: dict[str, int] = field(default_factory=dict)  # name -> the generation that became complete last
    generation_by_join: dict[tuple[int, str], int] = field(default_factory=dict)  # (task, request) -> generation
    finished_generations: dict[int, int] = field(default_factory=dict)  # oldest first: bytes of each, about
    inquiries: dict[int, Inquiry] = field(default_factory=dict)
    proposals: dict[int, Proposal] = field(default_factory=dict)
    drains: dict[int, Drain] = field(default_factory=dict)  # by request
    failures: deque[Failure] = field(default_factory=lambda: deque(maxlen=MAX_FAILURES))
    counter: int = 0
    arrivals: int = 0
    timers: list[tuple[float, int, Timer]] = field(default_factory=list)
    timers_made: int = 0
    counts: Counts = field(default_factory=Counts)
    limits: GroupLimits = NO_LIMITS

    @property
    def worker_timeout(self) -> float:
        """How long a worker may be silent or away before it is lost."""
        return 2 * self.heartbeat_seconds

    def new_id(self) -> int:
        """A key or generation that no coordinator has given before.

        The epoch is milliseconds at start, so a later coordinator starts above all of these as long as this one makes
        fewer than 2^22 of them per millisecond; below 2^63 until the year 2039.
        """
        self.counter += 1
        return (self.epoch << 22) + self.counter

    def add_timer(self, at: float, timer: Timer) -> None:
        self.timers_made += 1
        heapq.heappush(self.timers, (at, self.timers_made, timer))

    def pop_due_timers(self, now: float) -> Iterator[tuple[float, Timer]]:
        """Take the timers whose time has come, earliest first."""
        while self.timers and self.timers[0][0] <= now:
            at, _, timer = heapq.heappop(self.timers)
            yield at, timer

    def get_or_create_key(self, name: str) -> int:
        if name not in self.keys:
            self.keys[name] = self.new_id()
        return self.keys[name]

    def is_connected(self, task: int) -> bool:
        worker = self.workers.get(task)
        return worker is not None and worker.connected

    def get_successor(self, generation: GenerationRecord) -> GenerationRecord | None:
        return self.generations.get(generation.successor) if generation.successor else None

    def retire_if_over(self, generation: GenerationRecord) -> None:
        """Note that a generation may be over, and forget the oldest of those."""
        number, finished = generation.info.generation, self.finished_generations
        if number in finished or not generation.is_over or number not in self.generations:
            return
        finished[number] = latest = generation.estimate_bytes()
        while len(finished) > MAX_FINISHED_GENERATIONS or sum(finished.values()) - latest > MAX_FINISHED_BYTES:
            oldest = next(iter(finished))
            del finished[oldest]
            self._discard_generation(oldest)

    def record_failure(self, verdict: Verdict, now: float) -> None:
        """Keep it for people. For a group with thousands of ranks not each rank is kept with each failure."""
        missing, differing = verdict.missing[:MAX_FAILURE_MEMBERS], verdict.differing[:MAX_FAILURE_MEMBERS]
        members = verdict.members if len(verdict.members) <= MAX_FAILURE_MEMBERS else ()
        shortened = replace(verdict, missing=missing, differing=differing, members=members)
        self.failures.appendleft(Failure(now, shortened))

    def _discard_generation(self, number: int) -> None:
        generation = self.generations.pop(number)
        name = generation.info.name
        for request in generation.requests:
            self.generation_by_join.pop(request, None)
        self.proposals.pop(generation.proposal, None)
        for query in [inquiry.query for inquiry in self.inquiries.values() if inquiry.generation == number]:
            del self.inquiries[query]
        if self.latest_generations.get(name) == number:
            del self.latest_generations[name]
            self.discard_unused_key(name)

    def discard_unused_key(self, name: str) -> None:
        """Where nothing is known of its groups any more its key goes too: the next one of that name gets another."""
        if name not in self.forming and name not in self.latest_generations:
            self.keys.pop(name, None)
