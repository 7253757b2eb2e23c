"""An entrance of the connection server: a listener, and the connections accepted there that have not authenticated yet.

It admits so many connections a second, and so many at a time; where descriptors run out, a connection is closed at
once. Rejected connections are counted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

from collectived_runtime.limits.descriptors import TARGET_DESCRIPTORS, has_descriptor_room
from collectived_runtime.limits.login_throttle import LoginThrottle
from collectived_runtime.limits.rate_limit import Rate, RateLimiter
from collectived_runtime.limits.rejections import Limit, MessageSource, RejectionCounters

log = logging.getLogger("collectived.connections")

ACCEPT_RATE = Rate(200, 512)  # connections of each kind; the kernel keeps others waiting
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
PAUSE_SECONDS = 0.1  # in which no connection is accepted, where there are no descriptors


class HasDeadline(Protocol):
    deadline: float


MAX_PENDING = 1024
Pending = TypeVar("Pending", bound=HasDeadline)


@dataclass(frozen=True, slots=True)
class AcceptLimits:
    """How many may come in, the same for all listeners.

    Attributes:
        rejections: counts rejected connections.
        login_throttle: knows the addresses that have shown a wrong proof too often.
        max_pending: connections at a time that have not authenticated yet, of each listener.
        max_descriptors: descriptors that this process may have.
    """

    rejections: RejectionCounters = field(default_factory=RejectionCounters)
    login_throttle: LoginThrottle = field(default_factory=lambda: LoginThrottle(0))
    max_pending: int = MAX_PENDING
    max_descriptors: int = TARGET_DESCRIPTORS


@dataclass(slots=True, eq=False)
class AcceptListener(Generic[Pending]):
    """`pending` by descriptor, the oldest first: all have the same time. `paused_until`: when to accept again.

    `no_room`: the bytes sent to connections that are closed at once.
    """

    listener: socket.socket
    source: MessageSource
    limits: AcceptLimits
    pending: dict[int, Pending] = field(default_factory=dict)
    rate_limiter: RateLimiter = field(default_factory=lambda: RateLimiter(ACCEPT_RATE))
    paused_until: float = 0.0
    no_room: bytes = b""

    def accept(self, turn_away: Callable[[Pending], None]) -> tuple[socket.socket, str] | None:
        """Accept a connection, and return it with its address ('' on a Unix socket); None where there is none.

        Args:
            turn_away: closes the connection of the oldest, where there are too many, and takes it out of `pending`.
        """
        house = self.limits
        try:
            connection, address = self.listener.accept()
        except OSError as error:  # the guest has gone again, or we are out of descriptors: the next may fare better
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                log.warning("a connection could not be accepted: %s", error)
                house.rejections.count_limit(Limit.DESCRIPTORS)
                self.paused_until = time.monotonic() + PAUSE_SECONDS
            return None
        now = time.monotonic()
        if delay := self.rate_limiter.reserve(None, now):
            self.paused_until = now + delay
        host = address[0] if isinstance(address, tuple) else ""
        if not has_descriptor_room(house.max_descriptors, connection.fileno()):
            log.warning(
                "the connection %s was closed at once: nearly all of %d descriptors are in use",
                describe_peer(connection),
                house.max_descriptors,
            )
            self._close(connection, Limit.DESCRIPTORS)
            return None
        if len(self.pending) >= house.max_pending:
            log.warning("%d connections have not identified themselves: the oldest is closed", house.max_pending)
            house.rejections.count_limit(Limit.HANDSHAKES)
            turn_away(next(iter(self.pending.values())))
        return connection, host

    def _close(self, connection: socket.socket, why: Limit) -> None:
        self.limits.rejections.count_limit(why)
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            if self.no_room:
                connection.send(self.no_room)

    def collect_expired(self, now: float) -> list[Pending]:
        """Return those whose time is over; each is counted."""
        found = list(takewhile(lambda guest: guest.deadline <= now, self.pending.values()))
        for _ in found:
            self.limits.rejections.count_limit(Limit.HANDSHAKES)
        return found

    def deadlines(self, now: float) -> Iterator[float]:
        """Return when something is to be done here."""
        if self.pending:
            yield next(iter(self.pending.values())).deadline
        if self.paused_until:
            yield max(now, self.paused_until)

    def try_reopen(self, now: float) -> bool:
        """Whether it was closed and is open again from now on."""
        if not self.paused_until or self.paused_until > now:
            return False
        self.paused_until = 0.0
        return True


def listen_for_links(host: str, port: int) -> socket.socket:
    """A TCP socket that listens there; of a name that stands for addresses of both versions at the one of version 4,
    which is the one that is dialled.

    Raises:
        OSError: that cannot be.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return socket.create_server((str(address[0]), port), family=family, backlog=128)


def get_peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """The pid and uid of the peer of a Unix socket."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def describe_peer(connection: socket.socket) -> str:
    """Where a connection comes from, for people."""
    if connection.family == socket.AF_UNIX:
        pid, uid = get_peer_credentials(connection)
        return f"from a client (pid {pid}, uid {uid})"
    try:
        return f"from {format_address(*connection.getpeername()[:2])}"
    except OSError:
        return "from a caller that has left"


def format_address(host: str, port: int) -> str:
    """`host:port`, as it is parsed again."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(door: socket.socket, path: str) -> None:
    """Give a socket its path, where a worker that was killed may have left a file.

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
