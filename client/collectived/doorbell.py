"""The client's end of a doorbell: submissions go out, completions come in.

There is no reader thread: what nobody waits for stays in the socket until somebody does, or submits again.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
from time import monotonic

from collectived import door
from collectived.call import ALL, Call
from collectived.callbacks import Callbacks
from collectived.errors import ResourceExhaustedError
from collectived.results import Results
from collectived.standing import Standing
from collectived.turns import Turns
from collectived_proto.errors import Code, CollectiveError, error_from_verdict
from collectived_proto.local import wire
from collectived_proto.types import GroupInfo, Verdict

GRACE = 0.25  # seconds after its deadline in which a call may still hear from the worker
PING_EVERY = 5.0  # seconds of silence after which the worker is asked whether it lives, and again until it is lost
_ROOM_WITHIN = 10.0  # seconds in which a worker makes room for a message
_LEAVE_WITHIN = 1.0  # seconds in which a worker says what it knows when we leave
_DONE = int(wire.Kind.DONE)


class Doorbell:
    """One rank's doorbell. Thread-safe: `mutex` guards everything here but the socket's read side, the leader's."""

    def __init__(self, sock: socket.socket, group: GroupInfo, rank: int, worker: str) -> None:
        self.mutex = threading.Lock()
        self.standing = Standing(group, rank)
        self.callbacks = Callbacks(self.mutex, self.wait)
        self._socket = sock
        self._worker = worker
        self._turns = Turns(self.mutex)
        self._results = Results()
        self._calls: dict[int, Call] = {}  # in flight, by instance
        self._lost = False
        self._buffer = bytearray(wire.MAX_MESSAGE)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._heard = self._pinged = 0.0
        self._pongs = 0

    def ring(self, call: Call, timeout: float, remaining: float, addresses: tuple[tuple[int, int], ...]) -> None:
        """Numbers a call and starts it; where the generation has failed, ends it with the verdict.

        Args:
            timeout, remaining: seconds that the caller gave it, and what is left of them; 0 for none.
            addresses: (arena, offset) of each leaf, or of the staging slot where the call has one.

        Raises:
            ResourceExhaustedError: as many calls as allowed are in flight.
        """
        if self._calls or self.standing.verdict is not None:
            self._make_room()
        with self.mutex:
            standing = self.standing
            if standing.verdict is not None:
                call.end(standing.verdict)
                return
            if len(self._calls) >= wire.MAX_OUTSTANDING:
                raise ResourceExhaustedError(
                    f"{len(self._calls)} collectives of group {standing.group.name!r} are in flight on rank "
                    f"{standing.rank}, which is the most there may be: wait for some before starting more"
                )
            instance = standing.next_instance
            standing.next_instance = instance + 1
            call.start(standing.generation, instance)
            self._calls[instance] = call
            self._heard = monotonic()
            staged, released = call.staging is not None, self._results.released()
            ring = wire.Ring(
                standing.generation,
                call.prepared.id,
                instance,
                remaining,
                staged,
                addresses,
                released,
                timeout,
            )
            if not door.send(self._socket, ring.encode(), _ROOM_WITHIN):
                self._lose("it takes no more messages")

    def _make_room(self) -> None:
        """Reads what has come. Calls of an older generation end first: a completion does not say its generation."""
        for call in list(self._calls.values()):
            if call.generation != self.standing.generation:
                self.wait(call)
        self.glance()

    def wait(self, call: Call, packs: int = ALL, until: float = math.inf) -> None:
        """Returns when the call has ended or that many packs are complete, or at `until` of the monotonic clock.

        Ctrl-C ends the generation for all ranks.
        """
        try:
            while not call.ready(packs):
                if self._turns.lead():
                    try:
                        self._read_until(call, packs, until)
                    finally:
                        self._turns.resign()
                else:
                    self._turns.follow(call, packs, min(until, call.cut))
                    self._check_cut(call)
                if until != math.inf and monotonic() >= until:
                    return
        except KeyboardInterrupt:
            self.abort(f"interrupted on rank {self.standing.rank}")
            raise

    def _read_until(self, call: Call, packs: int, until: float) -> None:
        self._send_released()
        while not call.ready(packs):
            end = min(until, call.cut if call.cut != math.inf else self._next_ping())
            if self._poll.poll(max(0.0, (end - monotonic()) * 1000.0)):
                self._read()
                continue
            now = monotonic()
            if call.cut != math.inf:
                self._check_cut(call)
            elif now >= self._next_ping():
                self._ping()
            if now >= until:
                return

    def glance(self) -> None:
        """Reads what has come, without waiting."""
        if self._turns.lead():
            try:
                self._send_released()
                while not self._lost and self._poll.poll(0):
                    self._read()
            finally:
                self._turns.resign()

    def _send_released(self) -> None:
        with self.mutex:
            slots = self._results.released()
            if slots and not self._lost:
                door.send(self._socket, wire.release(slots), 0.0)

    def _check_cut(self, call: Call) -> None:
        if call.complete or monotonic() < call.cut:
            return
        verdict = self.standing.overdue(call, self._worker, GRACE)
        with self.mutex:
            self._fail(verdict)
            self._say(wire.Kind.ABORT, verdict.message)
        self.callbacks.call_back()

    def _next_ping(self) -> float:
        return max(self._heard, self._pinged) + PING_EVERY

    def _ping(self) -> None:
        with self.mutex:
            if self._pinged > self._heard:
                self._lose(f"it has not answered for {PING_EVERY:g} s when asked whether it lives")
            elif not self._say(wire.Kind.PING):
                self._lose("it takes no more messages")
            self._pinged = monotonic()
        self.callbacks.call_back()

    def _read(self) -> None:
        try:
            message, descriptor = door.receive(self._socket, self._buffer)
        except BlockingIOError:
            return
        with self.mutex:
            try:
                self._dispatch(message, descriptor)
            except (wire.Malformed, ValueError, OSError) as error:
                self._lose(f"it sent something unexpected ({error})")
        self.callbacks.call_back()

    def _dispatch(self, message: bytes, descriptor: int) -> None:
        if not message:
            self._lose("it has closed the connection")
            return
        self._heard = monotonic()
        if message[0] == _DONE:
            self._done(wire.parse_done(message))
            return
        kind = wire.kind_of(message)
        if kind is wire.Kind.ARENA and descriptor >= 0:
            self._results.add(message, descriptor)
            return
        if descriptor >= 0:
            os.close(descriptor)
        if kind is wire.Kind.FAILED:
            self._failed(*wire.parse_failed(message))
        elif kind is wire.Kind.PONG:
            self._pongs += 1
        else:
            raise wire.Malformed(f"a {kind.name} on a doorbell")

    def _done(self, done: wire.Done) -> None:
        call = self._calls.get(done.instance)
        if call is None:  # given up on, and with it the generation
            return
        if done.result and call.slot is None:
            call.slot = self._results.slot(done)
        if call.prepared.layout.packs:
            call.packs.append(done.pack)
        if done.last:
            self._end(call, None)
        else:
            self._turns.wake(call)

    def _failed(self, instance: int, serialized: bytes) -> None:
        # Imported late because it brings protobuf, and `import collectived` is to be quick.
        from collectived_proto.codec import verdict_from_proto
        from collectived_proto.v1 import common_pb2

        verdict = verdict_from_proto(common_pb2.Verdict.FromString(serialized))
        self._fail(verdict)
        call = self._calls.get(instance)
        if call is not None and call.generation == verdict.generation:
            self._end(call, verdict)

    def _fail(self, verdict: Verdict) -> None:
        self.standing.decided(verdict)
        for call in list(self._calls.values()):
            if call.generation == verdict.generation and call.instance >= verdict.from_instance:
                self._end(call, verdict)

    def _end(self, call: Call, verdict: Verdict | None) -> None:
        del self._calls[call.instance]
        call.end(verdict)
        self._turns.wake(call)
        self.callbacks.ended(call)

    def _end_all(self, verdict: Verdict) -> None:
        if self.standing.verdict is None or self.standing.verdict.successor:
            self.standing.decided(verdict)
        for call in list(self._calls.values()):
            self._end(call, verdict)

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            message = f"{self._worker} is lost: {why}; connect and join again"
            oldest = next(iter(self._calls.values()), None)
            self._end_all(self.standing.own_verdict(Code.UNAVAILABLE, message, oldest))

    def error(self, verdict: Verdict, site: str = "") -> CollectiveError:
        """What a verdict is raised as. From here on the group goes on in the successor generation, if it has one."""
        with self.mutex:
            self.standing.given(verdict)
        return error_from_verdict(verdict, site)

    def abort(self, reason: str) -> None:
        """Ends the generation for all ranks; never waits."""
        with self.mutex:
            if self.standing.verdict is None or self.standing.verdict.successor:
                self._end_all(self.standing.own_verdict(Code.ABORTED, reason))
                self._say(wire.Kind.ABORT, reason)
        self.callbacks.call_back()

    def _say(self, kind: wire.Kind, text: str = "") -> bool:
        """Sends a message without an instance if there is room for it."""
        return not self._lost and door.send(self._socket, wire.bare(kind, text), 0.0)

    def leave(self) -> Verdict | None:
        """Waits for what is in flight, says goodbye and hangs up; returns a verdict that the caller has not seen."""
        for call in list(self._calls.values()):
            self.wait(call)
        if self.standing.verdict is None:
            self._hear_verdict()
        unseen = self.standing.unseen
        self._say(wire.Kind.LEAVE)
        with self.mutex:
            self._lost = True
            self._end_all(self.standing.own_verdict(Code.FAILED_PRECONDITION, "the group has been left"))
            door.hang_up(self._socket, self._buffer)
            self._results.forget()
        self.callbacks.call_back()
        return unseen

    def _hear_verdict(self) -> None:
        """Asks and listens, so that a verdict which the worker has sent already is known."""
        if not self._turns.lead():
            return
        try:
            heard, end = self._pongs, monotonic() + _LEAVE_WITHIN
            if not self._say(wire.Kind.PING):
                return
            while self._pongs == heard and not self._lost and (left := end - monotonic()) > 0:
                if self._poll.poll(left * 1000):
                    self._read()
        finally:
            self._turns.resign()

    def close_after_fork(self) -> None:
        """In a forked child: closes this process's copy of the socket. Takes no lock, for its owner may not exist."""
        self._lost = True
        self._socket.close()
        self._results.forget()
