"""The coordinator process: composes mind, shell and server, says `ready`, and stops in order."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import sys
from collections.abc import Awaitable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import grpc.aio

from collectived_proto.configuration.daemons import CoordinatorSettings
from collectived_proto.v1 import coordinator_pb2_grpc, status_pb2
from collectived_runtime.admission import Admission, check_exposed
from collectived_runtime.cannot_start import CannotStart
from collectived_runtime.certificates import Certificates, certificates
from collectived_runtime.coordinator import table_file
from collectived_runtime.coordinator.journal import next_epoch
from collectived_runtime.coordinator.roll import Roll
from collectived_runtime.coordinator.service import CoordinatorService
from collectived_runtime.coordinator.state import Coordinator
from collectived_runtime.credentials import Gate, gate
from collectived_runtime.daemon import bind, ready, remove_sockets, server_options, signals, until_stopped
from collectived_runtime.guests.callers import Callers
from collectived_runtime.guests.peers import guests
from collectived_runtime.guests.porter import Porter
from collectived_runtime.health import Health, reflect
from collectived_runtime.limits.descriptors import RESERVE, connections_at_most, raise_limit
from collectived_runtime.limits.refusals import Refusals
from collectived_runtime.pacing import Pacing
from collectived_runtime.well_formed import WellFormed

if TYPE_CHECKING:
    from collectived_runtime.http.server import HttpServer

SERVICE = "collectived.v1.Coordinator"
_GRACE_SECONDS = 1.0
# Else gRPC measures each connection for the window that it deserves, by a ping whenever something came: a third of what
# a heartbeat costs. Workers say little, and the usual window is more than they need.
_OPTIONS = (("grpc.http2.bdp_probe", 0),)
_COLLECT_AFTER = 10_000  # objects, instead of 700


async def serve(settings: CoordinatorSettings, lifeline: Awaitable[None] | None = None) -> None:
    """Serves until SIGTERM, SIGINT, or until `lifeline` is done.

    Prints `ready ` and a JSON object (address, addresses, epoch, pid, page) on one line when it serves.

    Raises:
        SystemExit: an address, the journal, its roll or the file of tables cannot be used, or a later coordinator is
            obeyed; the reason has been printed.
    """
    with signals() as signalled, _collecting_rarely():
        try:
            tls = certificates(settings, settings.listen)
            check_exposed(settings.listen, settings.secret, settings.insecure, tls.mutual)
            callers = gate(settings)
            refusals, descriptors = Refusals(), raise_limit()
            porter = Porter(guests(settings.allow_users, settings.allow_groups), descriptors // 9, refusals)
        except (CannotStart, ValueError) as error:
            _fail(str(error))
        epoch = _epoch(settings)
        service = _service(epoch, settings)
        connections = connections_at_most(
            settings.max_connections, descriptors - min(RESERVE, descriptors // 4), len(settings.listen)
        )
        server = grpc.aio.server(
            interceptors=[
                Admission(Callers(callers, porter, tls.mutual), refusals),
                Pacing(refusals),
                WellFormed(refusals),
            ],
            options=(*server_options(settings.max_message, connections), *_OPTIONS),
        )
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
        health = Health(SERVICE, server)
        async with contextlib.AsyncExitStack() as views:
            try:
                if settings.reflection:
                    reflect(server, SERVICE)
                metrics = _metrics(settings, service, health, callers, refusals, tls, views)
                page = _page(settings, service, health, callers, tls, views)
                credentials = tls.server_credentials() if tls.serves else None
                addresses = [bind(server, address, porter, credentials) for address in settings.listen]
            except CannotStart as error:
                _fail(str(error))
            await server.start()
            await porter.start()
            for view in (metrics, page):
                if view:
                    await view.start()
            try:
                await health.start()
                service.address, service.insecure = addresses[0], callers.insecure
                ready(
                    {
                        "address": addresses[0],
                        "addresses": addresses,
                        "epoch": epoch,
                        "metrics": metrics.address if metrics else "",
                        "pid": os.getpid(),
                        "tls": tls.serves,
                        "page": {"url": page.url, "needs_token": not callers.insecure} if page else None,
                    }
                )
                await until_stopped(signalled, lifeline, service.ended)
            finally:
                await health.stop()
                await views.aclose()
                service.stop()
                await server.stop(_GRACE_SECONDS)
                porter.close()
                remove_sockets(addresses)
        if service.ended.done():
            _fail(service.ended.result())


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """A stream is a hundred objects that stay: while thousands come, the collector would look at them again and again,
    for a quarter of the time that they take."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _epoch(settings: CoordinatorSettings) -> int:
    try:
        return next_epoch(settings.journal)
    except (OSError, ValueError) as error:
        _fail(f"the epoch journal cannot be used: {error}")


def _service(epoch: int, settings: CoordinatorSettings) -> CoordinatorService:
    tables = settings.tables or (table_file.default_path() if settings.tune else None)
    try:
        stored = table_file.read(tables) if tables else {}
    except (OSError, ValueError) as error:
        _fail(f"the stored tables cannot be used: {error}")
    try:
        roll = Roll(settings.journal.with_name(f"{settings.journal.name}.workers") if settings.journal else None)
    except (OSError, ValueError) as error:
        _fail(f"the roll of workers cannot be used: {error}")
    most = (settings.max_groups, settings.max_group_ranks)
    links = "" if settings.secret else secrets.token_hex(32)
    times = (settings.heartbeat_seconds, settings.stall_seconds)
    mind = Coordinator(epoch, *times, settings.tune, stored, *most, link_secret=links)
    if tables:
        return CoordinatorService(mind, settings.job, store=partial(table_file.store, tables), roll=roll)
    return CoordinatorService(mind, settings.job, roll=roll)


def _metrics(
    settings: CoordinatorSettings,
    service: CoordinatorService,
    health: Health,
    callers: Gate,
    refusals: Refusals,
    tls: Certificates,
    views: contextlib.AsyncExitStack,
) -> HttpServer | None:
    if not settings.metrics:
        return None
    from collectived_runtime.coordinator.metrics import CoordinatorMetrics
    from collectived_runtime.metrics.route import metrics_server  # most coordinators serve none

    source = CoordinatorMetrics(service.census, callers.refused, refusals)
    server = metrics_server(settings.metrics, source, lambda: health.well, callers, tls.pages if tls.serves else None)
    views.push_async_callback(server.stop)
    return server


def _page(
    settings: CoordinatorSettings,
    service: CoordinatorService,
    health: Health,
    callers: Gate,
    tls: Certificates,
    views: contextlib.AsyncExitStack,
) -> HttpServer | None:
    if not settings.http:
        return None
    from collectived_runtime.coordinator.page.picture import Picture  # most coordinators serve no page
    from collectived_runtime.coordinator.page.routes import page_server

    picture = Picture(partial(service.Status, status_pb2.StatusRequest(), None))
    views.push_async_callback(picture.close)
    server = page_server(settings.http, picture, lambda: health.well, callers, tls.pages if tls.serves else None)
    views.push_async_callback(server.stop)
    return server


def _fail(text: str) -> NoReturn:
    print(f"collectived coordinator: {text}", file=sys.stderr, flush=True)
    raise SystemExit(1)
