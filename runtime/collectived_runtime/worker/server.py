"""The worker daemon: composes concrete parts, serves, ends in order."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from collectived_native.cores import count_cores
from collectived_proto.addresses import parse_address
from collectived_proto.codec import versions_to_proto
from collectived_proto.config.daemons import WorkerSettings
from collectived_proto.devices import DeviceName
from collectived_proto.error_status import describe_failure
from collectived_proto.errors import CollectiveError, UnavailableError
from collectived_proto.ipc.job_files import check_socket_path
from collectived_proto.report.merge import merge_own_reply
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import status_pb2, trace_pb2, worker_pb2_grpc
from collectived_proto.version import OUR_VERSIONS
from collectived_runtime import clock_sync
from collectived_runtime.auth.acl import AclRule, filter_devices, resolve_rules
from collectived_runtime.auth.callers import Caller
from collectived_runtime.auth.certificates import Certificates, load_certificates
from collectived_runtime.auth.peers import set_socket_mode
from collectived_runtime.device.nccl.binding import load_binding
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.engine.loop.context import WorkerResources
from collectived_runtime.engine.record.flight_recorder import FlightRecorder
from collectived_runtime.engine.run.fold_pool import FoldPool
from collectived_runtime.grpc_server.authentication import check_exposed
from collectived_runtime.grpc_server.guard import ServerGuard
from collectived_runtime.grpc_server.health import Health, add_reflection
from collectived_runtime.limits.descriptors import compute_connection_limit
from collectived_runtime.limits.quota_settings import Quotas
from collectived_runtime.limits.rejections import Limit
from collectived_runtime.process import (
    bind,
    catch_stop_signals,
    list_listen_addresses,
    print_drained,
    print_ready,
    remove_sockets,
    server_options,
    wait_until_stopped,
)
from collectived_runtime.startup_error import StartupError
from collectived_runtime.transport.connections import ConnectionServer
from collectived_runtime.transport.listener import AcceptLimits, format_address
from collectived_runtime.worker import devices, link_probe
from collectived_runtime.worker.coordinator_client import CoordinatorClient, CoordinatorEndpoint, enlist
from collectived_runtime.worker.devices import GetNccl, default_memory_limit, exit_for_restart, load_nccl
from collectived_runtime.worker.draining import DrainState
from collectived_runtime.worker.groups import Groups
from collectived_runtime.worker.joins import WorkerPlace
from collectived_runtime.worker.observe import otel
from collectived_runtime.worker.observe.looks import look
from collectived_runtime.worker.observe.status import (
    WorkerCounts,
    WorkerIdentity,
    make_partial_group_status,
    worker_status,
)
from collectived_runtime.worker.observe.trace import worker_trace
from collectived_runtime.worker.service import ClientAccess, Observation, WorkerService
from collectived_runtime.worker.sessions import Sessions

log = logging.getLogger("collectived.worker")

if TYPE_CHECKING:
    from collectived_runtime.http.server import HttpServer

SERVICE = "collectived.v1.Worker"
STATUS_SECONDS = 0.45  # for the coordinator's answer, which itself waits 0.3 s for workers
SWITCH_SECONDS = 0.0005  # a group loop that wakes waits at most this long for the interpreter
EXIT_DEFECT = 70  # exit status
DEFECT_MESSAGE = "a defect of collectived: this worker no longer reads messages of its coordinator, and ends"
LAUNCHER_GONE_MESSAGE = "its launcher is gone, or has ended it"  # standard input has ended, which says no more
# A session over gRPC lives by its stream: a client whose host has vanished is noticed within the sum of the first two.
KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),  # clients may ask as often whether we live
)
EXIT_UNREACHABLE = 3  # exit status


async def serve(
    settings: WorkerSettings,
    lifeline: Awaitable[None] | None = None,
    cuda: devices.GetCuda = devices.load_cuda,
    nccl: GetNccl = load_binding,
) -> None:
    """Run a worker until SIGTERM, SIGINT, or the lifeline ends.

    Args:
        cuda: where it gets its GPUs. nccl: where it gets NCCL, by the name of a binding or "".

    Raises:
        SystemExit: it cannot start; the reason has been printed. Status 3 where no coordinator takes it, else 1. Or a
            defect ends it, which has been logged: status 70.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    with catch_stop_signals() as signalled:
        worker: _Worker | None = None
        number = settings.task
        try:
            host = settings.host or socket.gethostname()
            tls = load_certificates(settings, settings.listen)
            if number is None:
                coordinator = CoordinatorEndpoint(settings.coordinator, settings.secret, tls)
                number = await enlist(coordinator, host, settings.patience_seconds)
            worker = _Worker(settings, number, host, tls, cuda, nccl)
            await worker.start()
        except (OSError, ValueError, CollectiveError, StartupError) as error:
            if worker is not None:
                await worker.abort_start()
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            who = "worker" if number is None else f"worker {number}"
            print(f"collectived {who}: {why}", file=sys.stderr, flush=True)
            raise SystemExit(EXIT_UNREACHABLE if isinstance(error, UnavailableError) else 1) from None
        print_ready(worker.announcement())
        held = [asyncio.ensure_future(lifeline)] if lifeline is not None else []
        ends = [worker.drain_state.finished, worker.coordinator_client.finished, *held]
        await wait_until_stopped(signalled, None, *ends)
        if signalled.number == signal.SIGTERM and settings.drain_seconds and worker.groups.group_loops:
            signalled.clear()
            # A second signal ends it at once, and so does a drain that fails.
            await wait_until_stopped(signalled, None, *ends, worker.drain(settings.drain_seconds))
            print_drained(worker.drain_reply())
        deaf = worker.coordinator_client.finished.done()
        if deaf:
            defect = (await asyncio.gather(worker.coordinator_client.finished, return_exceptions=True))[0]
            log.critical("%s, for its supervisor to start it again", DEFECT_MESSAGE, exc_info=defect)
        await worker.close(DEFECT_MESSAGE if deaf else LAUNCHER_GONE_MESSAGE if any(one.done() for one in held) else "")
        if deaf:
            raise SystemExit(EXIT_DEFECT)


