"""The coordinator process: composes mind, shell and server, says `ready`, and stops in order."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Awaitable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import grpc.aio

from collectived_proto.configuration.daemons import CoordinatorSettings
from collectived_proto.v1 import coordinator_pb2_grpc, status_pb2
from collectived_runtime.admission import Admission, check_exposed
from collectived_runtime.coordinator import table_file
from collectived_runtime.coordinator.journal import next_epoch
from collectived_runtime.coordinator.metrics import CoordinatorMetrics
from collectived_runtime.coordinator.roll import Roll
from collectived_runtime.coordinator.service import CoordinatorService
from collectived_runtime.coordinator.state import Coordinator
from collectived_runtime.daemon import OPTIONS, CannotStart, bind, ready, remove_sockets, signals, until_stopped
from collectived_runtime.health import Health, reflect
from collectived_runtime.metrics.server import MetricsServer
from collectived_runtime.well_formed import WellFormed

if TYPE_CHECKING:
    from collectived_runtime.coordinator.page.server import PageServer

SERVICE = "collectived.v1.Coordinator"
_GRACE_SECONDS = 1.0
# Else gRPC measures each connection for the window that it deserves, by a ping whenever something came: a third of what
# a heartbeat costs. Workers say little, and the usual window is more than they need.
_OPTIONS = (*OPTIONS, ("grpc.http2.bdp_probe", 0))
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
            check_exposed(settings.listen, settings.secret, settings.insecure)
        except ValueError as error:
            _fail(str(error))
        try:
            epoch = next_epoch(settings.journal)
        except (OSError, ValueError) as error:
            _fail(f"the epoch journal cannot be used: {error}")
        service = _service(epoch, settings)
        server = grpc.aio.server(
            interceptors=[Admission(settings.secret, settings.insecure), WellFormed()], options=_OPTIONS
        )
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
        health = Health(SERVICE, server)
        metrics, scraped_at = MetricsServer(CoordinatorMetrics(service.census), lambda: health.well), ""
        try:
            if settings.reflection:
                reflect(server, SERVICE)
            if settings.metrics:
                scraped_at = await metrics.start(settings.metrics)
            page = _page(settings, service)
            addresses = [bind(server, address) for address in settings.listen]
        except CannotStart as error:
            await metrics.close()
            _fail(str(error))
        await server.start()
        if page:
            await page.start()
        try:
            await health.start()
            service.address = addresses[0]
            ready(
                {
                    "address": addresses[0],
                    "addresses": addresses,
                    "epoch": epoch,
                    "metrics": scraped_at,
                    "pid": os.getpid(),
                    "page": {"url": page.url, "needs_token": page.needs_token} if page else None,
                }
            )
            await until_stopped(signalled, lifeline, service.ended)
        finally:
            await health.stop()
            await metrics.close()
            if page:
                await page.stop()
            service.stop()
            await server.stop(_GRACE_SECONDS)
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
    mind = Coordinator(epoch, settings.heartbeat_seconds, settings.stall_seconds, settings.tune, stored)
    if tables:
        return CoordinatorService(mind, settings.job, store=partial(table_file.store, tables), roll=roll)
    return CoordinatorService(mind, settings.job, roll=roll)


def _page(settings: CoordinatorSettings, service: CoordinatorService) -> PageServer | None:
    if not settings.http:
        return None
    from collectived_runtime.coordinator.page.picture import Picture  # most coordinators serve no page
    from collectived_runtime.coordinator.page.server import PageServer

    return PageServer(
        settings.http,
        Picture(partial(service.Status, status_pb2.StatusRequest(), None)),
        settings.secret,
        settings.insecure,
    )


def _fail(text: str) -> NoReturn:
    print(f"collectived coordinator: {text}", file=sys.stderr, flush=True)
    raise SystemExit(1)
