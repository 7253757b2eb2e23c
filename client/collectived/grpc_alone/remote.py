"""The way of a rank to a worker with which it shares no memory: every call is one `Submit` over gRPC.

Replies are read in threads of the library's, one per call in flight; callers only ever wait for them.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic

from collectived.arguments import sendable
from collectived.calls.call import ALL, Call
from collectived.calls.callbacks import Callbacks
from collectived.calls.limit import GRACE, LONGEST_REASON
from collectived.calls.places import Address
from collectived.calls.prepare import MOST
from collectived.calls.standing import Private, Standing
from collectived.calls.turns import Turns
from collectived.connection.rpc import Worker
from collectived.errors import CollectiveError, FailedPreconditionError
from collectived.grpc_alone.heap import Blocks, HeapStaging
from collectived.grpc_alone.incoming import Incoming, LaidOut, Outlined
from collectived.grpc_alone.submission import Submission
from collectived_proto import codec
from collectived_proto.deadline import Deadline
from collectived_proto.errors import Code
from collectived_proto.local import wire
from collectived_proto.types import Collective, GroupInfo, Layout, Verdict
from collectived_proto.v1 import common_pb2, worker_pb2

_STOP_WITHIN = 0.09  # seconds in which a worker says that it has stopped; Ctrl-C is to be over within 0.1
_AT_ONCE = 0.0  # the same after a deadline, for which there is no time left, and no need: nobody reads our memory
_LEAVE_WITHIN = 2.0  # seconds in which a worker says what it knows when we leave,
_LEAVE_OVER_WITHIN = 0.2  # and where that can be nothing new, for the generation is over
_NEGLIGIBLE = 0.02  # seconds between the caller's call and the worker's clock of it that are not counted
# With these a worker says that it has not taken a submission, and that its number is free again. That an argument is
# wrong it says earlier, when the collective is described; InvalidArgumentError tells of what all ranks are told alike.
_REFUSALS = (Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED)


class _Listeners(Turns):
    """Somebody else always reads: callers only follow."""

    def __init__(self, mutex: threading.Lock) -> None:
        super().__init__(mutex)
        self._leader = -1  # no thread's


class Remote:
    """A `Route` over gRPC. `mutex` guards everything here.

    Args:
        session: the session's secret name.
        worker: its name, for people.
    """

    def __init__(self, rpc: Worker, session: bytes, group: GroupInfo, rank: int, worker: str) -> None:
        self.mutex = threading.Lock()
        self.standing = Standing(group, rank)
        self.callbacks = Callbacks(self.mutex, self._finish)
        self.severed = ""
        self._rpc = rpc
        self._session = session
        self._worker = worker
        self._turns = _Listeners(self.mutex)
        self._calls: dict[int, Call] = {}  # in flight, by instance
        self._described: dict[int, common_pb2.Collective] = {}  # by the worker's number
        self._blocks = Blocks()
        self._lost = False

    def describe(self, collective: Collective, deadline: Deadline | None) -> tuple[int, Layout]:
        """A number and a layout for a collective; a `route.Describe`."""
        key, rank = self.standing.group.key, self.standing.rank
        number, layout = self._rpc.prepare(self._session, key, rank, collective, deadline)
        with self.mutex:
            while len(self._described) >= 2 * MOST:
                del self._described[next(iter(self._described))]
            self._described[number] = codec.collective_to_proto(collective)
        return number, layout

    def check(self) -> None:
        if self.severed:
            raise FailedPreconditionError(self.severed)

    def check_goes_on(self, site: str) -> None:
        if self.standing.over and self.standing.verdict is not None:
            raise self.error(self.standing.verdict, site)

    def ring(self, call: Call, timeout: float, remaining: float, addresses: tuple[Address, ...]) -> None:
        """See `Route`. Submissions may overtake each other on their way: the worker goes by their numbers."""
        standing = self.standing
        for other in list(self._calls.values()):  # of an older generation, whose numbers come again
            if other.generation != standing.generation:
                self.wait(other)
        with self.mutex:
            if standing.verdict is not None:
                call.end(standing.verdict)
                return
            post = call.prepared.post
            instance = standing.number(post, sum(other.prepared.post == post for other in self._calls.values()))
            call.start(standing.generation, instance)
            # Copying its value may have cost all its time, and the verdict still has to come.
            call.cut = max(call.cut, min(monotonic() + GRACE, call.cut + call.copied))
            self._calls[instance] = call
            submission = self._submission(call, timeout, remaining)
        submission.begin()

    def _submission(self, call: Call, timeout: float, remaining: float) -> Submission:
        described = self._described[call.prepared.id]
        header = worker_pb2.SubmitHeader(
            session=self._session,
            key=self.standing.group.key,
            rank=self.standing.rank,
            generation=call.generation,
            instance=call.instance,
            collective=described,
            timeout_seconds=timeout if timeout - remaining < _NEGLIGIBLE else remaining,
            asked_seconds=timeout,
        )
        staging: HeapStaging | None = call.staging
        elsewhere = described.HasField("broadcast") and described.broadcast.root != self.standing.rank
        incoming = (LaidOut if call.prepared.form is None else Outlined)(call.prepared, described, self._blocks.take)
        return Submission(
            self._rpc.submit,
            header,
            () if staging is None or elsewhere else staging.parts,
            partial(self._heard, call, incoming),
            partial(self._ended, call, incoming),
        )

    # In threads of the library's

    def _heard(self, call: Call, incoming: Incoming, reply: worker_pb2.SubmitReply) -> None:
        if reply.HasField("result"):
            call.waiting = reply.waiting
        try:
            packs = incoming.take(reply)
            if not packs or incoming.block is None:
                return
            with self.mutex:
                if call.complete:  # given up on, and with it the generation
                    return
                if call.slot is None:
                    call.receive(incoming.block)
                call.packs.extend(packs)
                self._turns.wake(call)
        except (ValueError, LookupError) as error:
            raise wire.Malformed(f"{type(error).__name__}: {error}") from error

    def _ended(self, call: Call, incoming: Incoming, error: Exception | None) -> None:
        with self.mutex:
            stop = None
            if error is not None:
                stop = self._failed(call, error)
            elif not call.complete:
                self._done(call, incoming)
        if stop is not None:
            self._stop(stop)
        self.callbacks.call_back()

    def _failed(self, call: Call, error: Exception) -> Verdict | None:
        """Ends a call whose RPC has failed; a verdict, if that means the end of the generation for all."""
        if isinstance(error, wire.Malformed):
            self._lose(f"it sent something unexpected ({error})")
            return None
        ours = self._rpc.ours(error)
        if ours.verdict is not None:
            verdict = self.standing.read(codec.verdict_to_proto(ours.verdict).SerializeToString())
            self.standing.decided(verdict)
            if not call.complete:
                self._end(call, verdict)
        elif call.complete or (ours.code in _REFUSALS and self._refused(call, ours)):
            pass
        elif ours.code in (*_REFUSALS, Code.DEADLINE_EXCEEDED):
            # Nobody else knows of this call, and what is numbered after it has no turn.
            return self.standing.own_verdict(ours.code, f"{call.prepared.op}: {ours}", call)
        elif ours.code is Code.INVALID_ARGUMENT:
            text = f"{call.prepared.op}: {self._worker} refuses what it had prepared itself: {ours}"
            return self.standing.own_verdict(Code.INTERNAL, text, call)
        else:
            self._lose(str(ours))
        return None

    def _done(self, call: Call, incoming: Incoming) -> None:
        prepared = call.prepared
        if not incoming.begun or (prepared.receives and len(call.packs) < prepared.packs):
            self._lose(f"it ended {call.prepared.op} before its result had come")
        else:
            self._end(call, None)

    def _refused(self, call: Call, error: CollectiveError) -> bool:
        """Takes the number of a call back, which ends alone; False where later ones have been given away."""
        standing = self.standing
        if call.generation != standing.generation:
            return False
        if call.prepared.post and standing.next_post == call.instance + 1:
            standing.next_post = call.instance
        elif not call.prepared.post and standing.next_instance == call.instance + 1:
            standing.next_instance = call.instance
        else:
            return False
        self._end(call, Private.of(standing.own_verdict(error.code, str(error), call)))
        return True

    def _end(self, call: Call, verdict: Verdict | None) -> None:
        del self._calls[call.instance]
        self.standing.ended(call, verdict)
        call.end(verdict)
        self._turns.wake(call)
        self.callbacks.ended(call)

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._end_all(self.standing.lost(self._worker, why, next(iter(self._calls.values()), None)))

    def _end_all(self, verdict: Verdict) -> None:
        for call in list(self._calls.values()):
            self._end(call, verdict)

    # In the caller's

    def wait(self, call: Call, packs: int = ALL, until: float = math.inf) -> None:
        """See `Route`. Ctrl-C ends the generation for all ranks."""
        self._wait(call, packs, until, self._withdraw)

    def order(self, call: Call) -> bool:
        """See `Route`: no call is launched here before it has ended."""
        return False

    def _finish(self, call: Call) -> None:
        """Waits for a call that no thread of the caller's waits for: the session is closed when it has ended."""
        self._wait(call, ALL, math.inf, lambda _: None)

    def _withdraw(self, call: Call) -> None:
        if self.standing.withdrawn is not None:
            with self.mutex:
                if not call.complete:
                    self._end(call, self.standing.withdrawn)
            self.callbacks.call_back()

    def withdraw(self, why: str) -> None:
        """See `Route`. Who waits looks up within `LOOK_UP` seconds."""
        with self.mutex:
            withdrawn = self.standing.withdraw(why)
            for call in list(self._calls.values()):
                if call.awaited:
                    self._end(call, withdrawn)
        self.callbacks.call_back()

    def _wait(self, call: Call, packs: int, until: float, look: Callable[[Call], None]) -> None:
        try:
            while not call.ready(packs):
                self.check()
                look(call)
                self._turns.follow(call, packs, min(until, call.cut))
                if not call.complete and monotonic() >= call.cut:
                    self._stop(self.standing.overdue(call, self._worker), _AT_ONCE)
                if until != math.inf and monotonic() >= until:
                    return
        except KeyboardInterrupt:
            self.interrupted()
            raise

    def glance(self) -> None:
        """What has come has been taken in already."""

    def interrupted(self) -> None:
        self.abort(f"interrupted on rank {self.standing.rank}")

    def error(self, verdict: Verdict, site: str = "") -> CollectiveError:
        with self.mutex:
            return self.standing.error(verdict, site)

    def give_up(self, code: Code, message: str, site: str) -> CollectiveError:
        """See `Route`."""
        verdict = self.standing.own_verdict(code, message)
        if not self.standing.over:
            self._stop(verdict, _AT_ONCE)
        return self.error(self.standing.verdict or verdict, site)

    def abort(self, reason: str) -> None:
        """See `Route`. What is in flight was copied when it was submitted: nobody reads the caller's memory."""
        self._stop(self.standing.own_verdict(Code.ABORTED, sendable(reason[:LONGEST_REASON])))

    def _stop(self, verdict: Verdict, within: float = _STOP_WITHIN) -> None:
        standing = self.standing
        with self.mutex:
            over = standing.over
            if over and not self._calls:
                return
            if not over:
                standing.decided(verdict)
            told = not self._lost and standing.abort_once()
            self._end_all(verdict)
        self.callbacks.call_back()
        if told:
            aborted = self._rpc.abort(self._session, standing.group.key, standing.rank, verdict.message)
            with contextlib.suppress(queue.Empty, CollectiveError):
                aborted.next(within)

    def leave(self) -> Verdict | None:
        standing = self.standing
        try:
            for call in list(self._calls.values()):
                self._finish(call)
            within = _LEAVE_OVER_WITHIN if standing.over and standing.withdrawn is None else _LEAVE_WITHIN
            with contextlib.suppress(CollectiveError):  # it is gone, and the group is left all the same
                unseen = self._rpc.leave(self._session, standing.group.key, standing.rank, within)
                if unseen is not None and not self._lost:
                    with self.mutex:
                        standing.decided(standing.read(unseen.SerializeToString()))
            return standing.unseen
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        with self.mutex:
            self._lost = True
            self._end_all(self.standing.left())
            self._blocks.forget()
        self.callbacks.call_back()

    def sever(self, why: str) -> None:
        self.severed = why
        self._lost = True
        self._blocks.forget()
