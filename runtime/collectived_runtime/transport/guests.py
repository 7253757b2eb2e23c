"""The guests of a reception: connections with a handshake under way, each a generator that yields what it waits for.

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
class Guest:
    connection: socket.socket
    handshake: Handshake
    expires: float
    room: dict[int, Guest]  # where it waits, by descriptor
    descriptor: int  # also when its connection has been closed


class Guests:
    """All of them, in the reception's thread.

    Args:
        poll: what waits here may be many: poll would look at all of them each time.
        refused: told of a guest that has done what it should not, or has gone amid it.
    """

    def __init__(self, poll: select.epoll, refused: Callable[[Guest, Exception], None]) -> None:
        self._poll = poll
        self._refused = refused
        self._guests: dict[int, Guest] = {}

    def __len__(self) -> int:
        return len(self._guests)

    def of(self, connection: socket.socket) -> Guest:
        return self._guests[connection.fileno()]

    def receive(self, connection: socket.socket, handshake: Handshake, patience: float, room: dict[int, Guest]) -> None:
        """Lets a handshake begin, which may take so many seconds.

        Raises:
            OSError: the system has no room for it; nothing has begun, and the connection is the caller's.
        """
        connection.setblocking(False)
        descriptor = connection.fileno()
        self._poll.register(descriptor, 0)  # first: where it cannot be waited for, nobody shall believe that it is
        guest = Guest(connection, handshake, time.monotonic() + patience, room, descriptor)
        self._guests[descriptor] = room[descriptor] = guest
        self._step(guest)

    def step(self, descriptor: int) -> None:
        """Something has come there."""
        guest = self._guests.get(descriptor)
        if guest is not None:
            self._step(guest)

    def _step(self, guest: Guest) -> None:
        """Lets a handshake go on until it waits again. Whoever ends it has handed the connection on, or closed it.

        Nothing that a guest does ends this thread, for nobody would come in any more.
        """
        try:
            self._poll.modify(guest.descriptor, next(guest.handshake))
        except StopIteration:
            self.dismiss(guest)
        except Exception as error:
            self.dismiss(guest)
            self._refused(guest, error)
            guest.connection.close()

    def move(self, guest: Guest, patience: float, room: dict[int, Guest]) -> None:
        """It waits for something else from here on, and may take so many seconds for that."""
        del guest.room[guest.descriptor]
        guest.room, guest.expires = room, time.monotonic() + patience
        room[guest.descriptor] = guest

    def turn_away(self, guest: Guest) -> None:
        """Ends a handshake amid it."""
        try:
            guest.handshake.close()
        finally:  # else its time would be over again and again
            self.dismiss(guest)
            guest.connection.close()

    def dismiss(self, guest: Guest) -> None:
        """Forgets a guest, whose connection goes elsewhere or is closed."""
        if self._guests.get(guest.descriptor) is guest:
            del self._guests[guest.descriptor]
            with contextlib.suppress(OSError):  # TLS closes what was reset before it began, and so it is forgotten
                self._poll.unregister(guest.descriptor)
            guest.room.pop(guest.descriptor, None)

    def close(self) -> None:
        for guest in list(self._guests.values()):
            self.dismiss(guest)
            guest.connection.close()
