"""The client's end of a doorbell: submissions go out, completions come in.

There is no reader thread: messages stay in the socket until a thread waits for a call, or submits one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic

from collectived.calls.buffers import ArenaAddress
from collectived.calls.call import ALL_PACKS, Call
from collectived.calls.channel import CONNECT_AGAIN, RankChannel
from collectived.calls.leader_follower import SIGNAL_CHECK_INTERVAL
from collectived.calls.local_failure import descriptor_lost
from collectived.calls.prepare import PreparedCall
from collectived.calls.timeout import MAX_REASON_LENGTH
from collectived.errors import UnavailableError
from collectived.gpu.driver import CudaError, get_cuda
from collectived.shared import seqpacket
from collectived.shared.in_flight import InFlightCalls, PingReply
from collectived.values import nest
from collectived.values.leaves import Array
from collectived_native.cores import count_cores
from collectived_proto.cause import Cause
from collectived_proto.deadline import Deadline
from collectived_proto.ipc import messages
from collectived_proto.ipc.spin import AdaptiveSpin
from collectived_proto.types import GroupInfo, Verdict

log = logging.getLogger("collectived")

PING_INTERVAL = 5.0  # seconds of silence after which the worker is asked whether it lives, and again until it is lost
_SEND_TIMEOUT = 10.0  # seconds in which a worker makes room for a message
# Without the descriptor messages, or large values, go by the workers.
_DISPENSABLE = (messages.MessageType.RANK_LINK, messages.MessageType.CARRIER)
_HUNG_UP = "it has closed the connection"
_NEVER_HEARD = f"{_HUNG_UP} before its first message: it has ended, or this process took more than 10 s to connect"
_LEAVE_TIMEOUT = 1.0  # seconds in which a worker says what it knows when we leave, and gives back memory


class Doorbell(RankChannel):
    """One rank's doorbell. The socket's read side is the leader's alone, not guarded by `mutex`."""

    _cutoff_ack_timeout = 0.02  # with GRACE within the promised 0.25

    def __init__(self, sock: socket.socket, group: GroupInfo, rank: int, worker: str) -> None:
        super().__init__(group, rank, worker)
        self._submit_lock = threading.Lock()  # over numbering and sending; taken before `mutex`
        self._socket = sock
        self._in_flight = InFlightCalls(self._calls, self.rank_state, self._leader_follower, self.callbacks)
        self._worker_count = len({member.worker for member in group.members})
        near = sum(member.host == group.members[rank].host for member in group.members)
        self._can_spin = count_cores() > near + 1  # as many ranks as look leave cores for the others, and for workers
        self._spin = AdaptiveSpin()
        self._buffer = bytearray(messages.MAX_MESSAGE)
        self._events: dict[int, int] = {}  # of a GPU
        self._worker_events: dict[int, int] = {}  # those of the worker
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._last_received = self._last_pinged = 0.0
        self._has_heard = False  # anything

    def make_call(
        self, prepared: PreparedCall, arrays: list[Array], located: list[ArenaAddress | None] | None, spec: nest.Spec
    ) -> Call:
        omitted = not prepared.contributes and prepared.device_area is None
        return super().make_call(prepared, [] if omitted else arrays, located, spec)

    def expect_wait(self, call: Call) -> None:
        call.keep_own_value(self.rank_state.generation)
        # Among more than two workers some may differ, and refuse the call, when parts of it have come.
        call.request_parts(are_sound=call.out is None or self._worker_count <= 2)

    def _try_submit(self, call: Call, deadline: Deadline | None, addresses: tuple[ArenaAddress, ...]) -> bool:
        with self._submit_lock:  # numbers are given under the lock under which they are sent
            with self.mutex:
                standing = self.rank_state
                if standing.verdict is not None:
                    call.end(standing.verdict)
                    return True
                if not self._has_room(call.prepared.is_p2p):
                    return False
                self._last_received = monotonic()
                event, preceding = self._record_input_event(call) if call.has_input_event else (0, ())
                self._register(call)
                message = self._encode_submit(call, event, deadline, addresses)
                sent = not preceding and seqpacket.send(self._socket, message, 0.0)
            if not sent:  # the worker is behind, or gone: other threads may read messages meanwhile
                sent = all(self._send(one, call) for one in (*preceding, message))
        if not sent:
            self.poll()  # a worker that has ended in order has said why before
            with self.mutex:
                self._mark_lost("it takes no more messages")
            self.callbacks.dispatch()
        return True

    def _encode_submit(
        self, call: Call, event: int, deadline: Deadline | None, addresses: tuple[ArenaAddress, ...]
    ) -> bytes:
        submit = messages.Submit(
            call.generation,
            call.prepared.id,
            call.instance,
            0.0 if deadline is None else deadline.to_wire(),
            call.staging is not None,
            addresses,
            self._in_flight.results.pop_released(),
            call.timeout,
            call.output,
        )
        if lending := call.begin_lending():
            submit = submit._replace(lending=lending)
        if call.own_value is not None:
            submit = submit._replace(keeps_own=True)
        if call.takes_parts:
            submit = submit._replace(takes_parts=True)
        if call.is_stream_ordered:
            submit = submit._replace(ordered=True)
        if call.has_input_event:
            submit = submit._replace(event=event)
        return submit.encode()

    def _send(self, message: bytes, call: Call) -> bool:
        return seqpacket.send(self._socket, message, min(_SEND_TIMEOUT, max(0.0, call.patience_end - monotonic())))

    def _record_input_event(self, call: Call) -> tuple[int, tuple[bytes, ...]]:
        """The number of its event, of which as many serve in turn as there may be calls in flight.

        Returns too the messages that the worker must get before.

        Raises:
            UnavailableError: the driver refuses; the call has taken no number.
        """
        number = self.rank_state.next_number(call.prepared.is_p2p) % messages.MAX_OUTSTANDING + 1
        try:
            handle = call.record_input_event(number, self._events)
        except CudaError as error:
            why = f"its value cannot be waited for: {error}"
            verdict = self.rank_state.make_verdict(Cause.REFUSED, why)
            call.end(verdict, retire=True)  # copies may be under way
            raise UnavailableError(why) from error
        return number, (messages.encode_event(number, handle),) if handle else ()

    def wait_on_stream(self, call: Call) -> bool:
        launched = call.launched
        if launched is None:
            return False
        try:
            if launched.event not in self._worker_events:  # the driver may take its time, so not under the mutex
                event = call.open_event(launched.handle)
                if self._worker_events.setdefault(launched.event, event) != event:  # another thread was quicker
                    get_cuda().destroy_event(event)
            with self.mutex:
                if call.launched is None:
                    return False
                return call.wait_event(self._worker_events[launched.event])
        except CudaError as error:
            log.warning("streams cannot wait for %s: %s; its result is waited for", self._worker, error)
            return False

    def _lead(self, call: Call, packs: int, until: float, look: Callable[[Call], None]) -> bool:
        return self._leader_follower.lead(partial(self._read_until, call, packs, until, look))

    def _read_until(self, call: Call, packs: int, until: float, look: Callable[[Call], None]) -> None:
        self._send_released()
        while not call.is_ready(packs):
            end = min(until, call.cutoff if call.cutoff != math.inf else self._next_ping())
            left = min(SIGNAL_CHECK_INTERVAL, max(0.0, end - monotonic()))
            if (self._can_spin and self._spin.poll(self._poller, left)) or self._poller.poll(left * 1000.0):
                self._read()
                call.take_parts()
                continue
            now = monotonic()
            look(call)
            if call.cutoff != math.inf:
                self._check_cutoff(call)
            elif now >= self._next_ping():
                self._ping()
            if now >= until:
                return

    def _check_cutoff(self, call: Call) -> None:
        super()._check_cutoff(call)
        if call.is_patience_ending and call.probe is None and not call.complete:
            with self.mutex:
                call.probe = self._send_ping()

    def _on_overdue(self, call: Call) -> None:
        """A worker that answers is only late: it has yet to say what others decide with it."""
        if not (call.probe is not None and call.probe.received and call.renew_patience(monotonic())):
            super()._on_overdue(call)

    def poll(self) -> None:
        """Reads what has come, without waiting."""
        try:
            self._leader_follower.lead(self._read_all)
        except KeyboardInterrupt:  # the message being read may be lost
            self.on_interrupt()
            raise

    def _read_all(self) -> None:
        self._send_released()
        while not self._is_lost and self._poller.poll(0):
            self._read()

    def _read_once(self, end: float) -> bool:
        """Read the doorbell once, or let another thread do so; False once `end` of the monotonic clock is over."""
        left = end - monotonic()
        if left <= 0:
            return False
        if not self._leader_follower.lead(partial(self._read_within, min(left, SIGNAL_CHECK_INTERVAL))):
            self._leader_follower.wait_as_follower(self._in_flight.never, ALL_PACKS, end)
        return True

    def _read_within(self, seconds: float) -> None:
        if self._poller.poll(seconds * 1000.0):
            self._read()

    def _send_released(self) -> None:
        with self.mutex:
            slots = self._in_flight.results.pop_released()
            if slots and not self._is_lost:
                seqpacket.send(self._socket, messages.encode_release(slots), 0.0)

    def _next_ping(self) -> float:
        return max(self._last_received, self._last_pinged) + PING_INTERVAL

    def _ping(self) -> None:
        """Ask a worker that has been silent whether it lives; the second time in vain it is lost."""
        if self._last_pinged > self._last_received:
            self._on_silence(f"it has not answered for {PING_INTERVAL:g} s when asked whether it lives")
            return
        with self.mutex:
            sent = self._send_ping() is not None
            self._last_pinged = monotonic()
        if not sent:
            self._on_silence("it takes no more messages")

    def _on_silence(self, why: str) -> None:
        """Give up a worker that may live: it is lost for this rank."""
        with self.mutex:
            self._mark_lost(why)
        self.callbacks.dispatch()

    def _read(self) -> None:
        """Read a message and take it in; where this process cannot, that is the end of the generation."""
        try:
            failure = self._receive()
        except KeyboardInterrupt:  # the waiting thread ends the generation
            raise
        except BaseException as error:
            self._on_own_failure(error)
            raise
        if failure is not None:
            self._on_own_failure(failure)
        self.callbacks.dispatch()

    def _receive(self) -> Exception | None:
        """Take a message in, if one is there; an error of this process, where it could not."""
        try:
            message, descriptor = seqpacket.receive(self._socket, self._buffer)
        except BlockingIOError:
            return None
        if descriptor == seqpacket.DESCRIPTOR_LOST:
            if message[0] not in _DISPENSABLE:
                return descriptor_lost()
            descriptor = -1
        return self._handle(message, descriptor)

    def _handle(self, message: bytes, descriptor: int) -> Exception | None:
        """Takes a message in; an error of this process, where it could not."""
        with self.mutex:
            self._last_received = monotonic()
            try:
                if message:
                    self._has_heard = True
                    self._in_flight.handle_message(message, descriptor)
                else:
                    self._mark_lost(_HUNG_UP if self._has_heard else _NEVER_HEARD)
            except ValueError as error:  # MalformedMessage, too
                self._mark_lost(f"it sent something unexpected ({error})")
            except Exception as error:
                return error
        return None

    def _mark_lost(self, why: str, advice: str = CONNECT_AGAIN) -> None:
        super()._mark_lost(why, advice)
        with contextlib.suppress(OSError):  # where the worker lives, it reports to the others that this rank is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def _request_cancel(self, call: Call) -> None:
        message = messages.Withdrawal(call.generation, call.instance).encode()
        if not (self._is_lost or seqpacket.send(self._socket, message, _SEND_TIMEOUT)):
            with self.mutex:
                self._mark_lost("it takes no more messages")
            self.callbacks.dispatch()

    def _give_up(self, call: Call, verdict: Verdict) -> None:
        self._in_flight.end(call, verdict, retire=True)

    def _end_generation(self, verdict: Verdict, within: float) -> None:
        # Where it has not said so by then, or a GPU is still at the inputs of calls in flight, their places in worker
        # memory are not used again before it says so.
        with self.mutex:
            over = self.rank_state.is_over
            if over and not self._calls:
                return
            if not over:
                self.rank_state.apply_verdict(verdict)
            if self.rank_state.claim_abort():
                self._send_now(messages.encode_end(verdict.cause, verdict.message[:MAX_REASON_LENGTH]))
            echo = self._send_ping(verdict) if self._calls else None
        try:
            if echo is not None:
                self._await_reply(echo, within)
        finally:
            with self.mutex:
                self._give_up_all(verdict)
            self.callbacks.dispatch()

    def _send_control(self, kind: messages.MessageType, text: str = "") -> bool:
        """Send a message without an instance if there is room for it."""
        return self._send_now(messages.encode_bare(kind, text))

    def _send_now(self, message: bytes) -> bool:
        return not self._is_lost and seqpacket.send(self._socket, message, 0.0)

    def _send_ping(self, verdict: Verdict | None = None) -> PingReply | None:
        """Sends a PING; its answer, or None where there is no room for it. Under the mutex."""
        if not self._send_control(messages.MessageType.PING):
            return None
        self._in_flight.pending_pings.append(PingReply(verdict))
        return self._in_flight.pending_pings[-1]

    def _await_reply(self, echo: PingReply, within: float) -> None:
        """Returns when the worker has answered, or after so many seconds."""
        end = monotonic() + within
        while not echo.received and not self._is_lost and (left := end - monotonic()) > 0:
            if not self._leader_follower.lead(partial(self._read_within, left)):
                self._leader_follower.wait_as_follower(echo, ALL_PACKS, end)

    def _hear_last_verdict(self) -> None:
        if self.rank_state.verdict is None or self.rank_state.cancel_verdict is not None:
            with self.mutex:
                echo = self._send_ping()
            if echo is not None:  # with it come verdicts that the worker has sent already
                self._await_reply(echo, _LEAVE_TIMEOUT)
        self._await_reply(self._in_flight.inputs_released, _LEAVE_TIMEOUT)

    def _close(self) -> None:
        self._send_control(messages.MessageType.LEAVE)
        with self.mutex:
            self._is_lost = True
            self._give_up_all(self.rank_state.on_group_left())
            seqpacket.close(self._socket, self._buffer)
            self._in_flight.results.clear()
            for events in (self._events, self._worker_events):
                while events:
                    with contextlib.suppress(CudaError):  # which does not matter any more
                        get_cuda().destroy_event(events.popitem()[1])
        self.callbacks.dispatch()

    def invalidate_after_fork(self, why: str) -> None:
        super().invalidate_after_fork(why)
        self._socket.close()
        self._in_flight.results.clear()
