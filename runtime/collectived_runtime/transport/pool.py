"""Kept connections: of links whose generation is over, until the same two workers need one again.

When a generation ends, each side says farewell on its links, and hands those that stand between frames to its
connection server. Once both have said it, the connection carries nothing any more. Then the worker that dialled it may
say a hello on it as on a new one, with all that a hello proves. That spares connecting and the handshake of TLS. A
connection rests for a minute at most, and there are only so many. An error on one is no fault: it is closed, and a new
one dialled.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import takewhile

from collectived_runtime.limits import descriptors as limits
from collectived_runtime.transport import handshake
from collectived_runtime.transport.handshake import TlsContexts
from collectived_runtime.transport.handshakes import Handshake, PendingHandshake, PendingHandshakes
from collectived_runtime.transport.hello import HELLO_BYTES, HelloRefused
from collectived_runtime.transport.link import Link, Origin, PeerAddress

MAX_POOLED = 256
MAX_IDLE_SECONDS = 60.0
HELLO_SECONDS = 10.0


class LinkPool:
    """Those of one connection server, in its thread.

    Args:
        contexts: of TLS. descriptors: how many this process may have.
        greet: goes on with a connection, the address of its other end and the hello that has been said on it.
    """

    def __init__(
        self,
        guests: PendingHandshakes,
        contexts: TlsContexts | None,
        descriptors: int,
        greet: Callable[[socket.socket, str, bytes], Handshake],
    ) -> None:
        self.idle: dict[int, PendingHandshake] = {}
        self.resuming: dict[int, PendingHandshake] = {}  # on which a hello is being said again: these are in use
        self._handshakes = guests
        self._contexts = contexts
        self._descriptors = descriptors
        self._on_hello = greet
        self._reusable: dict[int, PeerAddress] = {}  # that carry nothing any more and were dialled here, by descriptor

    def release(self, link: Link, farewell: bytes) -> None:
        """Take a link on which `farewell` has been said, which the peer is to say too; close what cannot be kept."""
        if link.origin is None or not limits.can_open_descriptor(self._descriptors):
            link.close()
            return
        if len(self.idle) >= MAX_POOLED:
            self._handshakes.abort(next(iter(self.idle.values())))
        self._handshakes.start(
            link.origin.connection,
            self._wait_idle(link.origin, farewell, link.unread_bytes),
            MAX_IDLE_SECONDS,
            self.idle,
            f"with worker {link.peer}",
        )

    def acquire(self, whom: PeerAddress) -> socket.socket | None:
        """A connection that was dialled to this one before, if there is one on which a hello may be said."""
        for descriptor in [known for known, other in reversed(self._reusable.items()) if other == whom]:
            guest = self.idle[descriptor]
            if handshake.is_still_valid(guest.connection, self._contexts, dialled=True):
                guest.handshake.close()
                self._handshakes.discard(guest)
                return guest.connection
            self._handshakes.abort(guest)
        return None

    @property
    def deadlines(self) -> list[float]:
        """When the oldest that rests, and the oldest that greets, have done so long enough."""
        return [guest.deadline for room in (self.idle, self.resuming) for guest in list(room.values())[:1]]

    def close_expired(self, now: float) -> None:
        """Close those that have rested long enough, or do not come to the end of their hello."""
        for room in (self.idle, self.resuming):
            for guest in list(takewhile(lambda guest: guest.deadline <= now, room.values())):
                self._handshakes.abort(guest)

    def _wait_idle(self, way: Origin, farewell: bytes, unread: bytes) -> Handshake:
        """Wait for the peer's farewell; then for its hello, or, where it was dialled from here, until it is taken."""
        connection = way.connection
        try:
            said = yield from handshake.await_bye(connection, farewell, unread)
            if way.dialled_peer is None:
                said = yield from handshake.read(connection, HELLO_BYTES, said)
            elif not said:
                self._reusable[connection.fileno()] = way.dialled_peer
                said = yield from handshake.read(connection, 1)  # nothing is to come
        except (HelloRefused, OSError):  # it has gone, or was never what it should be
            said = b""
        finally:
            self._reusable.pop(connection.fileno(), None)
        answers = way.dialled_peer is None and len(said) == HELLO_BYTES
        if answers and handshake.is_still_valid(connection, self._contexts, dialled=False):
            # The dialler hands the link on before its proof is read here: from now on this side must not close it.
            self._handshakes.requeue(self._handshakes.get(connection), HELLO_SECONDS, self.resuming)
            yield from self._on_hello(connection, _peer_host(connection), said)
        else:
            self._handshakes.discard(self._handshakes.get(connection))
            connection.close()


def _peer_host(connection: socket.socket) -> str:
    address = connection.getpeername()
    return str(address[0]) if isinstance(address, tuple) else ""
