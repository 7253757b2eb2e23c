"""The proxy: stands at the Unix sockets of a gRPC server, and knows the user of each of its callers.

gRPC does not report the peer of a Unix socket. So the proxy listens in its place, asks the kernel
(`SO_PEERCRED`), and carries the bytes to a socket of the server that has no name any more, so that no other process can
find it. Each of its connections has a name that was never used before. By this name, which gRPC calls the peer of a
call, it finds the peer again. Strangers are carried too, so that they get an answer with a reason: `callers.py` decides
for each call whether they may make it.

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

from collectived_runtime.auth.peers import AllowedUsers, UnixPeer, apply_folder_mode, get_unix_peer, set_socket_mode
from collectived_runtime.limits.passed_descriptors import create_unix_socket
from collectived_runtime.limits.rejections import Limit, RejectionCounters

log = logging.getLogger("collectived.proxy")

FIRST_BYTE_SECONDS = 10.0  # for which a caller may say nothing before it is shown out
_BACKLOG = 512
_ABSTRACT_PEER_PREFIX = "unix-abstract:"  # how gRPC begins the names of such peers


class PeerCredentialProxy:
    """Runs in the event loop of its daemon.

    Args:
        invited: the users that may use the daemon.
        most: connections that it holds; more are closed as they come. Each takes three descriptors.
        refusals: counts those.
    """

    def __init__(self, invited: AllowedUsers, most: int, refusals: RejectionCounters | None = None) -> None:
        self._allowed = invited
        self._max_connections = most
        self._rejections = refusals or RejectionCounters()
        self._listeners: list[tuple[socket.socket, int, AllowedUsers]] = []
        self._servers: list[asyncio.Server] = []
        self._peers_by_name: dict[str, tuple[UnixPeer, AllowedUsers]] = {}
        self._clients: set[ClientSide] = set()
        self._connections_by_uid: Counter[int] = Counter()

    def listen(self, server: grpc.aio.Server, path: str) -> None:
        """Take a place in front of a server, at a path.

        Raises:
            OSError, RuntimeError: there can be no socket.
            StartupError: the folder does not let in the users that may use the daemon.
        """
        guests = apply_folder_mode(self._allowed, Path(path).parent)
        inside = _add_unlinked_socket(server, os.path.dirname(path) or ".")
        outside = create_unix_socket(socket.SOCK_STREAM)
        try:
            if os.path.lexists(path):
                os.unlink(path)  # a killed daemon left it: whether a process serves there was checked before
            outside.bind(path)
            set_socket_mode(path, self._allowed)
            outside.listen(_BACKLOG)
        except OSError:
            outside.close()
            os.close(inside)
            raise
        self._listeners.append((outside, inside, guests))

    async def start(self) -> None:
        """Begin to listen; callers that came meanwhile have waited."""
        loop = asyncio.get_running_loop()
        for outside, inside, guests in self._listeners:

            def admit(inside: int = inside, guests: AllowedUsers = guests) -> ClientSide:
                return ClientSide(self, inside, guests)

            self._servers.append(await loop.create_unix_server(admit, sock=outside, backlog=_BACKLOG))

    def find_peer(self, name: str) -> tuple[UnixPeer, AllowedUsers] | None:
        """Find the peer of a call by gRPC's name for it, and the users that its socket serves.

        None: no peer of these sockets, as where the call came over TCP.
        """
        return self._peers_by_name.get(name)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for guest in list(self._clients):
            guest.close()
        for outside, inside, _ in self._listeners:
            outside.close()
            os.close(inside)
        self._listeners.clear()


class ClientSide(asyncio.Protocol):
    """A connection of a peer. It reaches the server when the peer sends something."""

    def __init__(self, proxy: PeerCredentialProxy, inside: int, guests: AllowedUsers) -> None:
        self._proxy, self._server_fd, self._allowed = proxy, inside, guests
        self._buffered: list[bytes] | None = []  # until it is carried
        self._counted_uid: int | None = None  # the user for which a place is taken
        self._connect_task: asyncio.Task[None] | None = None
        self._server_side: ServerSide | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if not self._try_acquire_slot():
            self._proxy._rejections.count_limit(Limit.DESCRIPTORS)
            transport.abort()
        self._proxy._clients.add(self)
        self._first_byte_timer = asyncio.get_running_loop().call_later(FIRST_BYTE_SECONDS, transport.abort)

    def _try_acquire_slot(self) -> bool:
        """Whether there is a place for it, which it has from then on.

        Each user whom the daemon need not trust has an eighth of all at most.
        """
        proxy = self._proxy
        try:
            peer = get_unix_peer(self.transport.get_extra_info("socket"))
        except OSError:
            return False
        share = proxy._max_connections if self._allowed.is_trusted(peer) else max(1, proxy._max_connections // 8)
        if proxy._connections_by_uid.total() >= proxy._max_connections or proxy._connections_by_uid[peer.uid] >= share:
            return False
        self._counted_uid = peer.uid
        proxy._connections_by_uid[peer.uid] += 1
        return True

    def data_received(self, data: bytes) -> None:
        if self._server_side is not None:
            self._server_side.transport.write(data)
            return
        assert self._buffered is not None
        self._buffered.append(data)
        if self._connect_task is None:
            self._first_byte_timer.cancel()
            self.transport.pause_reading()
            self._connect_task = asyncio.ensure_future(self._connect_to_server())

    async def _connect_to_server(self) -> None:
        """Connect it to the server, under a name of its own."""
        name = f"collectived-{secrets.token_hex(16)}"
        within = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer = get_unix_peer(self.transport.get_extra_info("socket"))
            within.setblocking(False)
            within.bind(f"\0{name}")
            within.connect(f"/proc/self/fd/{self._server_fd}")
        except OSError as error:  # the server is ending, or has too many that wait
            log.warning("a caller at a Unix socket could not be let in: %s", error.strerror or error)
            within.close()
            self.transport.abort()
            return
        key = f"{_ABSTRACT_PEER_PREFIX}{name}"
        self._proxy._peers_by_name[key] = peer, self._allowed
        server = ServerSide(self, lambda: self._proxy._peers_by_name.pop(key, None))
        await asyncio.get_running_loop().connect_accepted_socket(lambda: server, within)
        if self.transport.is_closing():
            server.transport.close()
            return
        self._server_side = server
        for data in self._buffered or ():
            server.transport.write(data)
        self._buffered = None
        self.transport.resume_reading()

    def close(self) -> None:
        self.transport.abort()
        if self._connect_task is not None:
            self._connect_task.cancel()

    def pause_writing(self) -> None:
        if self._server_side is not None:
            self._server_side.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._server_side is not None:
            self._server_side.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._first_byte_timer.cancel()
        self._proxy._clients.discard(self)
        if self._counted_uid is not None:
            self._proxy._connections_by_uid[self._counted_uid] -= 1
            if not self._proxy._connections_by_uid[self._counted_uid]:
                del self._proxy._connections_by_uid[self._counted_uid]
        if self._server_side is not None:
            self._server_side.transport.close()


class ServerSide(asyncio.Protocol):
    """The same connection as the server has it."""

    def __init__(self, guest: ClientSide, gone: Callable[[], object]) -> None:
        self._client_side, self._on_closed = guest, gone

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._client_side.transport.write(data)

    def pause_writing(self) -> None:
        self._client_side.transport.pause_reading()

    def resume_writing(self) -> None:
        self._client_side.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_closed()
        self._client_side.transport.close()


def _add_unlinked_socket(server: grpc.aio.Server, folder: str) -> int:
    """Add a Unix socket to a server and take its name away; a descriptor by which this process can still connect.

    The folder in which it was made belongs to this process alone, and is removed with it.
    """
    private = tempfile.mkdtemp(prefix=".", dir=folder)
    directory = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        server.add_insecure_port(f"unix:/proc/self/fd/{directory}/s")  # however long the folder's own name is
        return os.open(f"{private}/s", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    finally:
        os.close(directory)
        shutil.rmtree(private, ignore_errors=True)
