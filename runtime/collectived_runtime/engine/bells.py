"""The doorbells of a lane's local ranks: read and written without ever waiting for a client."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial

from collectived_proto.local import wire
from collectived_proto.local.arena import Arena
from collectived_runtime.engine.ledger import OutOfTurn
from collectived_runtime.engine.seat import Seat
from collectived_runtime.engine.watch import ENDED, Watch
from collectived_runtime.limits.pace import Pace, Rate
from collectived_runtime.limits.refusals import Limit, Refusals, Where

LAST_WORDS_SECONDS = 0.4  # for a doorbell to arrive whose client is gone already
IDLE_WORDS = Rate(500, 512)  # messages of a rank that start nothing new: after more it is not heard for a moment
MOST_UNREAD = wire.MAX_OUTSTANDING * wire.MAX_PACKS  # what a rank may have outstanding, if every pack is large
MOST_UNREAD_BYTES = 64 << 20


class Bells:
    """Args:
    message: takes one message of a client; may raise Malformed or OutOfTurn, which is then that client's fault.
    lost: called once with the rank of a client that is gone, and why.
    refusals: counts what clients should not have sent, and those that do not read.
    """

    def __init__(
        self,
        watch: Watch,
        message: Callable[[Seat, bytes], None],
        lost: Callable[[int, str], None],
        refusals: Refusals,
    ) -> None:
        self.seats: dict[int, Seat] = {}
        self._pace = Pace(IDLE_WORDS)
        self._resting: dict[int, float] = {}  # ranks whose doorbells are not looked at, and until when
        self._buffer = bytearray(wire.MAX_MESSAGE)  # so that no message costs an allocation of that size
        self._watch = watch
        self._message = message
        self._lost = lost
        self._refusals = refusals
        self._ending: dict[
            int, tuple[str, float]
        ] = {}  # ranks without a doorbell whose client is gone: why, until when

    def seat(self, seat: Seat) -> None:
        """Watches the process of a rank that is about to connect its doorbell."""
        self.seats[seat.rank] = seat
        if seat.pidfd >= 0:
            self._watch.add(seat.pidfd, select.POLLIN, lambda _: self.hang_up(seat, "its process ended"))

    def connect(self, rank: int, bell: socket.socket, arenas: Iterable[Arena]) -> None:
        """The doorbell has arrived; its client is told of the arenas in which results may lie."""
        seat = self.seats[rank]
        if seat.gone or seat.bell is not None:
            bell.close()
            return
        seat.connect(bell)
        self._watch.add(bell.fileno(), select.POLLIN, partial(self._event, seat))
        for arena in arenas:
            self._announce(seat, arena)
        if seat.flush():
            self._watch.change(bell.fileno(), select.POLLIN | select.POLLOUT)
        if rank in self._ending:
            self.hang_up(seat, self._ending.pop(rank)[0])

    def announce(self, arena: Arena) -> None:
        for seat in self.seats.values():
            if seat.outlet is not None:
                seat.outlet.announce(arena)
            elif seat.bell is not None:
                self._announce(seat, arena)

    def withdraw(self, arena: Arena) -> None:
        """No result will lie in this arena any more."""
        for seat in self.seats.values():
            if seat.outlet is not None:
                seat.outlet.withdraw(arena)
            elif seat.bell is not None:
                self.tell(seat, wire.arena(wire.Kind.WITHDRAWN, arena.number, 0))

    def tell(self, seat: Seat, message: bytes, descriptor: int = -1) -> None:
        if seat.tell(message, descriptor) and seat.bell is not None:
            self._watch.change(seat.bell.fileno(), self._wanted(seat))
            if seat.unread > MOST_UNREAD or seat.unread_bytes > MOST_UNREAD_BYTES:
                self._refusals.limit(Limit.UNREAD)
                self.lose(seat, f"it has left {seat.unread} messages unread")

    def idle(self, seat: Seat) -> None:
        """What this client has said starts nothing new; one that goes on like that is heard less often."""
        delay = self._pace.delay(seat.rank, now := time.monotonic())
        if delay and seat.bell is not None:
            self._resting[seat.rank] = now + delay
            self._watch.change(seat.bell.fileno(), self._wanted(seat))

    @property
    def wakeup(self) -> float:
        """When a doorbell that rests is looked at again; inf: none does."""
        return min(self._resting.values(), default=math.inf)

    def wake(self, now: float) -> None:
        for rank in [rank for rank, until in self._resting.items() if until <= now]:
            del self._resting[rank]
            seat = self.seats[rank]
            if seat.bell is not None:
                self._watch.change(seat.bell.fileno(), self._wanted(seat))

    def _wanted(self, seat: Seat) -> int:
        """The events that its doorbell is watched for."""
        heard = 0 if seat.rank in self._resting else select.POLLIN
        return heard if seat.reads else heard | select.POLLOUT

    def hang_up(self, seat: Seat, why: str) -> None:
        """The client is gone; what it had fully submitted before counts.

        Where its doorbell has not arrived, its last words may be on their way with it: they have a moment.
        """
        if seat.bell is None and seat.outlet is None and not seat.gone:
            _, until = self._ending.setdefault(seat.rank, (why, time.monotonic() + LAST_WORDS_SECONDS))
            if time.monotonic() < until:
                self._watch.remove(seat.pidfd)
                return
        while self._read(seat):
            pass
        self.lose(seat, why)

    def lose(self, seat: Seat, why: str) -> None:
        if seat.gone:
            return
        for descriptor in (seat.bell.fileno() if seat.bell else -1, seat.pidfd):
            self._watch.remove(descriptor)
        seat.close()
        self._lost(seat.rank, why)

    def look(self) -> None:
        """Takes what clients have sent until now, before something is decided that depends on it."""
        for seat in list(self.seats.values()):
            for _ in range(wire.MAX_OUTSTANDING):  # nobody keeps the lane here
                if not self._read(seat):
                    break

    @property
    def deserted(self) -> bool:
        return all(seat.gone for seat in self.seats.values())

    def close(self) -> None:
        for seat in self.seats.values():
            seat.close()
        self._buffer = bytearray()  # what is left of a lane is collected late, for all of it is a cycle

    def _announce(self, seat: Seat, arena: Arena) -> None:
        self.tell(seat, wire.arena(wire.Kind.ARENA, arena.number, arena.size), arena.descriptor)

    def _event(self, seat: Seat, events: int) -> None:
        if events & select.POLLOUT and seat.bell is not None and not seat.flush():
            self._watch.change(seat.bell.fileno(), self._wanted(seat))
        if events & (select.POLLIN | ENDED):
            self._read(seat)

    def _read(self, seat: Seat) -> bool:
        """Takes one message; False where none was there."""
        if seat.bell is None:
            return False
        try:
            length = seat.bell.recv_into(self._buffer)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it ended with messages unread; what it had sent before is still there
            return self._read(seat)
        except OSError:
            length = 0
        if not length:
            self.lose(seat, "its process ended or closed its doorbell")
            return False
        return self.take(seat, bytes(memoryview(self._buffer)[:length]))

    def take(self, seat: Seat, data: bytes) -> bool:
        """Takes a message of a client; False where it is the last."""
        try:
            self._message(seat, data)
        except (wire.Malformed, OutOfTurn) as error:
            self._refusals.bad(Where.DOORBELL)
            self.lose(seat, f"it sent something malformed: {error}")
            return False
        return True
