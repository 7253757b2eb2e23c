"""The seam between collectives and the ways to a worker: what `Group`, `Work` and `Call` ask of a way.

Shared memory and a doorbell are one way (`doorbell.Doorbell`, `memory.SharedMemory`, `results.MappedResult`). Another
one brings four things, of which `buffers` has the last three:

- a `RankChannel`: takes calls to the worker, passes outcomes to the calls, and messages about the rank to the
rank state;
- a `Describe`, a function: gives a collective that is new to this rank a number and a layout;
- a `StagingArea`: holds the arrays of a call from its submission until the worker has them;
- `ResultBuffer`s: results, laid out as `Layout` says, or, for a `DescribedCall`, behind a result header.

A channel handles a call in these steps: `assign_instance` when it has its number; `attach_result` once, before its
first pack is complete, where the call receives a result; `completed_packs.append` for each complete pack (only once, at
the end, for one that is open); `end` after everything else. It does so under one lock, and then wakes waiting threads
and hands the call to `callbacks.on_call_ended`.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any

from collectived import call_site
from collectived.arguments import escape_surrogates
from collectived.calls.buffers import ArenaAddress
from collectived.calls.call import ALL_PACKS, Call
from collectived.calls.callbacks import Callbacks
from collectived.calls.described_call import DescribedCall
from collectived.calls.device_call import DeviceCall
from collectived.calls.device_rows_call import DeviceRowsCall
from collectived.calls.leader_follower import SIGNAL_CHECK_INTERVAL, LeaderFollower
from collectived.calls.local_failure import classify_failure
from collectived.calls.prepare import PreparedCall
from collectived.calls.rank_state import LocalVerdict, RankState
from collectived.calls.timeout import MAX_REASON_LENGTH
from collectived.errors import DeadlineExceededError, FailedPreconditionError
from collectived.values import nest
from collectived.values.leaves import Array
from collectived_proto.cause import Cause
from collectived_proto.deadline import Deadline
from collectived_proto.errors import CollectiveError
from collectived_proto.ipc import messages
from collectived_proto.types import GroupInfo, Operation, Verdict

log = logging.getLogger("collectived")

ROOM_WARNING_SECONDS = 10.0  # that a call waits for room before that is said
CONNECT_AGAIN = "connect and join again"  # the advice where the worker is lost


NOT_REPEATED = object()


def _most(post: bool) -> int:
    """How many calls of a kind a rank may have in flight."""
    return messages.MAX_P2P_OUTSTANDING if post else messages.MAX_OUTSTANDING


def _never_repeat(operation: Operation, value: Any, out: Any, frame: FrameType | None) -> Any:
    return NOT_REPEATED


class RankChannel(ABC):
    """One rank's way to its worker. Thread-safe: `mutex` guards everything here.

    Attributes:
        repeat: runs a blocking collective of one array again, as the same line of the caller's has done before. Returns
            the result; a tuple for `resume` where that is still to be waited for; NOT_REPEATED where the call has to go
            the long way.
        invalid_reason: why it cannot be used in this process, a forked child; '' where it can.
    """

    _abort_ack_timeout = 0.09  # seconds in which the worker says that it has stopped; Ctrl-C is to be over within 0.1
    _cutoff_ack_timeout: float  # the same after a deadline

    def __init__(self, group: GroupInfo, rank: int, worker: str) -> None:
        self.mutex = threading.Lock()
        self.rank_state = RankState(group, rank)
        self.repeat: Callable[[Operation, Any, Any, FrameType | None], Any] = _never_repeat
        self.callbacks = Callbacks(self.mutex, self._watch)
        self.invalid_reason = ""
        self._worker = worker
        self._leader_follower = LeaderFollower(self.mutex)
        self._calls: dict[int, Call] = {}  # in flight, by instance
        self._is_lost = False

    def check_usable(self) -> None:
        """Raises FailedPreconditionError in a forked child, where everything here belongs to the parent."""
        if self.invalid_reason:
            raise FailedPreconditionError(self.invalid_reason)

    def check_not_over(self, site: str) -> None:
        """Raises the verdict where the generation is over, in the coordinator's words if they have come."""
        if self.rank_state.is_over:
            self.poll()
            if self.rank_state.verdict is not None:
                raise self.report_verdict(self.rank_state.verdict, site)

    def make_call(
        self, prepared: PreparedCall, arrays: list[Array], located: list[ArenaAddress | None] | None, spec: nest.Spec
    ) -> Call:
        """Return a call of a collective, as this channel carries it.

        Args:
            located: where each leaf lies in worker memory; None where no leaf does.
        """
        if prepared.device_area is not None:
            kind = DeviceCall if prepared.result_spec is None else DeviceRowsCall
            return kind(prepared, arrays, located, spec)
        return (Call if prepared.result_spec is None else DescribedCall)(prepared, arrays, located, spec)

    def expect_wait(self, call: Call) -> None:
        """The caller waits for the call at once, and leaves its arrays alone until it has ended."""
        return None

    def submit(self, call: Call, deadline: Deadline | None, addresses: tuple[ArenaAddress, ...]) -> None:
        """Numbers a call and starts it, once there is room; where the generation has failed, ends it with the verdict.

        Where it raises, `call.instance` says whether a number may have been taken: then the generation must end.

        Args:
            deadline: when the seconds that the caller gave it are over.
            addresses: of each leaf, or of the staging slot where the call has one; () for a call without leaves.

        Raises:
            DeadlineExceededError: as many calls as there may be were in flight until its deadline.
        """
        if self._calls or self.rank_state.verdict is not None:
            self._finish_older_calls()
        warning_at = 0.0
        while not self._try_submit(call, deadline, addresses):
            warning_at = warning_at or monotonic() + ROOM_WARNING_SECONDS
            post = call.prepared.is_p2p
            full = f"{_most(post):,} {'sends and receives' if post else 'collectives'} of this rank"
            if deadline is not None and not deadline.remaining():
                raise DeadlineExceededError(f"{full} were in flight until then, which is the most there may be")
            if monotonic() >= warning_at:
                warning_at = math.inf
                text = "%s of group %r waits for room: %s are in flight, which is the most there may be"
                log.warning(text, call.prepared.op, self.rank_state.group.name, full)
            self._wait_for_room(post, math.inf if deadline is None else deadline.at)

    def resume(self, unfinished: Any, operation: Operation, value: Any, out: Any, frame: FrameType | None) -> Call:
        """Wait for what `repeat` has begun; the call, which has ended. Without a frame do not wait."""
        raise NotImplementedError("nothing is begun here")

    def remember(self, call: Call, operation: Operation, value: Any, frame: FrameType) -> None:
        """A call of one array, or of none, has ended well: it may come again.

        Args:
            frame: the one that called the collective; frames of this library may lie between it and the caller's.
        """
        return None

    def take_result(self, call: Call, site: str) -> Any:
        """Return the result of a call that has ended, or raise its verdict."""
        if call.verdict is not None:
            raise self.report_verdict(call.verdict, site, call.is_out_intact)
        self.rank_state.on_result_taken(call)
        return call.take_value()

    @abstractmethod
    def _try_submit(self, call: Call, deadline: Deadline | None, addresses: tuple[ArenaAddress, ...]) -> bool:
        """Does what `submit` says; False, and nothing is done, where as many calls as there may be are in flight."""

    def _has_room(self, post: bool) -> bool:
        """Whether one more call of its kind may be in flight. Under the mutex."""
        most = _most(post)
        return len(self._calls) < most or sum(call.prepared.is_p2p == post for call in self._calls.values()) < most

    def _wait_for_room(self, post: bool, end: float) -> None:
        """Waits until the oldest call of a kind has ended, or a little while, for the session may be closed."""
        with self.mutex:
            oldest = next((call for call in self._calls.values() if call.prepared.is_p2p == post), None)
        if oldest is not None:
            self._wait(oldest, ALL_PACKS, min(end, monotonic() + SIGNAL_CHECK_INTERVAL), lambda _: None)

    def _register(self, call: Call) -> None:
        """Gives a call its number. Under the mutex."""
        self._assign_number(call)  # first: it says that the number may be taken
        self.rank_state.take_number(call.instance)
        self._calls[call.instance] = call

    def _assign_number(self, call: Call) -> None:
        number = self.rank_state.next_number(call.prepared.is_p2p)
        call.assign_instance(self.rank_state.generation, number)

    def _finish_older_calls(self) -> None:
        """Ends calls of an older generation, whose numbers come again: a completion does not say its generation."""
        for call in list(self._calls.values()):
            if call.generation == self.rank_state.generation:  # and so are all that were started after it
                break
            self.wait(call)
        self.poll()

    def fail_generation(self, cause: Cause, message: str, site: str) -> CollectiveError:
        """This rank's worker does not take its next collective: that is the end of the generation.

        Returns the error to raise for that, or for the verdict that ended the generation before and came meanwhile.
        """
        self.poll()
        verdict = self.rank_state.make_verdict(cause, message)
        if not self.rank_state.is_over:
            self._end_generation(verdict, self._cutoff_ack_timeout)
        return self.report_verdict(self.rank_state.verdict or verdict, site)

    def wait(self, call: Call, packs: int = ALL_PACKS, until: float = math.inf) -> None:
        """Returns when the call has ended or that many packs are complete, or at `until` of the monotonic clock.

        Ctrl-C ends the generation for all ranks.
        """
        outer, call.waiter = call.waiter, threading.get_ident()
        try:
            self._wait(call, packs, until, self._cancel_call)
        finally:
            call.waiter = outer

    @abstractmethod
    def wait_on_stream(self, call: Call) -> bool:
        """Makes the caller's streams wait for a call that is launched; False where it has ended, or they cannot."""

    def _wait_until_done(self, call: Call) -> None:
        """Waits for a call that no thread of the caller's waits for: the session is closed when it has ended."""
        self._wait(call, ALL_PACKS, math.inf, lambda _: None)

    def _watch(self, call: Call) -> None:
        """The same in a thread of the library's: where it cannot, the generation ends, and with it the call."""
        try:
            self._wait_until_done(call)
        except Exception as error:
            self._on_own_failure(error)

    def _on_own_failure(self, error: BaseException) -> None:
        """End the generation, because this process failed at a step that is not repeated."""
        verdict = self.rank_state.verdict if self.rank_state.is_over else None
        if verdict is not None and self.rank_state.has_aborted:  # which ends calls that are in flight all the same
            return
        if verdict is None:
            cause, text = Cause.ABORTED, type(error).__name__  # such as SystemExit, out of a handler of a signal
            if isinstance(error, Exception):
                cause, text = classify_failure(error)
            verdict = self.rank_state.make_verdict(cause, text)
        self._end_generation(verdict, self._cutoff_ack_timeout)

    def _wait(self, call: Call, packs: int, until: float, look: Callable[[Call], None]) -> None:
        call.begin_wait(monotonic())
        try:
            while not call.is_ready(packs):
                self.check_usable()
                look(call)
                if not self._lead(call, packs, until, look):
                    self._leader_follower.wait_as_follower(call, packs, min(until, call.cutoff))
                    self._check_cutoff(call)
                if until != math.inf and monotonic() >= until:
                    return
        except KeyboardInterrupt:
            self.on_interrupt()
            raise

    def _lead(self, call: Call, packs: int, until: float, look: Callable[[Call], None]) -> bool:
        """Read for all waiting threads, until the call of `_wait` is ready. False: another thread reads."""
        return False

    def _check_cutoff(self, call: Call) -> None:
        now = monotonic()
        if not call.complete and now >= call.cutoff and call.is_overdue(now):
            self._on_overdue(call)

    def _on_overdue(self, call: Call) -> None:
        """The worker has not ended it in time: ends the generation."""
        verdict = self.rank_state.make_overdue_verdict(call, self._worker)
        self._end_generation(verdict, self._cutoff_ack_timeout)

    @abstractmethod
    def poll(self) -> None:
        """Takes in what has come, without waiting."""

    def on_interrupt(self) -> None:
        """Ctrl-C came in a call: ends the generation for all ranks."""
        self.rank_state.interrupted_generation = self.rank_state.generation
        self.abort(f"interrupted on rank {self.rank_state.rank}")

    def abort_by_error(self, error: BaseException) -> None:
        """End the generation: the others must not be left with an instance that this rank does not know of."""
        if isinstance(error, KeyboardInterrupt):
            self.on_interrupt()
        else:
            self.abort(call_site.describe_error(error, error.__traceback__))

    def report_verdict(self, verdict: Verdict, site: str = "", out_intact: bool = True) -> CollectiveError:
        """Give a verdict to the caller: go on in its successor generation, if it has one, and return its error."""
        with self.mutex:
            error = self.rank_state.report_verdict(verdict, site)
        error.out_intact = out_intact
        return error

    def adopt_verdict(self, verdict: Verdict) -> CollectiveError:
        """Take a verdict about this generation that came another way, and return the error to raise for it."""
        with self.mutex:
            self.rank_state.apply_verdict(verdict)
        return self.report_verdict(self.rank_state.verdict or verdict)

    def abort(self, reason: str) -> None:
        """Ends the generation for all ranks; returns when the worker reads the inputs of calls in flight no more."""
        verdict = self.rank_state.make_verdict(Cause.ABORTED, escape_surrogates(reason[:MAX_REASON_LENGTH]))
        self._end_generation(verdict, self._abort_ack_timeout)

    @abstractmethod
    def _end_generation(self, verdict: Verdict, within: float) -> None:
        """Ends the generation and all calls with a verdict; the worker has so many seconds to say that it stopped."""

    def cancel(self, why: str, aborts: bool) -> None:
        """The session is being closed: calls that a thread waits for end with CancelledError, and none start.

        Waiting threads look up within `SIGNAL_CHECK_INTERVAL` seconds. `aborts`: the generation ends for all ranks,
        because they wait for this rank outside of it, where its leaving would not reach them.
        """
        if aborts:
            self._end_generation(self.rank_state.make_cancel_verdict(why), self._abort_ack_timeout)
        with self.mutex:
            withdrawn = self.rank_state.cancel(why)
            for call in list(self._calls.values()):
                if call.has_awaiter:
                    self._give_up(call, withdrawn)
        self.callbacks.dispatch()

    def cancel_receive(self, call: Call) -> bool:
        """Take a receive back unless a message is there for it; whether that was done."""
        if not call.complete:
            self._request_cancel(call)
            self._await_cancel(call)
        verdict = call.verdict
        return isinstance(verdict, LocalVerdict) and verdict.cause is Cause.CANCELLED

    @abstractmethod
    def _request_cancel(self, call: Call) -> None:
        """Ask for a receive to be taken back unless a message is there for it; it ends either way."""

    def _await_cancel(self, call: Call) -> None:
        """Wait until it is known what has come of that."""
        self.wait(call)

    def _cancel_call(self, call: Call) -> None:
        if self.rank_state.cancel_verdict is not None:
            with self.mutex:
                if not call.complete:
                    self._give_up(call, self.rank_state.cancel_verdict)
            self.callbacks.dispatch()

    @abstractmethod
    def _give_up(self, call: Call, verdict: Verdict) -> None:
        """Ends a call though the worker may still be at it. Under the mutex."""

    def _give_up_all(self, verdict: Verdict) -> None:
        for call in list(self._calls.values()):
            self._give_up(call, verdict)

    def _mark_lost(self, why: str, advice: str = CONNECT_AGAIN) -> None:
        """Under the mutex. `advice` is '' where `why` is the worker's own text, which says what to do."""
        if not self._is_lost:
            self._is_lost = True
            message = "; ".join(filter(None, (f"{self._worker} is lost: {why}", advice)))
            self._give_up_all(self.rank_state.on_worker_lost(message, next(iter(self._calls.values()), None)))

    def leave(self) -> Verdict | None:
        """Waits for what is in flight and says goodbye; returns a verdict that the caller has not seen."""
        try:
            for call in list(self._calls.values()):
                if call.waiter != threading.get_ident():  # else this is a signal's handler, and it goes on after that
                    self._wait_until_done(call)
            self._hear_last_verdict()
            return self.rank_state.unreported_verdict
        finally:
            self._close()

    @abstractmethod
    def _hear_last_verdict(self) -> None:
        """Nothing is in flight, and the group is being left: waits a little for verdicts that are on their way."""

    @abstractmethod
    def _close(self) -> None: ...

    def invalidate_after_fork(self, why: str) -> None:
        """In a forked child: lets go of everything. Takes no lock, for its owner may not exist."""
        self.invalid_reason = why
        self._is_lost = True
