"""The coordinator process: composes mind, shell and server, says `ready`, and stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc.aio
from collectived_proto.v1 import coordinator_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from collectived_runtime.admission import Admission
from collectived_runtime.coordinator.journal import next_epoch
from collectived_runtime.coordinator.service import CoordinatorService
from collectived_runtime.coordinator.state import Coordinator

SERVICE = "collectived.v1.Coordinator"
_GRACE_SECONDS = 1.0
_LONGEST_PATH = 107  # of a Unix socket on Linux
_LARGEST_MESSAGE = 64 << 20
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second server on the same port would silently share it
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
)


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """
    job: name of the job, for status.
    listen: addresses to serve at, `unix:/path` or `host:port`; port 0 is one that is free.
    secret: what callers over TCP must show; empty: they are all refused.
    heartbeat_seconds: how often workers are to be heard; lost after two of these.
    stall_seconds: after how long of waiting a lane reports an instance as pending.
    insecure: let everybody in.
    journal: file of one line that keeps epochs rising over restarts.
    """

    job: str
    listen: tuple[str, ...]
    secret: str
    heartbeat_seconds: float = 5.0
    stall_seconds: float = 1.0
    insecure: bool = False
    journal: Path | None = None


async def serve(settings: CoordinatorSettings, lifeline: Awaitable[None] | None = None) -> None:
    """Serves until SIGTERM, SIGINT, or until `lifeline` is done.

    Prints `ready ` and a JSON object (address, addresses, epoch, pid) on one line when it serves.

    Raises:
        SystemExit: an address or the journal cannot be used, or a later coordinator is obeyed; said on stderr.
    """
    with _signals() as signalled:
        try:
            epoch = next_epoch(settings.journal)
        except (OSError, ValueError) as error:
            _fail(f"the epoch journal cannot be used: {error}")
        mind = Coordinator(epoch, settings.heartbeat_seconds, settings.stall_seconds)
        service = CoordinatorService(mind, settings.job)
        server = grpc.aio.server(interceptors=[Admission(settings.secret, settings.insecure)], options=_OPTIONS)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
        doctor = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(doctor, server)
        addresses = [bind(server, address) for address in settings.listen]
        await server.start()
        try:
            await doctor.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
            service.address = addresses[0]
            ready = {"address": addresses[0], "addresses": addresses, "epoch": epoch, "pid": os.getpid()}
            print(f"ready {json.dumps(ready)}", flush=True)
            await _until_stopped(signalled, lifeline, service.ended)
        finally:
            await doctor.enter_graceful_shutdown()
            service.stop()
            await server.stop(_GRACE_SECONDS)
            _remove_sockets(addresses)
        if service.ended.done():
            _fail(service.ended.result())


def bind(server: grpc.aio.Server, address: str) -> str:
    """Adds a port to a server; the address with its real port.

    Raises:
        SystemExit: nobody can listen there.
    """
    local = address.startswith("unix:")
    # Asked first of the system itself: gRPC takes a socket away from whoever serves it, and gives no reasons.
    reason = _unix_refusal(address.removeprefix("unix:")) if local else _tcp_refusal(address)
    if reason:
        _fail(
            f"cannot listen at {address}: {reason}; stop whoever uses it, or listen at another "
            f"{'path' if local else 'address (port 0 is one that is free)'}"
        )
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        _fail(f"cannot listen at {address}: {error}")
    return address if local else f"{address.rpartition(':')[0]}:{port}"


def _unix_refusal(path: str) -> str:
    """Why no socket can be served at a path; '' where it can."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        return f"the path is longer than {_LONGEST_PATH} bytes"
    folder = os.path.dirname(path) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the directory {folder} does not exist or may not be written"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return ""  # nobody there, or only the file that a killed process left
        return "it is in use by another process"


def _tcp_refusal(address: str) -> str:
    """Why no port can be opened at an address; '' where it can."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        return "expected host:port or unix:/path"
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in found[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                probe.listen()  # only now two that both may reuse an address are told apart
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def _remove_sockets(addresses: list[str]) -> None:
    for address in addresses:
        path = address.removeprefix("unix:")
        if path != address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    try:
        yield signalled
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _until_stopped(
    signalled: asyncio.Event, lifeline: Awaitable[None] | None, ended: asyncio.Future[str]
) -> None:
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(signalled.wait())]
    if lifeline is not None:
        waits.append(asyncio.ensure_future(lifeline))
    try:
        await asyncio.wait([*waits, ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _fail(text: str) -> NoReturn:
    print(f"collectived coordinator: {text}", file=sys.stderr, flush=True)
    raise SystemExit(1)
