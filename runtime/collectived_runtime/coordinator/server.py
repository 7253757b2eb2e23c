"""The coordinator process: composes core, shell and server, says `ready`, and stops in order."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import sys
from collections.abc import Awaitable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from collectived_proto.config.daemons import CoordinatorSettings
from collectived_proto.v1 import coordinator_pb2_grpc, status_pb2
from collectived_runtime.auth.certificates import Certificates, load_certificates
from collectived_runtime.auth.credentials import TokenAuthenticator
from collectived_runtime.coordinator import files
from collectived_runtime.coordinator.core.coordinator import Coordinator
from collectived_runtime.coordinator.files import TaskIdFile, next_epoch
from collectived_runtime.coordinator.service import CoordinatorService
from collectived_runtime.grpc_server.authentication import check_exposed
from collectived_runtime.grpc_server.guard import ServerGuard
from collectived_runtime.grpc_server.health import Health, add_reflection
from collectived_runtime.limits.descriptors import RESERVED_DESCRIPTORS, compute_connection_limit
from collectived_runtime.limits.quota_settings import GroupLimits
from collectived_runtime.process import (
    bind,
    catch_stop_signals,
    print_ready,
    remove_sockets,
    server_options,
    wait_until_stopped,
)
from collectived_runtime.startup_error import StartupError

if TYPE_CHECKING:
    from collectived_runtime.http.server import HttpServer

SERVICE = "collectived.v1.Coordinator"
_GRACE_SECONDS = 1.0
# Else gRPC measures each connection for the window that it deserves, by a ping whenever something came: a third of what
# a heartbeat costs. Workers say little, and the usual window is more than they need.
_OPTIONS = (("grpc.http2.bdp_probe", 0),)
_GC_THRESHOLD = 10_000  # objects, instead of 700


async def serve(settings: CoordinatorSettings, lifeline: Awaitable[None] | None = None) -> None:
    """Serve until SIGTERM, SIGINT, or until `lifeline` is done.

    Prints `ready ` and a JSON object (address, addresses, epoch, pid, page) on one line when it serves.

    Raises:
        SystemExit: an address, the journal or a file beside it cannot be used, or a later coordinator is obeyed; the
            reason has been printed.
    """
    with catch_stop_signals() as signalled, _rare_gc():
        try:
            tls = load_certificates(settings, settings.listen)
            check_exposed(settings.listen, settings.secret, settings.insecure, tls.is_mutual)
            guard = ServerGuard(settings, tls.is_mutual)
        except (StartupError, ValueError) as error:
            _fail(str(error))
        epoch, restarted = _read_epoch(settings)
        service = _make_service(epoch, settings)
        authenticator, descriptors = guard.authenticator, guard.descriptor_limit
        connections = compute_connection_limit(
            settings.max_connections, descriptors - min(RESERVED_DESCRIPTORS, descriptors // 4), len(settings.listen)
        )
        server = guard.create_server((*server_options(settings.max_message, connections), *_OPTIONS))
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
        health = Health(SERVICE, server)
        async with contextlib.AsyncExitStack() as views:
            try:
                if settings.reflection:
                    add_reflection(server, SERVICE)
                metrics = _make_metrics_server(settings, service, health, guard, tls, views)
                page = _make_page_server(settings, service, health, authenticator, tls, views)
                credentials = tls.server_credentials() if tls.has_server_tls else None
                addresses = [bind(server, address, guard.proxy, credentials) for address in settings.listen]
            except StartupError as error:
                _fail(str(error))
            await server.start()
            await guard.proxy.start()
            for view in (metrics, page):
                if view:
                    await view.start()
            try:
                await health.start()
                service.address, service.insecure = addresses[0], authenticator.insecure
                service.restarted = restarted
                print_ready(
                    {
                        "address": addresses[0],
                        "addresses": addresses,
                        "epoch": epoch,
                        "metrics": metrics.address if metrics else "",
                        "pid": os.getpid(),
                        "tls": tls.has_server_tls,
                        "page": {"url": page.url, "needs_token": not authenticator.insecure} if page else None,
                    }
                )
                await wait_until_stopped(signalled, lifeline, service.shutdown_reason)
            finally:
                await health.stop()
                await views.aclose()
                service.stop()
                await server.stop(_GRACE_SECONDS)
                guard.proxy.close()
                remove_sockets(addresses)
        if service.shutdown_reason.done():
            _fail(service.shutdown_reason.result())


@contextlib.contextmanager
def _rare_gc() -> Iterator[None]:
    """A stream is a hundred objects that stay: while thousands come, the collector would look at them again and again,
    for a quarter of the time that they take."""
    before = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _read_epoch(settings: CoordinatorSettings) -> tuple[int, bool]:
    try:
        return next_epoch(settings.journal)
    except (OSError, ValueError) as error:
        _fail(f"the epoch journal cannot be used: {error}")


def _make_service(epoch: int, settings: CoordinatorSettings) -> CoordinatorService:
    tables = settings.tables or (files.default_table_path() if settings.tune else None)
    try:
        stored = files.read_tables(tables) if tables else {}
    except (OSError, ValueError) as error:
        _fail(f"the stored tables cannot be used: {error}")
    try:
        task_ids = TaskIdFile(
            settings.journal.with_name(f"{settings.journal.name}.workers") if settings.journal else None
        )
    except (OSError, ValueError) as error:
        _fail(f"the numbers of workers cannot be used: {error}")
    limits = GroupLimits(settings.max_groups, settings.max_group_ranks)
    links = "" if settings.secret else secrets.token_hex(32)
    times = (settings.heartbeat_seconds, settings.stall_seconds)
    coordinator = Coordinator(epoch, *times, settings.tune, stored, limits, link_secret=links)
    if tables:
        return CoordinatorService(
            coordinator, settings.job, store=partial(files.store_table, tables), task_ids=task_ids
        )
    return CoordinatorService(coordinator, settings.job, task_ids=task_ids)


def _make_metrics_server(
    settings: CoordinatorSettings,
    service: CoordinatorService,
    health: Health,
    guard: ServerGuard,
    tls: Certificates,
    views: contextlib.AsyncExitStack,
) -> HttpServer | None:
    if not settings.metrics:
        return None
    from collectived_runtime.coordinator.metrics import CoordinatorMetrics, collect_metrics
    from collectived_runtime.metrics.route import create_metrics_server  # most coordinators serve none

    source = CoordinatorMetrics(
        lambda: collect_metrics(*service.read_registry()), guard.authenticator.reject_counts, guard.rejections
    )
    server = create_metrics_server(
        settings.metrics,
        source,
        lambda: health.is_healthy,
        guard.authenticator,
        tls.get_http_context if tls.has_server_tls else None,
    )
    views.push_async_callback(server.stop)
    return server


def _make_page_server(
    settings: CoordinatorSettings,
    service: CoordinatorService,
    health: Health,
    callers: TokenAuthenticator,
    tls: Certificates,
    views: contextlib.AsyncExitStack,
) -> HttpServer | None:
    if not settings.http:
        return None
    from collectived_runtime.coordinator.web.cache import StatusCache  # most coordinators serve no page
    from collectived_runtime.coordinator.web.routes import make_page_server

    picture = StatusCache(partial(service.Status, status_pb2.StatusRequest(), None))
    views.push_async_callback(picture.close)
    server = make_page_server(
        settings.http, picture, lambda: health.is_healthy, callers, tls.get_http_context if tls.has_server_tls else None
    )
    views.push_async_callback(server.stop)
    return server


def _fail(text: str) -> NoReturn:
    print(f"collectived coordinator: {text}", file=sys.stderr, flush=True)
    raise SystemExit(1)
