"""Sends and recvs that ranks wait for: when they are reported, and by which verdict they end.

Of ranks that carry messages by themselves these are the ones that have waited for a while: the ranks say which of them
still waits, and which does no more.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.types import ANY_SOURCE, Recv, Send, Verdict
from collectived_runtime.engine.record.counters import POINT_TO_POINT
from collectived_runtime.engine.record.group_records import GroupRecords
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.tracker import OutOfOrder

LAST_MESSAGES_SECONDS = 0.1  # after a verdict


@dataclass(slots=True, eq=False)
class PendingOp:
    """A send or recv that a rank waits for. `peer` is the rank at its other end, or ANY_SOURCE.

    Where `watched`, its rank carries it out by itself.
    """

    rank: int
    number: int
    prepared: PreparedCollective
    peer: int
    deadline: float
    timeout: float
    submitted_at: float
    stall_at: float
    watched: bool = False
    overdue: bool = False  # reported
    stalled: bool = False  # the same

    @property
    def tag(self) -> int:
        operation = self.prepared.collective.operation
        assert isinstance(operation, (Send, Recv))
        return operation.tag

    @property
    def description(self) -> str:
        """`recv(source=0, tag=3) at train.py:8`"""
        site = self.prepared.collective.site
        return f"{self.prepared.op}{f' at {site}' if site else ''}"


class PeerReports(Protocol):
    """Reports about two ranks between which something is wrong: they are named as (rank, peer).

    `peer` is ANY_SOURCE where a receive takes what any rank sends.
    """

    def report_overdue(self, rank: int, peer: int, timeout: float, text: str) -> None: ...

    def report_unclaimed(self, rank: int, peer: int, text: str) -> None: ...

    def report_unanswered(self, rank: int, peer: int, waited: float, text: str) -> None: ...

    def report_if_departed(self, rank: int, peer: int, text: str) -> None: ...

    def mark_worker_gone(self, task: int) -> None: ...


class PendingOps:
    """Of one generation of so many ranks. In the group loop's thread."""

    def __init__(
        self, generation: int, size: int, reports: PeerReports, records: GroupRecords, stall_after: float
    ) -> None:
        self._generation = generation
        self._size = size
        self._reporter = reports
        self._records = records
        self._stall_after = stall_after
        self._pending: dict[tuple[int, int], PendingOp] = {}  # by rank and number
        self._outstanding: Counter[int] = Counter()  # how many of them each rank has
        self._timers: list[tuple[float, int, int]] = []  # a heap: when a post is looked at next, its rank and number
        self._next_reports: dict[tuple[int, int], float] = {}  # by rank and peer, when a stall is reported again
        # The verdict on all of this, and when it is carried out; the same for posts with a rank that has left in order.
        self.final_verdict: tuple[Verdict, float] | None = None
        self._departure_verdicts: dict[int, tuple[Verdict, float]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._pending

    @property
    def posts(self) -> list[PendingOp]:
        """May be read from any thread."""
        return list(self._pending.values())

    def make(self, rank: int, submission: messages.Submit, prepared: PreparedCollective) -> PendingOp:
        """Return what a rank has submitted, as it is kept once it is added.

        Raises:
            OutOfOrder: the rank has too many outstanding.
            MalformedMessage: it is no send or recv.
        """
        mine = self._outstanding[rank]
        if mine >= messages.MAX_P2P_OUTSTANDING:
            number = submission.instance - messages.P2P_BASE
            raise OutOfOrder(f"rank {rank} submitted send or recv {number} with {mine} outstanding")
        match prepared.collective.operation:
            case Send(peer, _) | Recv(peer, _):
                pass
            case other:
                raise messages.MalformedMessage(f"{other} numbered as a send or recv")
        now = time.monotonic()
        deadline = now + submission.remaining if submission.remaining else math.inf
        times = (deadline, submission.timeout, now, now + self._stall_after)
        return PendingOp(rank, submission.instance, prepared, peer, *times, watched=submission.watched)

    def add(self, post: PendingOp) -> None:
        self._pending[post.rank, post.number] = post
        self._outstanding[post.rank] += 1
        self._set_timer(post)

    def find(self, rank: int, number: int) -> PendingOp | None:
        return self._pending.get((rank, number))

    def remove(self, rank: int, number: int) -> PendingOp:
        self._outstanding[rank] -= 1
        return self._pending.pop((rank, number))

    def watch(self, rank: int, submission: messages.Submit, prepared: PreparedCollective) -> Verdict | None:
        """A rank waits for what it carries out by itself; the verdict where that is in vain."""
        if (rank, submission.instance) in self._pending:
            return None
        post = self.make(rank, submission, prepared)
        ending = self.find_verdict(post)
        if ending is not None:
            self.record(post, ending[0])
            return ending[0]
        self.add(post)
        self._reporter.report_if_departed(rank, post.peer, post.description)
        return None

    def drop_watched(self, rank: int) -> None:
        """This rank carries out nothing any more."""
        for post in [post for post in self._pending.values() if post.rank == rank and post.watched]:
            self.remove(rank, post.number)

    def report_departed_peers(self) -> None:
        """Report sends and recvs that wait for ranks that have left."""
        for post in self._pending.values():
            self._reporter.report_if_departed(post.rank, post.peer, post.description)

    # Due reports

    def next_deadline(self) -> float:
        """When `on_timer` or `pop_failed` has something to do; inf where nothing is to come."""
        if not self._pending:
            return math.inf
        while self._timers and self._timers[0][1:] not in self._pending:
            heapq.heappop(self._timers)
        times = [self._timers[0][0] if self._timers else math.inf]
        if self.final_verdict or self._departure_verdicts:
            times += [ending[1] for post in self._pending.values() if (ending := self.find_verdict(post)) is not None]
        return min(times)

    def on_timer(self, now: float) -> list[PendingOp]:
        """Report what has waited for long, and sends beyond their deadline; returns receives whose time is over."""
        expired = []
        while self._timers and self._timers[0][0] <= now:
            post = self._pending.get(heapq.heappop(self._timers)[1:])
            if post is None:
                continue
            if post.deadline <= now and isinstance(post.prepared.collective.operation, Recv):
                expired.append(post)  # it ends alone
                continue
            if post.deadline <= now and not post.overdue:
                post.overdue = True
                self._reporter.report_overdue(post.rank, post.peer, post.timeout, post.description)
            elif post.stall_at <= now:
                self._on_stalled(post, now)
            self._set_timer(post)
        return expired

    def _set_timer(self, post: PendingOp) -> None:
        if len(self._timers) > 2 * len(self._pending) + 64:  # most of them are over
            self._timers = sorted(timer for timer in self._timers if timer[1:] in self._pending)
        due = post.stall_at if post.overdue else min(post.stall_at, post.deadline)
        heapq.heappush(self._timers, (due, post.rank, post.number))

    def _on_stalled(self, post: PendingOp, now: float) -> None:
        """A post has waited long. Of many that wait for one peer only one is reported at a time."""
        waited = now - post.submitted_at
        self._records.counters.stalls += not post.stalled
        post.stalled = True
        post.stall_at = now + max(self._stall_after, waited)  # again after twice the time
        if now >= self._next_reports.get((post.rank, post.peer), 0.0):
            self._next_reports[post.rank, post.peer] = now + self._stall_after
            self._reporter.report_unanswered(post.rank, post.peer, waited, post.description)

    # Verdicts

    def apply_verdict(self, verdict: Verdict, at_once: bool) -> None:
        """Note by what posts end; unless `at_once`, a little later, for messages may still be on their way."""
        had_their_time = at_once or verdict.code == Code.DEADLINE_EXCEEDED
        carried_out = (verdict, time.monotonic() + (0.0 if had_their_time else LAST_MESSAGES_SECONDS))
        if verdict.orderly:
            for member in verdict.missing:
                self._departure_verdicts.setdefault(member.rank, carried_out)
        elif self.final_verdict is None:
            self.final_verdict = carried_out

    def find_verdict(self, post: PendingOp) -> tuple[Verdict, float] | None:
        """The verdict by which a post fails, and when.

        A receive from any rank waits as long as one of the others is there.
        """
        if self.final_verdict or post.peer != ANY_SOURCE or not self._departure_verdicts:
            return self.final_verdict or self._departure_verdicts.get(post.peer)
        gone = self._departure_verdicts
        others = len(gone) - (post.rank in gone)
        return max(gone.values(), key=lambda ending: ending[1]) if 0 < self._size - 1 == others else None

    def pop_failed(self, now: float) -> list[tuple[PendingOp, Verdict]]:
        """Take out what fails by now, and by which verdict; it is recorded."""
        if not self.final_verdict and not self._departure_verdicts:
            return []
        failed = []
        for post in self.posts:
            ending = self.find_verdict(post)
            if ending is not None and ending[1] <= now:
                self.remove(post.rank, post.number)
                self.record(post, ending[0])
                failed.append((post, ending[0]))
        return failed

    def record(self, post: PendingOp, verdict: Verdict | None = None, nbytes: int = 0, code: int = 0) -> None:
        """A post has ended: well, by a verdict, or a receive alone with that code."""
        collective = post.prepared.collective
        nbytes = nbytes or sum(leaf.nbytes for leaf in collective.leaves)
        self._records.recorder.record_point_to_point(self._generation, post, nbytes, verdict, code)
        code = code if verdict is None else verdict.code
        if code:
            self._records.counters.count_failure(collective.operation, POINT_TO_POINT, code)
