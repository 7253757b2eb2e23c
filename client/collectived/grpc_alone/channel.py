"""The way of a rank to a worker with which it shares no memory: every call is one `Submit` over gRPC.

Replies are read in threads of the library's, one per call in flight; callers only ever wait for them.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from time import monotonic

import grpc

from collectived.calls.buffers import ArenaAddress, Description
from collectived.calls.call import Call
from collectived.calls.channel import CONNECT_AGAIN, RankChannel
from collectived.calls.leader_follower import LeaderFollower
from collectived.calls.local_failure import classify_failure
from collectived.calls.prepare import MAX_SIGNATURES
from collectived.calls.rank_state import LocalVerdict
from collectived.calls.timeout import MAX_REASON_LENGTH
from collectived.connection.rpc import WorkerClient
from collectived.connection.rpc_thread import RpcThread
from collectived.errors import CollectiveError
from collectived.grpc_alone.heap import HeapStaging
from collectived.grpc_alone.submission import FixedLayoutResult, IncomingResult, Submission, VariableLayoutResult
from collectived_proto import codec
from collectived_proto.cause import Cause
from collectived_proto.deadline import Deadline
from collectived_proto.error_status import has_status
from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.types import Collective, GroupInfo, Verdict
from collectived_proto.v1 import common_pb2, worker_pb2

_LEAVE_TIMEOUT = 2.0  # seconds in which a worker says what it knows when we leave,
_LEAVE_OVER_TIMEOUT = 0.2  # and where that can be nothing new, for the generation is over
_NEGLIGIBLE = 0.02  # seconds between the caller's call and the worker's clock of it that are not counted


class _FollowersOnly(LeaderFollower):
    """For a channel whose reader is never a caller: callers only follow."""

    def __init__(self, mutex: threading.Lock) -> None:
        super().__init__(mutex)
        self._leader = -1  # no thread's


class GrpcChannel(RankChannel):
    """A rank's way over gRPC.

    Args:
        session: the session's secret name.
        worker: its name, for people.
    """

    _cutoff_ack_timeout = 0.0  # there is no time left, and no need: the worker does not read this process's memory

    def __init__(self, rpc: WorkerClient, session: bytes, group: GroupInfo, rank: int, worker: str) -> None:
        super().__init__(group, rank, worker)
        self._rpc = rpc
        self._session = session
        self._leader_follower = _FollowersOnly(self.mutex)
        self._collectives: dict[int, common_pb2.Collective] = {}  # by the worker's number
        self._latest_abort: RpcThread | None = None

    def describe(self, collective: Collective, deadline: Deadline | None) -> Description:
        """Describe a collective to the worker; a `buffers.Describe`."""
        key, rank = self.rank_state.group.key, self.rank_state.rank
        description = self._rpc.prepare(self._session, key, rank, collective, deadline)
        with self.mutex:
            while len(self._collectives) >= 2 * MAX_SIGNATURES:
                del self._collectives[next(iter(self._collectives))]
            self._collectives[description.id] = codec.collective_to_proto(collective)
        return description

    def _try_submit(self, call: Call, deadline: Deadline | None, addresses: tuple[ArenaAddress, ...]) -> bool:
        """Submissions may overtake each other: the worker goes by their numbers."""
        with self.mutex:
            if self.rank_state.verdict is not None:
                call.end(self.rank_state.verdict)
                return True
            if not self._has_room(call.prepared.is_p2p):
                return False
            self._register(call)
            # Copying its value may have cost all its time, and the verdict still has to come.
            if deadline is not None:
                call.set_deadline(max(deadline.at, min(monotonic(), deadline.at + call.copy_seconds)))
            submission = self._make_submission(call, 0.0 if deadline is None else deadline.to_wire())
        submission.begin()
        return True

    def _make_submission(self, call: Call, remaining: float) -> Submission:
        described = self._collectives[call.prepared.id]
        header = worker_pb2.SubmitHeader(
            session=self._session,
            key=self.rank_state.group.key,
            rank=self.rank_state.rank,
            generation=call.generation,
            instance=call.instance,
            collective=described,
            timeout_seconds=call.timeout if call.timeout - remaining < _NEGLIGIBLE else remaining,
            asked_seconds=call.timeout,
        )
        staging: HeapStaging | None = call.staging
        elsewhere = described.HasField("broadcast") and described.broadcast.root != self.rank_state.rank
        incoming = (FixedLayoutResult if call.prepared.result_spec is None else VariableLayoutResult)(
            call.prepared, described
        )
        return Submission(
            self._rpc.submit,
            header,
            () if staging is None or elsewhere else staging.leaf_bytes,
            partial(self._on_reply, call, incoming),
            partial(self._on_rpc_ended, call, incoming),
        )

    # In threads of the library's

    def _on_reply(self, call: Call, incoming: IncomingResult, reply: worker_pb2.SubmitReply) -> None:
        if reply.HasField("withdrawn"):
            with self.mutex:
                if not call.complete:
                    self._end(call, self.rank_state.make_withdrawal(call, reply.withdrawn))
            return
        if reply.HasField("result"):
            call.waiting = reply.waiting
            if reply.result.HasField("source"):
                call.source = reply.result.source
        try:
            packs = incoming.receive(reply)
            if not packs or incoming.block is None:
                return
            with self.mutex:
                if call.complete:  # given up on, and with it the generation
                    return
                if call.result_buffer is None:
                    call.attach_result(incoming.block)
                call.completed_packs.extend(packs)
                self._leader_follower.wake(call)
        except (ValueError, LookupError) as error:
            raise messages.MalformedMessage(f"{type(error).__name__}: {error}") from error

    def _on_rpc_ended(self, call: Call, incoming: IncomingResult, error: Exception | None) -> None:
        with self.mutex:
            stop = None
            if error is not None:
                stop = self._on_rpc_error(call, error)
            elif not call.complete:
                self._on_rpc_done(call, incoming)
        if stop is not None:
            self._end_generation(stop, self._abort_ack_timeout)
        self.callbacks.dispatch()

    def _on_rpc_error(self, call: Call, error: Exception) -> Verdict | None:
        """Ends a call whose RPC has failed; a verdict, if that means the end of the generation for all."""
        if isinstance(error, messages.MalformedMessage):
            self._mark_lost(f"it sent something unexpected ({error})")
            return None
        if not isinstance(error, (grpc.RpcError, ValueError)):  # of this process: it has no memory, or no thread
            cause, text = classify_failure(error)
            has_ended = self._calls.get(call.instance) is not call  # its number may be a later call's by now
            return None if has_ended else self.rank_state.make_verdict(cause, f"{call.prepared.op}: {text}", call)
        ours = self._rpc.map_error(error)
        if ours.verdict is not None:
            verdict = self.rank_state.parse_verdict(codec.verdict_to_proto(ours.verdict).SerializeToString())
            self.rank_state.apply_verdict(verdict)
            if not call.complete:
                self._end(call, verdict)
        elif call.complete or (ours.code is Code.UNIMPLEMENTED and self._handle_refusal(call, ours)):
            pass  # its number is free again: no rank can do this, so that none is a step ahead
        elif ours.code in (Code.UNIMPLEMENTED, Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED):
            # No other process knows of this call, so calls with later numbers never get their turn.
            return self.rank_state.make_verdict(classify_failure(ours)[0], f"{call.prepared.op}: {ours}", call)
        elif ours.code is Code.INVALID_ARGUMENT:
            text = f"{call.prepared.op}: {self._worker} refuses what it had prepared itself: {ours}"
            return self.rank_state.make_verdict(Cause.DEFECT, text, call)
        else:
            self._mark_lost(str(ours), "" if has_status(error) else CONNECT_AGAIN)
        return None

    def _on_rpc_done(self, call: Call, incoming: IncomingResult) -> None:
        prepared = call.prepared
        if not incoming.has_begun or (prepared.receives and len(call.completed_packs) < prepared.pack_count):
            self._mark_lost(f"it ended {call.prepared.op} before its result had come")
        else:
            self._end(call, None)

    def _handle_refusal(self, call: Call, error: CollectiveError) -> bool:
        """Takes the number of a call back, which ends alone; False where later ones have been given away."""
        standing = self.rank_state
        if call.generation != standing.generation:
            return False
        if call.prepared.is_p2p and standing.next_p2p == call.instance + 1:
            standing.next_p2p = call.instance
        elif not call.prepared.is_p2p and standing.next_instance == call.instance + 1:
            standing.next_instance = call.instance
        else:
            return False
        self._end(call, LocalVerdict.of(standing.make_verdict(Cause.REFUSED, str(error), call, code=error.code)))
        return True

    def _end(self, call: Call, verdict: Verdict | None) -> None:
        """Once more for a call that has ended, but amid whose end something failed."""
        if not call.complete:
            self.rank_state.on_call_ended(call, verdict)
            call.end(verdict)
        self.callbacks.on_call_ended(call)
        del self._calls[call.instance]  # not before: what failed until here still has to end
        self._leader_follower.wake(call)

    def _mark_lost(self, why: str, advice: str = CONNECT_AGAIN) -> None:
        standing, first = self.rank_state, not self._is_lost
        super()._mark_lost(why, advice)
        if first:  # where the worker lives, it reports to the others that this rank is gone
            self._latest_abort = self._rpc.abort(self._session, standing.group.key, standing.rank, why)

    def _check_cutoff(self, call: Call) -> None:
        if not self._is_behind_upload(call):
            super()._check_cutoff(call)
        elif monotonic() >= call.cutoff:  # the worker ends it alone when its turn comes
            call.set_deadline(monotonic())

    def _is_behind_upload(self, call: Call) -> bool:
        """Whether a receive may have to wait for sends before it to be uploaded."""
        if not (call.prepared.is_p2p and call.prepared.receives):
            return False
        earlier = [one for one in list(self._calls.values()) if one.prepared.is_p2p and one.instance < call.instance]
        return any(not one.prepared.receives for one in earlier)

    def _request_cancel(self, call: Call) -> None:
        group = self.rank_state.group
        self._rpc.cancel_receive(self._session, group.key, self.rank_state.rank, call.generation, call.instance)

    def _give_up(self, call: Call, verdict: Verdict) -> None:
        self._end(call, verdict)

    # In the caller's

    def wait_on_stream(self, call: Call) -> bool:
        return False  # no call is launched here before it has ended

    def poll(self) -> None:
        """Nothing to do: replies are taken in as they come."""

    def _end_generation(self, verdict: Verdict, within: float) -> None:
        # Calls in flight were copied when they were submitted: the caller's memory is not read.
        standing = self.rank_state
        with self.mutex:
            over = standing.is_over
            if over and not self._calls:
                return
            if not over:
                standing.apply_verdict(verdict)
            aborted = None
            if not self._is_lost and standing.claim_abort():
                reason, cause = verdict.message[:MAX_REASON_LENGTH], verdict.cause
                aborted = self._rpc.abort(self._session, standing.group.key, standing.rank, reason, cause)
                self._latest_abort = aborted  # before any thread wakes up and leaves
            self._give_up_all(verdict)
        self.callbacks.dispatch()
        if aborted is not None:
            aborted.wait(within)

    def _hear_last_verdict(self) -> None:
        standing = self.rank_state
        if self._latest_abort is not None:  # it must not be overtaken: the others would see that this rank has left
            self._latest_abort.wait(_LEAVE_TIMEOUT)
        within = _LEAVE_OVER_TIMEOUT if standing.is_over and standing.cancel_verdict is None else _LEAVE_TIMEOUT
        with contextlib.suppress(CollectiveError):  # it is gone, and the group is left all the same
            unseen = self._rpc.leave(self._session, standing.group.key, standing.rank, within)
            if unseen is not None and not self._is_lost:
                with self.mutex:
                    standing.apply_verdict(standing.parse_verdict(unseen.SerializeToString()))

    def _close(self) -> None:
        with self.mutex:
            self._is_lost = True
            self._give_up_all(self.rank_state.on_group_left())
        self.callbacks.dispatch()
