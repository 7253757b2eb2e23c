"""The worker daemon: composes concrete parts, serves, ends in order."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from collectived_proto.codec import versions_to_proto
from collectived_proto.configuration.daemons import WorkerSettings
from collectived_proto.devices import DeviceName
from collectived_proto.errors import CollectiveError, UnavailableError
from collectived_proto.lanes import with_own
from collectived_proto.local.jobs import check_socket_path
from collectived_proto.protocol import OURS
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import status_pb2, trace_pb2, worker_pb2_grpc
from collectived_runtime import clocks
from collectived_runtime.admission import Admission, check_exposed
from collectived_runtime.cannot_start import CannotStart
from collectived_runtime.certificates import Certificates, certificates
from collectived_runtime.credentials import gate
from collectived_runtime.daemon import (
    bind,
    drained,
    ready,
    remove_sockets,
    server_options,
    signals,
    until_stopped,
)
from collectived_runtime.device.nccl.choose import choose
from collectived_runtime.engine.links import address_of
from collectived_runtime.engine.results import Budget
from collectived_runtime.guests.callers import Caller, Callers
from collectived_runtime.guests.folders import open_to_folder
from collectived_runtime.guests.peers import guests
from collectived_runtime.guests.porter import Porter
from collectived_runtime.guests.rules import Reserved, offered, resolved
from collectived_runtime.health import Health, reflect
from collectived_runtime.limits.descriptors import connections_at_most, raise_limit
from collectived_runtime.limits.most import Most
from collectived_runtime.limits.refusals import Limit, Refusals
from collectived_runtime.pacing import Pacing
from collectived_runtime.transport.reception import Reception
from collectived_runtime.well_formed import WellFormed
from collectived_runtime.worker import devices, probe, telemetry
from collectived_runtime.worker.draining import Drainage
from collectived_runtime.worker.enlist import enlist
from collectived_runtime.worker.groups import Groups
from collectived_runtime.worker.listening import listening
from collectived_runtime.worker.membership import Membership
from collectived_runtime.worker.memory_limit import default_memory_limit
from collectived_runtime.worker.nccl import GetNccl, load
from collectived_runtime.worker.service import WorkerService
from collectived_runtime.worker.sessions import Sessions
from collectived_runtime.worker.status import Identity, Standing, group_seen_from, worker_status
from collectived_runtime.worker.trace import worker_trace

log = logging.getLogger("collectived.worker")

if TYPE_CHECKING:
    from collectived_runtime.http.server import HttpServer

SERVICE = "collectived.v1.Worker"
STATUS_SECONDS = 0.45  # for the coordinator's answer, which itself waits 0.3 s for workers
SWITCH_SECONDS = 0.0005  # a lane that wakes waits at most this long for the interpreter
DEFECT = 70  # exit status
GPU_LOST = 70  # exit status
GPU_LOST_SECONDS = 1.0  # in which ranks are told
DEAF = "a defect of collectived: this worker would hear nothing of its coordinator any more, and ends"
LET_GO = "its launcher is gone, or has ended it"  # standard input has ended, which tells no more
# A session over gRPC lives by its stream: a client whose host has vanished is noticed within the sum of the first two.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),  # clients may ask as often whether we live
)
UNREACHABLE = 3  # exit status


async def serve(
    settings: WorkerSettings,
    lifeline: Awaitable[None] | None = None,
    cuda: devices.GetCuda = devices.real_cuda,
    nccl: GetNccl = choose,
) -> None:
    """Runs a worker until SIGTERM, SIGINT, or the lifeline ends.

    Args:
        cuda: where it gets its GPUs. nccl: where it gets NCCL, by the name of a binding or "".

    Raises:
        SystemExit: it cannot start; the reason has been printed. Status 3 where no coordinator takes it, else 1. Or a
            defect ends it, which has been logged: status 70.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    with signals() as signalled:
        worker: _Worker | None = None
        number = settings.task
        try:
            host = settings.host or socket.gethostname()
            tls = certificates(settings, settings.listen)
            if number is None:
                number = await enlist(settings.coordinator, settings.secret, host, settings.patience_seconds, tls)
            worker = _Worker(settings, number, host, tls, cuda, nccl)
            await worker.start()
        except (OSError, ValueError, CollectiveError, CannotStart) as error:
            if worker is not None:
                await worker.give_up()
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            who = "worker" if number is None else f"worker {number}"
            print(f"collectived {who}: {why}", file=sys.stderr, flush=True)
            raise SystemExit(UNREACHABLE if isinstance(error, UnavailableError) else 1) from None
        ready(worker.announcement())
        held = [asyncio.ensure_future(lifeline)] if lifeline is not None else []
        ends = [worker.drainage.over, worker.membership.over, *held]
        await until_stopped(signalled, None, *ends)
        if signalled.number == signal.SIGTERM and settings.drain_seconds and worker.groups.lanes:
            signalled.clear()
            # A second signal ends it at once, and so does a drain that nobody sees to.
            await until_stopped(signalled, None, *ends, worker.drain(settings.drain_seconds))
            drained(worker.drain_reply())
        deaf = worker.membership.over.done()
        if deaf:
            defect = (await asyncio.gather(worker.membership.over, return_exceptions=True))[0]
            log.critical("%s, for its supervisor to start it again", DEAF, exc_info=defect)
        await worker.close(DEAF if deaf else LET_GO if any(one.done() for one in held) else "")
        if deaf:
            raise SystemExit(DEFECT)


