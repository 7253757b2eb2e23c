"""The client's end of a doorbell: submissions go out, completions come in.

There is no reader thread: what nobody waits for stays in the socket until somebody does, or submits again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
from collections.abc import Callable
from time import monotonic

from collectived.arguments import sendable
from collectived.calls.call import ALL, Call
from collectived.calls.callbacks import Callbacks
from collectived.calls.limit import LONGEST_REASON
from collectived.calls.places import Address
from collectived.calls.standing import Standing
from collectived.calls.turns import LOOK_UP, Turns
from collectived.errors import FailedPreconditionError, UnavailableError
from collectived.gpu.driver import CudaError, binding
from collectived.shared import door
from collectived.shared.flight import Echo, Flight
from collectived_proto.errors import Code, CollectiveError
from collectived_proto.local import wire
from collectived_proto.local.spin import Spin, cores
from collectived_proto.types import GroupInfo, Verdict

log = logging.getLogger("collectived")

_CUT_WITHIN = 0.02  # seconds in which the worker says that it has stopped: with GRACE within the promised 0.25
PING_EVERY = 5.0  # seconds of silence after which the worker is asked whether it lives, and again until it is lost
_ROOM_WITHIN = 10.0  # seconds in which a worker makes room for a message
_LEAVE_WITHIN = 1.0  # seconds in which a worker says what it knows when we leave, and gives back memory
_STOP_WITHIN = 0.09  # seconds in which a worker says that it has stopped; Ctrl-C is to be over within 0.1


class Doorbell:
    """One rank's doorbell, a `Route`. `mutex` guards everything here but the socket's read side, the leader's.

    Attributes:
        severed: why it cannot be used in this process, a forked child; '' where it can.
    """

    def __init__(self, sock: socket.socket, group: GroupInfo, rank: int, worker: str) -> None:
        self.mutex = threading.Lock()
        self._ringing = threading.Lock()  # over numbering and sending; taken before `mutex`
        self.standing = Standing(group, rank)
        self.callbacks = Callbacks(self.mutex, self._finish)
        self.severed = ""
        self._socket = sock
        self._worker = worker
        self._turns = Turns(self.mutex)
        self._flight = Flight(self.standing, self._turns, self.callbacks)
        self._lost = False
        near = sum(member.host == group.members[rank].host for member in group.members)
        self._looks = cores() > near + 1  # as many ranks as look leave cores for the others, and for workers
        self._spin = Spin()
        self._buffer = bytearray(wire.MAX_MESSAGE)
        self._events: dict[int, int] = {}  # of a GPU
        self._opened: dict[int, int] = {}  # those of the worker
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._heard = self._pinged = 0.0

    def check(self) -> None:
        """Raises FailedPreconditionError in a forked child, where everything here belongs to the parent."""
        if self.severed:
            raise FailedPreconditionError(self.severed)

    def check_goes_on(self, site: str) -> None:
        """Raises the verdict where the generation is over, in the coordinator's words if they have come."""
        if self.standing.over:
            self.glance()
            if self.standing.verdict is not None:
                raise self.error(self.standing.verdict, site)

    def ring(self, call: Call, timeout: float, remaining: float, addresses: tuple[Address, ...]) -> None:
        """Numbers a call and starts it; see `Route`. Numbers are given under the lock under which they are sent."""
        if self._flight.calls or self.standing.verdict is not None:
            self._make_room()
        with self._ringing:
            self._ring(call, timeout, remaining, addresses)

    def _ring(self, call: Call, timeout: float, remaining: float, addresses: tuple[Address, ...]) -> None:
        flight = self._flight
        with self.mutex:
            standing = self.standing
            if standing.verdict is not None:
                call.end(standing.verdict)
                return
            post = call.prepared.post
            instance = standing.number(post, flight.posts if post else len(flight.calls) - flight.posts)
            event, messages = self._mark(call, instance) if call.marks else (0, ())
            flight.posts += post
            call.start(standing.generation, instance)
            flight.calls[instance] = call
            self._heard = monotonic()
            staged, released, number = call.staging is not None, flight.results.released(), call.prepared.id
            generation, output = standing.generation, call.output
            ring = wire.Ring(generation, number, instance, remaining, staged, addresses, released, timeout, output)
            if call.ordered:
                ring = ring._replace(ordered=True)
            if call.marks:
                ring = ring._replace(event=event)
            message = ring.encode()
            sent = not messages and door.send(self._socket, message, 0.0)
        if not sent:  # the worker is behind, or gone: others may hear of what is in flight meanwhile
            sent = all(self._send(one, call) for one in (*messages, message))
        if not sent:
            self.glance()  # a worker that has ended in order has said why before
            with self.mutex:
                self._lose("it takes no more messages")
            self.callbacks.call_back()

    def _send(self, message: bytes, call: Call) -> bool:
        return door.send(self._socket, message, min(_ROOM_WITHIN, max(0.0, call.cut - monotonic())))

    def _mark(self, call: Call, instance: int) -> tuple[int, tuple[bytes, ...]]:
        """The number of its event, of which as many serve in turn as there may be calls in flight.

        Returns too what the worker has to be told before.

        Raises:
            UnavailableError: the driver refuses; the call's number is free again.
        """
        number = instance % wire.MAX_OUTSTANDING + 1
        try:
            handle = call.mark(number, self._events)
        except CudaError as error:
            self.standing.take_back(call.prepared.post)
            why = f"its value cannot be waited for: {error}"
            call.end(self.standing.own_verdict(Code.UNAVAILABLE, why), retire=True)  # copies may be under way
            raise UnavailableError(why) from error
        return number, (wire.event(number, handle),) if handle else ()

    def order(self, call: Call) -> bool:
        """See `Route`."""
        launched = call.launched
        if launched is None:
            return False
        try:
            if launched.event not in self._opened:  # the driver may take its time, so not under the mutex
                event = call.open_event(launched.handle)
                if self._opened.setdefault(launched.event, event) != event:  # another thread was quicker
                    binding().end_event(event)
            with self.mutex:
                if call.launched is None:
                    return False
                return call.follow(self._opened[launched.event])
        except CudaError as error:
            log.warning("streams cannot wait for %s: %s; its result is waited for", self._worker, error)
            return False

    def _make_room(self) -> None:
        """Reads what has come. Calls of an older generation end first: a completion does not say its generation."""
        for call in list(self._flight.calls.values()):
            if call.generation != self.standing.generation:
                self.wait(call)
        self.glance()

    def give_up(self, code: Code, message: str, site: str) -> CollectiveError:
        """See `Route`."""
        self.glance()
        verdict = self.standing.own_verdict(code, message)
        if not self.standing.over:
            self._stop(verdict, _CUT_WITHIN)
        return self.error(self.standing.verdict or verdict, site)

    def wait(self, call: Call, packs: int = ALL, until: float = math.inf) -> None:
        """Returns when the call has ended or that many packs are complete, or at `until` of the monotonic clock.

        Ctrl-C ends the generation for all ranks.
        """
        self._wait(call, packs, until, self._withdraw)

    def _finish(self, call: Call) -> None:
        """Waits for a call that no thread of the caller's waits for: the session is closed when it has ended."""
        self._wait(call, ALL, math.inf, lambda _: None)

    def _withdraw(self, call: Call) -> None:
        if self.standing.withdrawn is not None:
            with self.mutex:
                if not call.complete:
                    self._flight.end(call, self.standing.withdrawn, retire=True)
            self.callbacks.call_back()

    def withdraw(self, why: str) -> None:
        """See `Route`. Who waits looks up within `LOOK_UP` seconds."""
        with self.mutex:
            withdrawn = self.standing.withdraw(why)
            for call in list(self._flight.calls.values()):
                if call.awaited:
                    self._flight.end(call, withdrawn, retire=True)
        self.callbacks.call_back()

    def _wait(self, call: Call, packs: int, until: float, look: Callable[[Call], None]) -> None:
        try:
            while not call.ready(packs):
                self.check()
                look(call)
                if self._turns.lead():
                    try:
                        self._read_until(call, packs, until, look)
                    finally:
                        self._turns.resign()
                else:
                    self._turns.follow(call, packs, min(until, call.cut))
                    self._check_cut(call)
                if until != math.inf and monotonic() >= until:
                    return
        except KeyboardInterrupt:
            self.interrupted()
            raise

    def interrupted(self) -> None:
        """Ctrl-C came in a call: ends the generation for all ranks."""
        self._turns.drop()
        self.abort(f"interrupted on rank {self.standing.rank}")

    def _read_until(self, call: Call, packs: int, until: float, look: Callable[[Call], None]) -> None:
        self._send_released()
        while not call.ready(packs):
            end = min(until, call.cut if call.cut != math.inf else self._next_ping())
            left = min(LOOK_UP, max(0.0, end - monotonic()))
            if (self._looks and self._spin.look(self._poll, left)) or self._poll.poll(left * 1000.0):
                self._read()
                continue
            now = monotonic()
            look(call)
            if call.cut != math.inf:
                self._check_cut(call)
            elif now >= self._next_ping():
                self._ping()
            if now >= until:
                return

    def glance(self) -> None:
        """Reads what has come, without waiting."""
        try:
            if self._turns.lead():
                try:
                    self._send_released()
                    while not self._lost and self._poll.poll(0):
                        self._read()
                finally:
                    self._turns.resign()
        except KeyboardInterrupt:  # what was being read may be lost
            self.interrupted()
            raise

    def _send_released(self) -> None:
        with self.mutex:
            slots = self._flight.results.released()
            if slots and not self._lost:
                door.send(self._socket, wire.release(slots), 0.0)

    def _check_cut(self, call: Call) -> None:
        if not call.complete and monotonic() >= call.cut:
            self._stop(self.standing.overdue(call, self._worker), _CUT_WITHIN)

    def _next_ping(self) -> float:
        return max(self._heard, self._pinged) + PING_EVERY

    def _ping(self) -> None:
        with self.mutex:
            if self._pinged > self._heard:
                self._lose(f"it has not answered for {PING_EVERY:g} s when asked whether it lives")
            elif self._ask() is None:
                self._lose("it takes no more messages")
            self._pinged = monotonic()
        self.callbacks.call_back()

    def _read(self) -> None:
        try:
            message, descriptor = door.receive(self._socket, self._buffer)
        except BlockingIOError:
            return
        with self.mutex:
            self._heard = monotonic()
            try:
                if message:
                    self._flight.take(message, descriptor)
                else:
                    self._lose("it has closed the connection")
            except (wire.Malformed, ValueError, OSError) as error:
                self._lose(f"it sent something unexpected ({error})")
        self.callbacks.call_back()

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            oldest = next(iter(self._flight.calls.values()), None)
            self._flight.end_all(self.standing.lost(self._worker, why, oldest), retire=True)

    def error(self, verdict: Verdict, site: str = "") -> CollectiveError:
        """What a verdict is raised as. From here on the group goes on in the successor generation, if it has one."""
        with self.mutex:
            return self.standing.error(verdict, site)

    def abort(self, reason: str) -> None:
        """Ends the generation for all ranks.

        Returns when the worker has said that it reads the inputs of calls in flight no more. If it has not within
        90 ms, or a GPU is still at them, their places in worker memory are not used again before it says so.
        """
        self._stop(self.standing.own_verdict(Code.ABORTED, sendable(reason[:LONGEST_REASON])))

    def _stop(self, verdict: Verdict, within: float = _STOP_WITHIN) -> None:
        with self.mutex:
            over = self.standing.over
            if over and not self._flight.calls:
                return
            if not over:
                self.standing.decided(verdict)
            if self.standing.abort_once():
                self._say(wire.Kind.ABORT, verdict.message)
            echo = self._ask(verdict) if self._flight.calls else None
        try:
            if echo is not None:
                self._hear(echo, within)
        finally:
            with self.mutex:
                self._flight.end_all(verdict, retire=True)
            self.callbacks.call_back()

    def _say(self, kind: wire.Kind, text: str = "") -> bool:
        """Sends a message without an instance if there is room for it."""
        return not self._lost and door.send(self._socket, wire.bare(kind, text), 0.0)

    def _ask(self, verdict: Verdict | None = None) -> Echo | None:
        """Sends a PING; its answer, or None where there is no room for it. Under the mutex."""
        if not self._say(wire.Kind.PING):
            return None
        self._flight.echoes.append(Echo(verdict))
        return self._flight.echoes[-1]

    def _hear(self, echo: Echo, within: float) -> None:
        """Returns when the worker has answered, or after so many seconds."""
        end = monotonic() + within
        while not echo.heard and not self._lost and (left := end - monotonic()) > 0:
            if self._turns.lead():
                try:
                    if self._poll.poll(left * 1000):
                        self._read()
                finally:
                    self._turns.resign()
            else:
                self._turns.follow(echo, ALL, end)

    def leave(self) -> Verdict | None:
        """Waits for what is in flight, says goodbye and hangs up; returns a verdict that the caller has not seen."""
        try:
            for call in list(self._flight.calls.values()):
                self._finish(call)
            if self.standing.verdict is None or self.standing.withdrawn is not None:
                with self.mutex:
                    echo = self._ask()
                if echo is not None:  # with it come verdicts that the worker has sent already
                    self._hear(echo, _LEAVE_WITHIN)
            self._hear(self._flight.returned, _LEAVE_WITHIN)
            return self.standing.unseen
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        self._turns.drop()
        self._say(wire.Kind.LEAVE)
        with self.mutex:
            self._lost = True
            self._flight.end_all(self.standing.left(), retire=True)
            door.hang_up(self._socket, self._buffer)
            self._flight.results.forget()
            for events in (self._events, self._opened):
                while events:
                    with contextlib.suppress(CudaError):  # which matters to nobody any more
                        binding().end_event(events.popitem()[1])
        self.callbacks.call_back()

    def sever(self, why: str) -> None:
        """In a forked child: closes this process's copy of the socket. Takes no lock, for its owner may not exist."""
        self.severed = why
        self._lost = True
        self._socket.close()
        self._flight.results.forget()
