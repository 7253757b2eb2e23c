"""The common part of all daemons: listen at a free address, print `ready`, and stop in order when asked to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToJson

from collectived_proto.addresses import parse_address
from collectived_proto.ipc.job_files import MAX_SOCKET_PATH
from collectived_proto.v1.status_pb2 import DrainReply
from collectived_runtime.auth.unix_proxy import PeerCredentialProxy
from collectived_runtime.startup_error import StartupError

_LARGEST_MESSAGE = 64 << 20
_RECEIVE = "grpc.max_receive_message_length"
CHANNEL_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second server on the same port would silently share it
    (_RECEIVE, _LARGEST_MESSAGE),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
)
HANDSHAKE_SECONDS = 10.0  # in which a connection must say that it speaks HTTP/2
IDLE_SECONDS = 600.0  # after which a connection without calls is closed; the next call makes another
MAX_STREAMS = 1024  # calls that one connection may have under way: some ranks with all that they may have in flight
MAX_METADATA_BYTES = 16 << 10  # bytes


def server_options(most_message: int, most_connections: int) -> tuple[tuple[str, int], ...]:
    """The limits of a gRPC server for callers: sizes in bytes, connections at each of its addresses."""
    return (
        *(option for option in CHANNEL_OPTIONS if option[0] != _RECEIVE),
        (_RECEIVE, most_message),
        ("grpc.max_allowed_incoming_connections", most_connections),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1000)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    )


def print_ready(announcement: Mapping[str, object]) -> None:
    """Announce to the process that started this daemon that it serves, and where."""
    print(f"ready {json.dumps(announcement)}", flush=True)


def print_drained(reply: DrainReply) -> None:
    """Report the result of the drain to the process that started this daemon."""
    print(f"drained {MessageToJson(reply, indent=None)}", flush=True)


def bind(
    server: grpc.aio.Server,
    address: str,
    proxy: PeerCredentialProxy,
    credentials: grpc.ServerCredentials | None = None,
) -> str:
    """Add a port to a server, with the proxy before it where it is a Unix socket; the address with its real port.

    Args:
        credentials: for TLS, which Unix sockets do without.

    Raises:
        StartupError: the address cannot be used.
    """
    local = address.startswith("unix:")
    # Asked first of the system itself: gRPC takes a socket away from the process that serves it, and gives no reasons.
    reason = _unix_bind_error(address.removeprefix("unix:")) if local else _tcp_bind_error(address)
    if reason:
        raise StartupError(
            f"cannot listen at {address}: {reason}; stop the process that uses it, or listen at another "
            f"{'path' if local else 'address (port 0 is one that is free)'}"
        )
    try:
        if local:
            path = address.removeprefix("unix:")
            proxy.listen(server, path)
            return address
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except (OSError, RuntimeError) as error:
        raise StartupError(f"cannot listen at {address}: {error}") from None
    return f"{address.rpartition(':')[0]}:{port}"


def _unix_bind_error(path: str) -> str:
    """Why no socket can be served at a path; '' where it can."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        return f"the path is longer than {MAX_SOCKET_PATH} bytes"
    folder = os.path.dirname(path) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the directory {folder} does not exist or may not be written"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return ""  # no process there, or only the file that a killed process left
        return "it is in use by another process"


def _tcp_bind_error(address: str) -> str:
    """Why no port can be opened at an address; '' where it can."""
    try:
        host, port = parse_address(address)
    except ValueError:
        return "expected host:port or unix:/path"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in found[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                probe.listen()  # only now two that both may reuse an address are told apart
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def list_listen_addresses(wanted: Sequence[str], default: str) -> list[str]:
    """The addresses to serve at: always one Unix socket, first, and TCP addresses where some are wanted.

    Raises:
        ValueError: two Unix sockets are wanted.
    """
    local = [address for address in wanted if address.startswith("unix:")]
    if len(local) > 1:
        raise ValueError(
            f"a worker serves at one Unix socket, got {' and '.join(local)}: the others can be symbolic links"
        )
    return [*(local or [default]), *(_add_default_host(address) for address in wanted if address not in local)]


def _add_default_host(address: str) -> str:
    host, colon, port = address.rpartition(":")
    return address if host or not colon else f"127.0.0.1:{port}"


def remove_sockets(addresses: Iterable[str]) -> None:
    for address in addresses:
        path = address.removeprefix("unix:")
        if path != address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class StopEvent(asyncio.Event):
    """Set by SIGTERM and SIGINT; `number` is the latest of them."""

    number = 0

    def on_signal(self, number: int) -> None:
        self.number = number
        self.set()


@contextlib.contextmanager
def catch_stop_signals() -> Iterator[StopEvent]:
    """Return an event that SIGTERM and SIGINT set."""
    loop = asyncio.get_running_loop()
    signalled = StopEvent()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.on_signal, number)
    try:
        yield signalled
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def wait_until_stopped(
    signalled: asyncio.Event, lifeline: Awaitable[None] | None, *others: asyncio.Future[Any]
) -> None:
    """Wait for a signal, for the end of the lifeline, or for any of the others, which are left as they are."""
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(signalled.wait())]
    if lifeline is not None:
        waits.append(asyncio.ensure_future(lifeline))
    try:
        await asyncio.wait([*waits, *others], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
