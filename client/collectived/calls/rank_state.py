"""Where a rank stands in its group: the generation, the number of the next instance, and the verdict if there is one.

The successor generation begins when its predecessor's verdict is handed to the caller, not when it arrives: that is a
point of the caller's program, so all ranks number alike from there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from collectived.calls.call import Call
from collectived_proto.cause import RANK_FAILURES, Cause
from collectived_proto.errors import (
    CODE_BY_CAUSE,
    Code,
    CollectiveError,
    error_class,
    error_from_verdict,
)
from collectived_proto.ipc import messages
from collectived_proto.types import ANY_SOURCE, GroupInfo, Recv, Verdict

_OWN_CAUSES = (Cause.ABORTED, *RANK_FAILURES)  # verdicts that name this rank, and that the others get


@dataclass(frozen=True, slots=True)
class LocalVerdict(Verdict):
    """The end of calls of this rank alone. Nothing is decided about the group, and errors carry no verdict."""

    @classmethod
    def of(cls, verdict: Verdict) -> LocalVerdict:
        return cls(*(getattr(verdict, field.name) for field in fields(Verdict)))


class RankState:
    """Its owner has a lock."""

    def __init__(self, group: GroupInfo, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.generation = group.generation
        self.next_instance = 0
        self.next_p2p = messages.P2P_BASE
        self.verdict: Verdict | None = None  # of this generation
        self._verdicts: dict[int, Verdict] = {}
        self._reported_generation = 0  # the latest generation whose verdict the caller has been given
        self._own_name = f"rank {rank}"  # the name in verdicts that this rank decided
        self.last_finished = -1  # the last instance that has ended well here
        self.waiting = 0  # how many waited to join when the last collective ended whose result was taken
        self._aborted_generation = 0  # the latest generation that this rank has aborted
        self.interrupted_generation = 0  # the latest generation that Ctrl-C has ended here
        self.cancel_verdict: LocalVerdict | None = None  # ends waiting calls: the session is being closed

    @property
    def is_over(self) -> bool:
        """Whether this generation has failed and the group does not go on in another."""
        return self.verdict is not None and not self.verdict.successor

    @property
    def has_aborted(self) -> bool:
        """Whether this rank has ended this generation itself."""
        return self._aborted_generation == self.generation

    def claim_abort(self) -> bool:
        """Whether the caller must send the worker that this rank aborts this generation. True once."""
        first = not self.has_aborted
        self._aborted_generation = self.generation
        return first

    @property
    def unreported_verdict(self) -> Verdict | None:
        """This generation's verdict if the caller has not been given it."""
        verdict = self.verdict
        if verdict is None or verdict.generation == self._reported_generation or isinstance(verdict, LocalVerdict):
            return None
        is_own = self.cancel_verdict is not None and verdict.cause is Cause.ABORTED and verdict.origin == self.rank
        return None if is_own else verdict

    def parse_verdict(self, serialized: bytes) -> Verdict:
        """A verdict as workers write it, whose members say no more than their rank and what they did last.

        Raises:
            MalformedMessage: it is none.
        """
        # Imported late because it brings protobuf, and `import collectived` is to be quick.
        from google.protobuf.message import DecodeError

        from collectived_proto.codec import verdict_from_proto
        from collectived_proto.v1 import common_pb2

        try:
            verdict = verdict_from_proto(common_pb2.Verdict.FromString(serialized))
        except DecodeError as error:
            raise messages.MalformedMessage(f"a verdict that cannot be read: {error}") from None
        return replace(
            verdict,
            members=self.group.complete(verdict.members),
            missing=self.group.complete(verdict.missing),
            differing=self.group.complete(verdict.differing),
        )

    def apply_verdict(self, verdict: Verdict) -> None:
        """A verdict about this generation, or about one that others have begun before us.

        That a rank has left in order concerns us when we go on to where it is missing: the worker says so then.
        """
        self._verdicts[verdict.generation] = verdict
        ahead = verdict.orderly and verdict.from_instance >= self.next_instance
        if verdict.generation == self.generation and not ahead and not self._known_prevails(verdict):
            self.verdict = verdict

    def _known_prevails(self, verdict: Verdict) -> bool:
        """Whether what is known goes before `verdict`: the first one counts, as it does on the worker.

        A verdict of this rank's own gives way to a verdict of others with the same code: their message says more.
        """
        known = self.verdict
        if known is None or known.orderly or isinstance(known, LocalVerdict):
            return False
        return known.decided_by != self._own_name or known.code != verdict.code

    def on_result_taken(self, call: Call) -> None:
        """The result of a call has been taken.

        Messages show nothing of other ranks: only their two ends know of them.
        """
        if not call.prepared.is_p2p:
            self.waiting = call.waiting

    def on_call_ended(self, call: Call, verdict: Verdict | None) -> None:
        """A call has ended."""
        if verdict is None and call.instance < messages.P2P_BASE and call.generation == self.generation:
            self.last_finished = max(self.last_finished, call.instance)

    def make_cancel_verdict(self, why: str) -> LocalVerdict:
        return LocalVerdict.of(self.make_verdict(Cause.CANCELLED, why))

    def cancel(self, why: str) -> LocalVerdict:
        """Let no call start any more, and return the verdict with which waiting calls are to end."""
        self.cancel_verdict = withdrawn = self.make_cancel_verdict(why)
        if not self.is_over:
            self.verdict = withdrawn
        return withdrawn

    def report_verdict(self, verdict: Verdict, site: str) -> CollectiveError:
        """Give a verdict to the caller: go on in its successor generation, if it has one, and return its error."""
        if isinstance(verdict, LocalVerdict):
            return error_class(verdict.code)(verdict.message, site=site, about=verdict)
        self._reported_generation = verdict.generation
        if verdict.successor and verdict.generation == self.generation:
            self.generation = verdict.successor
            self.next_instance = verdict.next_instance
            self.next_p2p = messages.P2P_BASE
            self.verdict = self._verdicts.get(verdict.successor)
        return error_from_verdict(verdict, site)

    def make_overdue_verdict(self, call: Call, worker: str) -> Verdict:
        """The worker has not answered `call` by its deadline, nor for a while afterwards."""
        message = (
            f"{call.prepared.op} ({call.display_number} of group {self.group.name!r}, "
            f"{call.prepared.site}) did not complete "
            f"within {call.timeout:g} s: {worker} has not answered; it may be stopped or overloaded"
        )
        return self.make_verdict(Cause.DEADLINE, message, call)

    def make_withdrawal(self, call: Call, code: int) -> LocalVerdict:
        """A receive has ended alone, with that code: nothing is decided about the group."""
        operation = call.prepared.collective.operation
        assert isinstance(operation, Recv)
        members = self.group.members
        awaited = members if operation.source == ANY_SOURCE else (members[operation.source],)
        what = f"{call.prepared.op} ({call.display_number} of group {self.group.name!r}, {call.prepared.site})"
        if code == Code.DEADLINE_EXCEEDED:
            cause = Cause.DEADLINE
            who = "no rank has sent anything" if operation.source == ANY_SOURCE else f"{awaited[0]} has sent nothing"
            text = f"{what} did not complete within {call.timeout:g} s: {who} for it; the group goes on"
        else:
            cause, text = Cause.CANCELLED, f"{what} was cancelled before anything came for it; the group goes on"
        return LocalVerdict.of(replace(self.make_verdict(cause, text, call), missing=awaited))

    def next_number(self, post: bool) -> int:
        """The number of the next collective, or send or recv; taken by `take_number`."""
        return self.next_p2p if post else self.next_instance

    def take_number(self, instance: int) -> None:
        """The next number is given away: from here on the call is submitted, or the generation ends."""
        if instance >= messages.P2P_BASE:
            self.next_p2p = instance + 1
        else:
            self.next_instance = instance + 1

    def on_worker_lost(self, message: str, oldest: Call | None) -> Verdict:
        """This rank's worker is gone, and with it what is in flight, of which `oldest` began first.

        If the worker had sent a verdict about this rank's next instance before it ended, that verdict counts. So does a
        verdict of this rank itself: errors of the connection after it may follow from it.
        """
        if self.verdict is not None and self.is_over and self.verdict.decided_by == self._own_name:
            return self.cancel_verdict or self.verdict
        told = self._verdicts.get(self.generation)
        first = self.next_instance if oldest is None or oldest.prepared.is_p2p else oldest.instance
        if told is not None and told.orderly and self.verdict is None and told.from_instance <= first:
            self.verdict = told
            return told
        return self._end_with(self.cancel_verdict or self.make_verdict(Cause.LOST_WORKER, message, oldest))

    def on_group_left(self) -> Verdict:
        """The group has been left: what calls end with from here on."""
        return self._end_with(
            self.cancel_verdict
            or self.make_verdict(Cause.REFUSED, "the group has been left", code=Code.FAILED_PRECONDITION)
        )

    def _end_with(self, verdict: Verdict) -> Verdict:
        if not self.is_over:
            self.apply_verdict(verdict)
        return verdict

    def make_verdict(
        self, cause: Cause, message: str, call: Call | None = None, *, code: Code | None = None
    ) -> Verdict:
        """A verdict of this rank alone, because its worker cannot send one: about `call`, or from the next one on.

        Args:
            code: of a refusal that brings one of its own.
        """
        instance = call.instance if call and not call.prepared.is_p2p else -1
        return Verdict(
            self.group.name,
            self.group.key,
            call.generation if call else self.generation,
            CODE_BY_CAUSE[cause] if code is None else code,
            message,
            from_instance=self.next_instance if instance < 0 else instance,
            instance=instance,
            op=call.prepared.op if call else "",
            missing=(self.group.members[self.rank],) if cause in _OWN_CAUSES and code is None else (),
            decided_by=self._own_name,
            members=self.group.members,
            cause=cause,
            origin=self.rank if cause in _OWN_CAUSES else None,
        )
