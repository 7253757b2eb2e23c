"""An entrance of the reception: a listener, and those who came in there and have not said who they are.

It admits so many connections a second, and so many at a time; where descriptors run out, or an address has shown wrong
proofs too often, a connection is closed at once. Whoever is turned away is counted.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

from collectived_runtime.limits.descriptors import room
from collectived_runtime.limits.logins import Logins
from collectived_runtime.limits.pace import Pace, Rate
from collectived_runtime.limits.refusals import Limit, Refusals, Where

log = logging.getLogger("collectived.reception")

ACCEPTED = Rate(200, 512)  # connections of each kind; the kernel keeps others waiting
PAUSE_SECONDS = 0.1  # in which nobody is accepted, where there are no descriptors


class Expiring(Protocol):
    expires: float


Guest = TypeVar("Guest", bound=Expiring)


@dataclass(frozen=True, slots=True)
class House:
    """What all entrances have in common.

    most: guests at a time, of each entrance. descriptors: that this process may have.
    """

    refusals: Refusals
    logins: Logins
    most: int
    descriptors: int


@dataclass(slots=True, eq=False)
class Entrance(Generic[Guest]):
    """`guests` by descriptor, the oldest first: all have the same time. `closed_until`: nobody is accepted before."""

    listener: socket.socket
    what: Where
    house: House
    guests: dict[int, Guest] = field(default_factory=dict)
    pace: Pace = field(default_factory=lambda: Pace(ACCEPTED))
    closed_until: float = 0.0

    def accept(self, turn_away: Callable[[Guest], None]) -> tuple[socket.socket, str] | None:
        """Who comes in, and from which address ('' on a Unix socket); None where nobody does.

        Args:
            turn_away: closes the connection of the oldest, where there are too many, and takes it out of `guests`.
        """
        house = self.house
        try:
            connection, address = self.listener.accept()
        except OSError as error:  # the guest has gone again, or we are out of descriptors: the next may fare better
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                log.warning("a connection could not be accepted: %s", error)
                house.refusals.limit(Limit.DESCRIPTORS)
                self.closed_until = time.monotonic() + PAUSE_SECONDS
            return None
        now = time.monotonic()
        if delay := self.pace.delay(None, now):
            self.closed_until = now + delay
        host = address[0] if isinstance(address, tuple) else ""
        if not room(house.descriptors, connection.fileno()):
            log.warning("a connection was closed at once: nearly all of %d descriptors are in use", house.descriptors)
            self._close(connection, Limit.DESCRIPTORS)
            return None
        if house.logins.shut_out(host):
            self._close(connection, Limit.LOGINS)
            return None
        if len(self.guests) >= house.most:
            log.warning("%d connections wait that have not said who they are: the oldest is closed", house.most)
            house.refusals.limit(Limit.HANDSHAKES)
            turn_away(next(iter(self.guests.values())))
        return connection, host

    def _close(self, connection: socket.socket, why: Limit) -> None:
        self.house.refusals.limit(why)
        connection.close()

    def late(self, now: float) -> list[Guest]:
        """Those whose time is over; each is counted."""
        found = list(takewhile(lambda guest: guest.expires <= now, self.guests.values()))
        for _ in found:
            self.house.refusals.limit(Limit.HANDSHAKES)
        return found

    def times(self, now: float) -> Iterator[float]:
        """When something is to be done here."""
        if self.guests:
            yield next(iter(self.guests.values())).expires
        if self.closed_until:
            yield max(now, self.closed_until)

    def opens(self, now: float) -> bool:
        """Whether it was closed and is open again from now on."""
        if not self.closed_until or self.closed_until > now:
            return False
        self.closed_until = 0.0
        return True


def bind(door: socket.socket, path: str) -> None:
    """Gives a socket its path, where a worker that was killed may have left a file.

    Raises:
        OSError: it cannot be had; another worker may listen there.
    """
    try:
        door.bind(path)
        return
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise OSError(error.errno, f"cannot listen at {path}: {error.strerror}") from None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        if probe.connect_ex(path) == 0:
            raise OSError(
                errno.EADDRINUSE, f"cannot listen at {path}: another worker does; stop it, or choose another folder"
            )
    os.unlink(path)
    door.bind(path)
