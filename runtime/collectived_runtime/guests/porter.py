"""The porter: stands at the Unix sockets of a gRPC server, and knows who each of its callers is.

gRPC does not say who is at the other end of a Unix socket. So the porter listens in its place, asks the kernel
(`SO_PEERCRED`), and carries the bytes to a socket of the server that has no name any more, hence can be found by nobody
else. What it connects from has a name that was never used before; by this name, which gRPC calls the peer of a call, it
finds again whom it carries for. Strangers are carried too, so that they get an answer with a reason: what they may do
is decided, call by call, by `callers.py`.

Nothing is looked at on the way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from collectived_runtime.guests.folders import open_to_folder
from collectived_runtime.guests.peers import Guests, Peer, peer_of, with_folder
from collectived_runtime.limits.refusals import Limit, Refusals

log = logging.getLogger("collectived.porter")

SILENT_SECONDS = 10.0  # for which a caller may say nothing before it is shown out
_BACKLOG = 512
_ABSTRACT = "unix-abstract:"  # how gRPC begins the names of such peers


class Porter:
    """Runs in the event loop of its daemon.

    Args:
        invited: whom it lets use the daemon.
        most: connections that it holds; more are closed as they come. Each takes three descriptors.
        refusals: counts those.
    """

    def __init__(self, invited: Guests, most: int, refusals: Refusals | None = None) -> None:
        self._invited = invited
        self._most = most
        self._refusals = refusals or Refusals()
        self._listeners: list[tuple[socket.socket, int, Guests]] = []
        self._servers: list[asyncio.Server] = []
        self._callers: dict[str, tuple[Peer, Guests]] = {}
        self._guests: set[_Guest] = set()
        self._by_user: Counter[int] = Counter()

    @property
    def names_guests(self) -> bool:
        """Whether guests are named one by one."""
        return bool(self._invited.users or self._invited.groups)

    def listen(self, server: grpc.aio.Server, path: str) -> None:
        """Takes a place in front of a server, at a path.

        Raises:
            OSError, RuntimeError: there can be no socket.
            CannotStart: the folder does not let those in who are invited.
        """
        guests = with_folder(self._invited, Path(path).parent)
        inside = _unnamed(server, os.path.dirname(path) or ".")
        outside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if os.path.lexists(path):
                os.unlink(path)  # a killed daemon left it: whether anybody serves there was asked before
            outside.bind(path)
            open_to_folder(path, self.names_guests)
            outside.listen(_BACKLOG)
        except OSError:
            outside.close()
            os.close(inside)
            raise
        self._listeners.append((outside, inside, guests))

    async def start(self) -> None:
        """Opens the doors; callers that came meanwhile have waited."""
        loop = asyncio.get_running_loop()
        for outside, inside, guests in self._listeners:

            def admit(inside: int = inside, guests: Guests = guests) -> _Guest:
                return _Guest(self, inside, guests)

            self._servers.append(await loop.create_unix_server(admit, sock=outside, backlog=_BACKLOG))

    def caller(self, name: str) -> tuple[Peer, Guests] | None:
        """Who makes a call, by what gRPC calls its peer, and whom the socket at which it came is for.

        None: nobody who is here, as where the call came over TCP.
        """
        return self._callers.get(name)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for guest in list(self._guests):
            guest.close()
        for outside, inside, _ in self._listeners:
            outside.close()
            os.close(inside)
        self._listeners.clear()


class _Guest(asyncio.Protocol):
    """A connection of somebody; the server hears of it when they say something."""

    def __init__(self, porter: Porter, inside: int, guests: Guests) -> None:
        self._porter, self._inside, self._guests = porter, inside, guests
        self._said: list[bytes] | None = []  # until it is carried
        self._uid: int | None = None  # of whom a place is taken for
        self._carrying: asyncio.Task[None] | None = None
        self._server: _Server | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if not self._takes_place():
            self._porter._refusals.limit(Limit.DESCRIPTORS)
            transport.abort()
        self._porter._guests.add(self)
        self._silent = asyncio.get_running_loop().call_later(SILENT_SECONDS, transport.abort)

    def _takes_place(self) -> bool:
        """Whether there is a place for it, which it has from then on.

        Each user whom the daemon need not trust has an eighth of all at most.
        """
        porter = self._porter
        try:
            peer = peer_of(self.transport.get_extra_info("socket"))
        except OSError:
            return False
        share = porter._most if self._guests.trusts(peer) else max(1, porter._most // 8)
        if porter._by_user.total() >= porter._most or porter._by_user[peer.uid] >= share:
            return False
        self._uid = peer.uid
        porter._by_user[peer.uid] += 1
        return True

    def data_received(self, data: bytes) -> None:
        if self._server is not None:
            self._server.transport.write(data)
            return
        assert self._said is not None
        self._said.append(data)
        if self._carrying is None:
            self._silent.cancel()
            self.transport.pause_reading()
            self._carrying = asyncio.ensure_future(self._carry())

    async def _carry(self) -> None:
        """Connects it to the server, under a name of its own."""
        name = f"collectived-{secrets.token_hex(16)}"
        within = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer = peer_of(self.transport.get_extra_info("socket"))
            within.setblocking(False)
            within.bind(f"\0{name}")
            within.connect(f"/proc/self/fd/{self._inside}")
        except OSError as error:  # the server is ending, or has too many that wait
            log.warning("a caller at a Unix socket could not be let in: %s", error.strerror or error)
            within.close()
            self.transport.abort()
            return
        key = f"{_ABSTRACT}{name}"
        self._porter._callers[key] = peer, self._guests
        server = _Server(self, lambda: self._porter._callers.pop(key, None))
        await asyncio.get_running_loop().connect_accepted_socket(lambda: server, within)
        if self.transport.is_closing():
            server.transport.close()
            return
        self._server = server
        for data in self._said or ():
            server.transport.write(data)
        self._said = None
        self.transport.resume_reading()

    def close(self) -> None:
        self.transport.abort()
        if self._carrying is not None:
            self._carrying.cancel()

    def pause_writing(self) -> None:
        if self._server is not None:
            self._server.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._server is not None:
            self._server.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._silent.cancel()
        self._porter._guests.discard(self)
        if self._uid is not None:
            self._porter._by_user[self._uid] -= 1
            if not self._porter._by_user[self._uid]:
                del self._porter._by_user[self._uid]
        if self._server is not None:
            self._server.transport.close()


class _Server(asyncio.Protocol):
    """The same connection as the server has it."""

    def __init__(self, guest: _Guest, gone: Callable[[], object]) -> None:
        self._guest, self._gone = guest, gone

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._guest.transport.write(data)

    def pause_writing(self) -> None:
        self._guest.transport.pause_reading()

    def resume_writing(self) -> None:
        self._guest.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._gone()
        self._guest.transport.close()


def _unnamed(server: grpc.aio.Server, folder: str) -> int:
    """Adds a Unix socket to a server and takes its name away; a descriptor by which this process can still connect.

    The folder in which it was made is nobody else's, and is gone with it.
    """
    private = tempfile.mkdtemp(prefix=".", dir=folder)
    directory = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        server.add_insecure_port(f"unix:/proc/self/fd/{directory}/s")  # however long the folder's own name is
        return os.open(f"{private}/s", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    finally:
        os.close(directory)
        shutil.rmtree(private, ignore_errors=True)