class _Worker:
    """The parts of one worker, in the order in which they start; they end in the reverse order."""

    def __init__(
        self,
        settings: WorkerSettings,
        task: int,
        host: str,
        tls: Certificates,
        cuda: devices.GetCuda,
        nccl: GetNccl,
    ) -> None:
        self.settings = settings
        self.tls = tls
        self.devices = devices.offer(settings.devices, cuda, _end_without)
        if self.devices.missing:
            log.warning("no GPU is offered: %s", self.devices.missing)
        self.refusals = Refusals()
        self.descriptors = raise_limit()
        self.gate = gate(settings)
        self.porter = Porter(guests(settings.allow_users, settings.allow_groups), self.descriptors // 9, self.refusals)
        callers = Callers(self.gate, self.porter, tls.mutual)
        group_rules = resolved(settings.group_rules, "group_rules")
        device_rules = resolved(settings.device_rules, "device_rules")
        self.nccl = load(settings.nccl, self.devices.gpus, _end_without, nccl)
        folder = settings.folder
        folder.mkdir(mode=0o711 if self.porter.names_guests else 0o700, parents=True, exist_ok=True)
        self.door = check_socket_path(folder / f"door-{task}.sock")
        self.listen = listening(settings.listen, f"unix:{check_socket_path(folder / f'worker-{task}.sock')}")
        check_exposed([*self.listen, settings.link_listen], settings.secret, settings.insecure, tls.mutual)
        names = self.devices.names(task)
        memory = settings.memory_limit or default_memory_limit()
        self.budget = Budget(memory, lambda: self.refusals.limit(Limit.MEMORY))
        most = Most.of(settings, memory, self.descriptors)
        self.reception = self._reception(task)
        open_to_folder(self.door, self.porter.names_guests)
        self.identity = Identity(
            task,
            host,
            f"{int(time.time() * 1000):x}-{secrets.token_hex(4)}",
            tuple(str(device) for device in names),
            self.listen[0],
            f"{address_of(settings.link_listen)[0]}:{self.reception.link_port}",
            self.devices.missing,
            self.nccl.text,
        )
        self.name = f"/job:worker/task:{task}"
        self.telemetry: telemetry.Telemetry | None = None
        self.telling: set[asyncio.Future[None]] = set()
        self._inspecting: set[asyncio.Task[None]] = set()
        self.sessions = Sessions(self.budget, self.refusals, most, self.devices)
        self.groups = self._groups(names, most, group_rules)
        self.membership = self._membership()
        self.drainage = self._drainage()
        self.server = self._server(callers, partial(offered, names, device_rules, uuids=self.devices.uuids))
        self.health = Health(SERVICE, self.server)
        self.metrics: HttpServer | None = None

    def _reception(self, task: int) -> Reception:
        """Where clients and links come in from here on."""
        reception = Reception(
            task,
            self.settings.secret,
            self.door,
            address_of(self.settings.link_listen),
            self.refusals,
            self.gate.logins,
            self.settings.max_handshakes,
            self.descriptors,
            self.tls.links if self.tls.mutual else None,
        )
        reception.on_probe(probe.Answers().answer)
        return reception

    def _groups(self, names: tuple[DeviceName, ...], most: Most, rules: Sequence[Reserved]) -> Groups:
        return Groups(
            self.identity.task,
            self.identity.host,
            names,
            self.reception,
            self.door,
            self.budget,
            self._say,
            self._connected,
            self.refusals,
            most,
            rules,
            self.nccl.engine,
        )

    def _membership(self) -> Membership:
        return Membership(
            self.settings.coordinator,
            self.settings.secret,
            self._hello,
            self._heard,
            self._welcomed,
            lambda: [lane.ledger for lane in self.groups.lanes],
            self._away,
            self.tls,
        )

    def _drainage(self) -> Drainage:
        return Drainage(
            self.identity.task,
            f"worker {self.identity.task} (host {self.identity.host})",
            lambda: self.groups.lanes,
            self._say,
            self.membership.drain,
            lambda: self.health.drain(),
        )

    def _server(self, callers: Callers, offer: Callable[[Caller, str | None], Sequence[DeviceName]]) -> grpc.aio.Server:
        """What serves clients; it listens nowhere yet."""
        settings, refusals = self.settings, self.refusals
        connections = connections_at_most(settings.max_connections, self.descriptors // 2, len(self.listen))
        server = grpc.aio.server(
            interceptors=[Admission(callers, refusals), Pacing(refusals), WellFormed(refusals)],
            options=(*server_options(settings.max_message, connections), *KEEPALIVE),
        )
        service = WorkerService(
            self.name,
            offer,
            self.door,
            callers,
            self.sessions,
            self.groups,
            self.reception,
            self._status,
            self._trace,
            self.drainage,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
        return server

    def _say(self, message: pb.WorkerMessage) -> None:
        self.membership.say(message)

    def _connected(self) -> bool:
        return self.membership.connected.is_set()

    async def start(self) -> None:
        await self.membership.joined(self.settings.patience_seconds)
        # What others may have taken comes first: where it fails, no socket has been made.
        # Values of many leaves are thought about there, one at a time.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, thread_name_prefix="thinking"))
        if self.settings.reflection:
            reflect(self.server, SERVICE)
        if self.settings.metrics:
            self.metrics = self._metrics(self.settings.metrics)
        self.telemetry = telemetry.start(self.settings.otel, self.groups.recorder, self.identity, self.settings.job)
        credentials = self.tls.server_credentials() if self.tls.serves else None
        self.listen = [bind(self.server, address, self.porter, credentials) for address in reversed(self.listen)][::-1]
        await self.server.start()
        await self.porter.start()
        if self.metrics:
            await self.metrics.start()
        await self.health.start(self._connected())

    def _metrics(self, where: str) -> HttpServer:
        from collectived_runtime.metrics.route import metrics_server  # most workers serve none
        from collectived_runtime.worker.metrics import WorkerMetrics

        parts = self.groups.account, self.groups.joins, self.sessions, self.budget, self.membership
        secure = self.tls.pages if self.tls.serves else None
        source = WorkerMetrics(
            self.identity.task, *parts, refused=self.gate.refused, refusals=self.refusals, links=self.reception.opened
        )
        return metrics_server(where, source, lambda: self.health.well, self.gate, secure)

    def announcement(self) -> dict[str, object]:
        return {
            "address": self.listen[0],
            "addresses": self.listen,
            "link_address": self.identity.link_address,
            "task": self.identity.task,
            "metrics": self.metrics.address if self.metrics else "",
            "pid": os.getpid(),
            "tls": self.tls.serves,
        }

    def drain(self, seconds: float) -> asyncio.Future[None]:
        """Drains this worker until `drainage.over`; what it returns is done where that cannot be."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answered(draining: asyncio.Future[status_pb2.DrainReply]) -> None:
            if not draining.cancelled() and (error := draining.exception()) is not None and not failed.done():
                log.warning("this worker ends without having been drained: %s", error)
                failed.set_result(None)

        request = status_pb2.DrainRequest(timeout_seconds=seconds)
        self._draining = asyncio.ensure_future(self.drainage.asked(request))
        self._draining.add_done_callback(answered)
        return failed

    def drain_reply(self) -> status_pb2.DrainReply:
        """What came of `drain`."""
        asked = self._draining
        if asked.done() and not asked.cancelled() and asked.exception() is None:
            return asked.result()
        note = f"worker {self.identity.task} ended before it was known whether all finished"
        return status_pb2.DrainReply(notes=[note], uncertain=True)

    async def give_up(self) -> None:
        """It cannot start."""
        self.reception.close()
        self.porter.close()
        if self.metrics:
            await self.metrics.stop()

    async def close(self, why: str) -> None:
        """`why`: what others hear, where it is not that it ends in order."""
        await self.drainage.close()
        await self.health.stop()
        if self.metrics:
            await self.metrics.stop()
        self.sessions.close_all("its worker is ending")
        await self.membership.close(why)
        await self.server.stop(0.2)
        self.porter.close()
        await asyncio.to_thread(self.groups.close)
        await asyncio.to_thread(self.nccl.close)
        await asyncio.to_thread(self.devices.close)
        await asyncio.to_thread(self.reception.close)
        if self.telemetry is not None:
            await asyncio.to_thread(self.telemetry.close)
        remove_sockets(self.listen)

    def _hello(self, epoch: int) -> pb.Hello:
        identity = self.identity
        return pb.Hello(
            protocol=versions_to_proto(OURS),
            task=identity.task,
            incarnation=identity.incarnation,
            host=identity.host,
            pid=os.getpid(),
            devices=identity.devices,
            address=self.listen[0],
            link_address=identity.link_address,
            nccl=self.nccl.version,
            highest_epoch=epoch,
            groups=self.groups.attached(),
            draining=bool(self.drainage.refusal),
            clock=clocks.name(),
            link_secret=self.membership.link_secret,
        )

    def _heard(self, message: pb.CoordinatorMessage) -> None:
        if message.HasField("inspect"):
            inspecting = asyncio.create_task(self._inspected(message.inspect.inspect))
            self._inspecting.add(inspecting)
            inspecting.add_done_callback(self._inspecting.discard)
        elif message.HasField("ask_trace"):
            telling = asyncio.ensure_future(self._tell_trace(message.ask_trace, time.monotonic()))
            self.telling.add(telling)
            telling.add_done_callback(self.telling.discard)
        elif message.HasField("drain"):
            self.drainage.ordered(message.drain)
        else:
            self.groups.heard(message)

    def _welcomed(self) -> None:
        self.reception.prove_with(self.settings.secret or self.membership.link_secret)
        self.groups.stall_after = self.membership.stall_seconds
        self.groups.lost_after = 2 * self.membership.heartbeat_seconds
        self.groups.ask_again()
        self.health.change(True)

    def _away(self) -> None:
        self.health.change(False)

    async def _inspected(self, number: int) -> None:
        inspection = pb.Inspection(inspect=number, status=await self._own_status())
        self.membership.say(pb.WorkerMessage(inspection=inspection))

    async def _own_status(self) -> status_pb2.WorkerStatus:
        standing = Standing(
            self.membership.connected.is_set(),
            len(self.sessions),
            self.sessions.versions,
            self.budget.used,
            self.budget.limit,
            bool(self.drainage.refusal),
            self.refusals,
            self.gate.insecure,
        )
        return await worker_status(self.identity, self.groups.lanes, standing)

    async def _status(self, request: status_pb2.StatusRequest) -> status_pb2.StatusReply:
        if request.local_only:
            return await self._own_part()
        try:
            reply = await self.membership.status(request, STATUS_SECONDS)
        except grpc.aio.AioRpcError as error:
            reason = f"the coordinator at {self.membership.address} does not answer ({error.details()}): "
            return await self._own_part(f"{reason}this is what workers know by themselves")
        if any(worker.incarnation == self.identity.incarnation for worker in reply.workers):
            return reply
        return with_own(reply, await self._own_part())

    async def _own_part(self, *warnings: str) -> status_pb2.StatusReply:
        own = await self._own_status()
        known = {(lane.topology.group.key, lane.ledger.generation): lane.group for lane in self.groups.lanes}
        seen = [(lane, known.get((lane.key, lane.generation))) for lane in own.lanes]
        return status_pb2.StatusReply(
            unix_time=time.time(),
            workers=[own],
            groups=[group_seen_from(lane, group) for lane, group in seen if group is not None],
            warnings=warnings,
            answered_by=self.name,
        )

    async def _tell_trace(self, asked: pb.AskTrace, heard: float) -> None:
        """Part by part, so that what is urgent is never behind all of them."""
        for part in worker_trace(self.identity, self.groups.lanes, self.groups.recorder, asked.request):
            told = pb.TracePart(trace=asked.trace, part=part, asked_at=asked.at, heard_at=heard)
            told.answered_at = time.monotonic()
            self.membership.say(pb.WorkerMessage(trace_part=told))
            await asyncio.sleep(0)
            if not await self.membership.drained():
                return

    async def _trace(self, request: trace_pb2.TraceRequest) -> AsyncIterator[trace_pb2.TraceReply]:
        reason = ""
        if not request.local_only:
            begun = False
            try:
                async for reply in self.membership.trace(request, STATUS_SECONDS):
                    begun = begun or reply.HasField("worker")
                    yield reply
                return
            except grpc.aio.AioRpcError as error:
                reason = f"the coordinator at {self.membership.address} does not answer ({error.details()})"
                if begun:
                    yield trace_pb2.TraceReply(
                        last=True, warnings=[f"{reason}: the rest of what it gathered is missing"]
                    )
                    return
        now = trace_pb2.TraceTime(unix=time.time(), monotonic=time.monotonic())
        yield trace_pb2.TraceReply(time=now, answered_by=self.name)
        for part in worker_trace(self.identity, self.groups.lanes, self.groups.recorder, request):
            part.clock.how = "same clock"
            yield trace_pb2.TraceReply(worker=part)
        yield trace_pb2.TraceReply(last=True, warnings=[reason] if reason else [])


def _end_without(why: str) -> None:
    """A GPU is lost to this process, and only a new one can have it again: its lanes tell their ranks, then it ends."""
    log.critical("%s; this worker ends, for its supervisor to start it again", why)
    ending = threading.Timer(GPU_LOST_SECONDS, os._exit, (GPU_LOST,))  # whatever hangs in the driver
    ending.daemon = True
    ending.start()
