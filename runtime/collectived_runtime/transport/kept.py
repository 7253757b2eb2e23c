"""Kept connections: of links whose generation is over, until the same two workers need one again.

When a generation ends, each side says farewell on its links, and hands those that stand between frames to its
reception. Once both have said it, the connection carries nothing any more. Then whoever dialled it may say a hello on
it as on a new one, with all that a hello proves: what is spared is connecting and the handshake of TLS. It rests for a
minute at most, and there are only so many; whatever goes wrong with one is no fault, it is closed and somebody dials.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import takewhile

from collectived_runtime.limits import descriptors as limits
from collectived_runtime.transport import handshake
from collectived_runtime.transport.guests import Guest, Guests, Handshake
from collectived_runtime.transport.handshake import Contexts
from collectived_runtime.transport.hello import HELLO_BYTES, Refused
from collectived_runtime.transport.link import Link, Way, Whom

MOST_KEPT = 256
KEPT_SECONDS = 60.0
GREETING_SECONDS = 10.0


class Kept:
    """Those of one reception, in its thread.

    Args:
        contexts: of TLS. descriptors: how many this process may have.
        greet: goes on with a connection, the address of its other end and the hello that has been said on it.
    """

    def __init__(
        self,
        guests: Guests,
        contexts: Contexts | None,
        descriptors: int,
        greet: Callable[[socket.socket, str, bytes], Handshake],
    ) -> None:
        self.room: dict[int, Guest] = {}
        self.greeting: dict[int, Guest] = {}  # on which a hello is being said again: these serve somebody
        self._guests = guests
        self._contexts = contexts
        self._descriptors = descriptors
        self._greet = greet
        self._free: dict[int, Whom] = {}  # that carry nothing any more and were dialled here, by descriptor

    def keep(self, link: Link, farewell: bytes) -> None:
        """Takes a link on which `farewell` has been said, which the peer is to say too; closes what cannot be kept."""
        if link.way is None or not limits.any_room(self._descriptors):
            link.close()
            return
        if len(self.room) >= MOST_KEPT:
            self._guests.turn_away(next(iter(self.room.values())))
        self._guests.receive(link.way.connection, self._rest(link.way, farewell, link.unread), KEPT_SECONDS, self.room)

    def take(self, whom: Whom) -> socket.socket | None:
        """A connection that was dialled to this one before, if there is one on which a hello may be said."""
        for descriptor in [known for known, other in reversed(self._free.items()) if other == whom]:
            guest = self.room[descriptor]
            if handshake.in_force(guest.connection, self._contexts, dialled=True):
                guest.handshake.close()
                self._guests.dismiss(guest)
                return guest.connection
            self._guests.turn_away(guest)
        return None

    @property
    def expires(self) -> list[float]:
        """When the oldest that rests, and the oldest that greets, have done so long enough."""
        return [guest.expires for room in (self.room, self.greeting) for guest in list(room.values())[:1]]

    def show_out(self, now: float) -> None:
        """Closes those that have rested long enough, or do not come to the end of their hello."""
        for room in (self.room, self.greeting):
            for guest in list(takewhile(lambda guest: guest.expires <= now, room.values())):
                self._guests.turn_away(guest)

    def _rest(self, way: Way, farewell: bytes, unread: bytes) -> Handshake:
        """Waits for the peer's farewell; then for its hello, or, where it was dialled from here, until it is taken."""
        connection = way.connection
        try:
            said = yield from handshake.part(connection, farewell, unread)
            if way.dialled is None:
                said = yield from handshake.read(connection, HELLO_BYTES, said)
            elif not said:
                self._free[connection.fileno()] = way.dialled
                said = yield from handshake.read(connection, 1)  # nothing is to come
        except (Refused, OSError):  # it has gone, or was never what it should be
            said = b""
        finally:
            self._free.pop(connection.fileno(), None)
        answers = way.dialled is None and len(said) == HELLO_BYTES
        if answers and handshake.in_force(connection, self._contexts, dialled=False):
            # Whoever dialled hands the link on before its proof is read here: from now on it is not ours to close.
            self._guests.move(self._guests.of(connection), GREETING_SECONDS, self.greeting)
            yield from self._greet(connection, _host(connection), said)
        else:
            self._guests.dismiss(self._guests.of(connection))
            connection.close()


def _host(connection: socket.socket) -> str:
    address = connection.getpeername()
    return str(address[0]) if isinstance(address, tuple) else ""