class _Worker:
    """The parts of one worker, in the order in which they start; they end in the reverse order."""

    def __init__(
        self, settings: WorkerSettings, task: int, host: str, tls: Certificates, cuda: devices.GetCuda, nccl: GetNccl
    ) -> None:
        self.settings = settings
        self.tls = tls
        self.device_offer = devices.discover_devices(settings.devices, cuda, exit_for_restart)
        if self.device_offer.unavailable_reason:
            log.warning("no GPU is offered: %s", self.device_offer.unavailable_reason)
        self.guard = ServerGuard(settings, tls.is_mutual)
        allowed = self.guard.allowed
        group_rules = resolve_rules(settings.group_rules, "group_rules")
        device_rules = resolve_rules(settings.device_rules, "device_rules")
        self.nccl = load_nccl(settings.nccl, self.device_offer.gpus, exit_for_restart, nccl)
        folder = settings.folder
        folder.mkdir(mode=0o711 if allowed.is_list else 0o700, parents=True, exist_ok=True)
        self.local_socket_path = check_socket_path(folder / f"door-{task}.sock")
        own_socket = check_socket_path(folder / f"worker-{task}.sock")
        self.listen_addresses = list_listen_addresses(settings.listen, f"unix:{own_socket}")
        check_exposed([*self.listen_addresses, settings.link_listen], settings.secret, settings.insecure, tls.is_mutual)
        names = self.device_offer.device_names(task)
        memory = settings.memory_limit or default_memory_limit()
        self.budget = MemoryBudget(memory, lambda: self.guard.rejections.count_limit(Limit.MEMORY))
        most = Quotas.from_settings(settings, memory, self.guard.descriptor_limit)
        self.connection_server = self._create_connection_server(task)
        set_socket_mode(self.local_socket_path, allowed)
        self.identity = WorkerIdentity(
            task,
            host,
            f"{int(time.time() * 1000):x}-{secrets.token_hex(4)}",
            tuple(str(device) for device in names),
            self.listen_addresses[0],
            format_address(parse_address(settings.link_listen)[0], self.connection_server.link_port),
            self.device_offer.unavailable_reason,
            self.nccl.description,
        )
        self.name = f"/job:worker/task:{task}"
        self.telemetry: otel.Telemetry | None = None
        self.trace_tasks: set[asyncio.Future[None]] = set()
        self._inspect_tasks: set[asyncio.Task[None]] = set()
        self.sessions = Sessions(self.budget, self.guard.rejections, most, self.device_offer)
        self.groups = self._create_groups(names, most, group_rules)
        self.coordinator_client = self._create_coordinator_client()
        self.drain_state = self._create_drain_state()
        offer = partial(filter_devices, names, device_rules, uuids=self.device_offer.uuids)
        self.server = self._create_server(offer)
        self.health = Health(SERVICE, self.server)
        self.metrics: HttpServer | None = None

    def _create_connection_server(self, task: int) -> ConnectionServer:
        """Return where clients and links come in from here on."""
        most, logins = max(1, self.settings.max_handshakes), self.guard.authenticator.login_throttle
        limits = AcceptLimits(self.guard.rejections, logins, most, self.guard.descriptor_limit)
        reception = ConnectionServer(
            task,
            self.settings.secret,
            self.local_socket_path,
            parse_address(self.settings.link_listen),
            limits,
            self.tls.get_link_contexts if self.tls.is_mutual else None,
        )
        reception.set_probe_handler(link_probe.ProbeServer().serve_in_thread)
        return reception

    def _create_groups(self, names: tuple[DeviceName, ...], most: Quotas, rules: Sequence[AclRule]) -> Groups:
        resources = WorkerResources(
            self.connection_server, self.budget, FoldPool(), FlightRecorder(), self.guard.rejections, self.nccl.context
        )
        place = WorkerPlace(self.identity.task, self.identity.host, names)
        return Groups(place, self.connection_server, resources, self._send, self._is_connected, most, rules)

    def _create_coordinator_client(self) -> CoordinatorClient:
        return CoordinatorClient(
            CoordinatorEndpoint(self.settings.coordinator, self.settings.secret, self.tls),
            self._make_hello,
            self._on_message,
            self._on_welcomed,
            lambda: [group_loop.tracker for group_loop in self.groups.group_loops],
            self._on_away,
            lambda: look(self.groups.group_loops),
        )

    def _create_drain_state(self) -> DrainState:
        return DrainState(
            self.identity.task,
            f"worker {self.identity.task} (host {self.identity.host})",
            lambda: self.groups.group_loops,
            self._send,
            self.coordinator_client.request_drain,
            lambda: self.health.drain(),
        )

    def _create_server(self, offer: Callable[[Caller, str | None], Sequence[DeviceName]]) -> grpc.aio.Server:
        """Return the server of clients; it listens nowhere yet."""
        most = self.settings.max_connections
        connections = compute_connection_limit(most, self.guard.descriptor_limit // 2, len(self.listen_addresses))
        options = server_options(self.settings.max_message, connections)
        server = self.guard.create_server((*options, *KEEPALIVE_OPTIONS))
        service = WorkerService(
            self.name,
            ClientAccess(self.guard.callers, offer),
            self.sessions,
            self.groups,
            self.connection_server,
            Observation(self._status, self._trace),
            self.drain_state,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
        return server

    def _send(self, message: pb.WorkerMessage) -> None:
        self.coordinator_client.send(message)

    def _is_connected(self) -> bool:
        return self.coordinator_client.connected.is_set()

    async def start(self) -> None:
        await self.coordinator_client.wait_until_welcomed(self.settings.patience_seconds)
        # Addresses that others may have taken come first: where that fails, no socket has been made.
        # Values of many leaves are thought about there, one at a time.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, thread_name_prefix="thinking"))
        if self.settings.reflection:
            add_reflection(self.server, SERVICE)
        if self.settings.metrics:
            self.metrics = self._create_metrics_server(self.settings.metrics)
        self.telemetry = otel.start(self.settings.otel, self.groups.recorder, self.identity, self.settings.job)
        credentials = self.tls.server_credentials() if self.tls.has_server_tls else None
        self.listen_addresses = [
            bind(self.server, address, self.guard.proxy, credentials) for address in reversed(self.listen_addresses)
        ][::-1]
        await self.server.start()
        await self.guard.proxy.start()
        if self.metrics:
            await self.metrics.start()
        await self.health.start(self._is_connected())

    def _create_metrics_server(self, where: str) -> HttpServer:
        from collectived_runtime.metrics.route import create_metrics_server  # most workers serve none
        from collectived_runtime.worker.observe.metrics import NetworkCounts, WorkerMetrics

        groups, client = self.groups, self.coordinator_client
        parts = groups.totals, groups.client_joins.outcomes, self.sessions, self.budget, client
        secure = self.tls.get_http_context if self.tls.has_server_tls else None
        network = NetworkCounts(
            self.guard.authenticator.reject_counts, self.guard.rejections, self.connection_server.links_opened
        )
        source = WorkerMetrics(self.identity.task, *parts, network)
        return create_metrics_server(where, source, lambda: self.health.is_healthy, self.guard.authenticator, secure)

    def announcement(self) -> dict[str, object]:
        return {
            "address": self.listen_addresses[0],
            "addresses": self.listen_addresses,
            "link_address": self.identity.link_address,
            "task": self.identity.task,
            "metrics": self.metrics.address if self.metrics else "",
            "pid": os.getpid(),
            "tls": self.tls.has_server_tls,
        }

    def drain(self, seconds: float) -> asyncio.Future[None]:
        """Drain this worker until `drain_state.finished`. The result is done where the drain fails."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answered(draining: asyncio.Future[status_pb2.DrainReply]) -> None:
            if not draining.cancelled() and (error := draining.exception()) is not None and not failed.done():
                log.warning("this worker ends without having been drained: %s", error)
                failed.set_result(None)

        self._drain_task = asyncio.ensure_future(self.drain_state.drain_itself(seconds))
        self._drain_task.add_done_callback(answered)
        return failed

    def drain_reply(self) -> status_pb2.DrainReply:
        """Return what came of `drain`."""
        asked = self._drain_task
        if asked.done() and not asked.cancelled() and asked.exception() is None:
            return asked.result()
        note = f"worker {self.identity.task} ended before it was known whether all finished"
        return status_pb2.DrainReply(notes=[note], uncertain=True)

    async def abort_start(self) -> None:
        """Let go of what has been opened: it cannot start."""
        self.connection_server.close()
        self.guard.proxy.close()
        if self.metrics:
            await self.metrics.stop()

    async def close(self, why: str) -> None:
        """Close the worker. `why`: the reason for others, where it does not end in order."""
        await self.drain_state.close()
        await self.health.stop()
        if self.metrics:
            await self.metrics.stop()
        self.sessions.close_all("its worker is ending")
        await self.coordinator_client.close(why)
        await self.server.stop(0.2)
        self.guard.proxy.close()
        await asyncio.to_thread(self.groups.close)
        await asyncio.to_thread(self.nccl.close)
        await asyncio.to_thread(self.device_offer.close)
        await asyncio.to_thread(self.connection_server.close)
        if self.telemetry is not None:
            await asyncio.to_thread(self.telemetry.close)
        remove_sockets(self.listen_addresses)

    def _make_hello(self, epoch: int) -> pb.Hello:
        identity = self.identity
        return pb.Hello(
            protocol=versions_to_proto(OUR_VERSIONS),
            task=identity.task,
            incarnation=identity.incarnation,
            host=identity.host,
            pid=os.getpid(),
            devices=identity.devices,
            address=self.listen_addresses[0],
            link_address=identity.link_address,
            nccl=self.nccl.version,
            highest_epoch=epoch,
            groups=self.groups.list_attached(),
            draining=bool(self.drain_state.refusal),
            clock=clock_sync.clock_id(),
            processors=count_cores(),
            machine_processors=os.cpu_count() or 0,
            link_secret=self.coordinator_client.link_secret,
        )

    def _on_message(self, message: pb.CoordinatorMessage) -> None:
        if message.HasField("inspect"):
            inspecting = asyncio.create_task(self._send_inspection(message.inspect.inspect))
            self._inspect_tasks.add(inspecting)
            inspecting.add_done_callback(self._inspect_tasks.discard)
        elif message.HasField("ask_trace"):
            sending = asyncio.ensure_future(self._send_trace(message.ask_trace, time.monotonic()))
            self.trace_tasks.add(sending)
            sending.add_done_callback(self.trace_tasks.discard)
        elif message.HasField("drain"):
            self.drain_state.start_order(message.drain)
        else:
            self.groups.handle_message(message)

    def _on_welcomed(self) -> None:
        self.connection_server.set_secret(self.settings.secret or self.coordinator_client.link_secret)
        self.groups.stall_after = self.coordinator_client.stall_seconds
        self.groups.lost_after = 2 * self.coordinator_client.heartbeat_seconds
        self.groups.resend_joins()
        self.health.set_healthy(True)

    def _on_away(self) -> None:
        self.health.set_healthy(False)

    async def _send_inspection(self, number: int) -> None:
        inspection = pb.Inspection(inspect=number, status=await self._collect_own_status())
        self.coordinator_client.send(pb.WorkerMessage(inspection=inspection))

    async def _collect_own_status(self) -> status_pb2.WorkerStatus:
        self.budget.lent.settle()
        standing = WorkerCounts(
            self.coordinator_client.connected.is_set(),
            len(self.sessions),
            self.sessions.versions,
            self.budget.used,
            self.budget.limit,
            self.budget.lent.retained_bytes,
            bool(self.drain_state.refusal),
            self.guard.rejections,
            self.guard.authenticator.insecure,
        )
        return await worker_status(self.identity, self.groups.group_loops, standing)

    async def _status(self, request: status_pb2.StatusRequest) -> status_pb2.StatusReply:
        if request.local_only:
            return await self._make_own_reply()
        try:
            reply = await self.coordinator_client.request_status(request, STATUS_SECONDS)
        except grpc.aio.AioRpcError as error:
            reason = f"the coordinator at {self.coordinator_client.address} does not answer"
            why = describe_failure(error)
            return await self._make_own_reply(f"{reason} ({why}): this is what workers know by themselves")
        if any(worker.incarnation == self.identity.incarnation for worker in reply.workers):
            return reply
        return merge_own_reply(reply, await self._make_own_reply())

    async def _make_own_reply(self, *warnings: str) -> status_pb2.StatusReply:
        own = await self._collect_own_status()
        loops = self.groups.group_loops
        known = {(loop.topology.group.key, loop.tracker.generation): loop.group for loop in loops}
        seen = [(row, known.get((row.key, row.generation))) for row in own.lanes]
        return status_pb2.StatusReply(
            unix_time=time.time(),
            workers=[own],
            groups=[make_partial_group_status(row, group) for row, group in seen if group is not None],
            warnings=warnings,
            answered_by=self.name,
        )

    async def _send_trace(self, asked: pb.AskTrace, heard: float) -> None:
        """Part by part, so that what is urgent is never behind all of them."""
        await look(self.groups.group_loops)
        for part in worker_trace(self.identity, self.groups.group_loops, self.groups.recorder, asked.request):
            told = pb.TracePart(trace=asked.trace, part=part, asked_at=asked.at, heard_at=heard)
            told.answered_at = time.monotonic()
            self.coordinator_client.send(pb.WorkerMessage(trace_part=told))
            await asyncio.sleep(0)
            if not await self.coordinator_client.flush():
                return

    async def _trace(self, request: trace_pb2.TraceRequest) -> AsyncIterator[trace_pb2.TraceReply]:
        reason = ""
        if not request.local_only:
            begun = False
            try:
                async for reply in self.coordinator_client.request_trace(request, STATUS_SECONDS):
                    begun = begun or reply.HasField("worker")
                    yield reply
                return
            except grpc.aio.AioRpcError as error:
                reason = f"the coordinator at {self.coordinator_client.address} does not answer"
                reason += f" ({describe_failure(error)})"
                if begun:
                    reason += ": the rest of what it gathered is missing"
                    yield trace_pb2.TraceReply(last=True, warnings=[reason])
                    return
        now = trace_pb2.TraceTime(unix=time.time(), monotonic=time.monotonic())
        yield trace_pb2.TraceReply(time=now, answered_by=self.name)
        await look(self.groups.group_loops)
        for part in worker_trace(self.identity, self.groups.group_loops, self.groups.recorder, request):
            part.clock.how = "same clock"
            yield trace_pb2.TraceReply(worker=part)
        yield trace_pb2.TraceReply(last=True, warnings=[reason] if reason else [])
