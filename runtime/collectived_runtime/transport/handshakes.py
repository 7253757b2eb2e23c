"""The guests of a connection server: connections with a handshake under way, each a generator that yields what it
waits for.

A *room* holds those that wait for the same thing, by descriptor, the oldest first.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

Handshake = Generator[int, None, None]  # of poll events


@dataclass(slots=True)
class PendingHandshake:
    connection: socket.socket
    handshake: Handshake
    deadline: float
    queue: dict[int, PendingHandshake]  # where it waits, by descriptor
    descriptor: int  # also when its connection has been closed
    peer: str = ""  # its other end, as far as that is known, for people


class PendingHandshakes:
    """All of them, in the connection server's thread.

    Args:
        poll: an epoll, because many may wait here, and `poll` would look at all of them each time.
        refused: called with a guest that broke the protocol, or has gone amid it, and the error.
    """

    def __init__(self, poll: select.epoll, refused: Callable[[PendingHandshake, Exception], None]) -> None:
        self._poll = poll
        self._on_error = refused
        self._by_descriptor: dict[int, PendingHandshake] = {}

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def get(self, connection: socket.socket) -> PendingHandshake:
        return self._by_descriptor[connection.fileno()]

    def start(
        self,
        connection: socket.socket,
        handshake: Handshake,
        patience: float,
        room: dict[int, PendingHandshake],
        peer: str = "",
    ) -> None:
        """Let a handshake begin, which may take so many seconds. `peer`: the other end, for people.

        Raises:
            OSError: the system has no room for it; nothing has begun, and the connection is the caller's.
        """
        connection.setblocking(False)
        descriptor = connection.fileno()
        self._poll.register(descriptor, 0)  # first: where it cannot be waited for, it must not be listed as if it were
        guest = PendingHandshake(connection, handshake, time.monotonic() + patience, room, descriptor, peer)
        self._by_descriptor[descriptor] = room[descriptor] = guest
        self._step(guest)

    def step(self, descriptor: int) -> None:
        """Something has come there."""
        guest = self._by_descriptor.get(descriptor)
        if guest is not None:
            self._step(guest)

    def _step(self, guest: PendingHandshake) -> None:
        """Let a handshake go on until it waits again. A handshake that ends has handed the connection on, or closed it.

        Nothing that a guest does ends this thread, for no other guest would be admitted any more.
        """
        try:
            self._poll.modify(guest.descriptor, next(guest.handshake))
        except StopIteration:
            self.discard(guest)
        except Exception as error:
            self.discard(guest)
            self._on_error(guest, error)
            guest.connection.close()

    def requeue(self, guest: PendingHandshake, patience: float, room: dict[int, PendingHandshake]) -> None:
        """It waits for something else from here on, and may take so many seconds for that."""
        del guest.queue[guest.descriptor]
        guest.queue, guest.deadline = room, time.monotonic() + patience
        room[guest.descriptor] = guest

    def abort(self, guest: PendingHandshake) -> None:
        """End a handshake amid it."""
        try:
            guest.handshake.close()
        finally:  # else its time would be over again and again
            self.discard(guest)
            guest.connection.close()

    def discard(self, guest: PendingHandshake) -> None:
        """Forget a guest, whose connection goes elsewhere or is closed."""
        if self._by_descriptor.get(guest.descriptor) is guest:
            del self._by_descriptor[guest.descriptor]
            with contextlib.suppress(OSError):  # TLS closes what was reset before it began, and so it is forgotten
                self._poll.unregister(guest.descriptor)
            guest.queue.pop(guest.descriptor, None)

    def close(self) -> None:
        for guest in list(self._by_descriptor.values()):
            self.discard(guest)
            guest.connection.close()
