"""The coordinator's shell: streams of workers in, events to the core, effects out.

It decides nothing. Every message of a worker becomes one event, stepped at once; effects are carried out in order, a
`SendToWorker` into the queue of that worker's stream. One timer of the event loop is set to the core's next wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from collectived_proto.deadline import check_drain_timeout
from collectived_proto.errors import Code, FailedPreconditionError, InvalidArgumentError
from collectived_proto.report.merge import RESTARTED_WARNING
from collectived_proto.types import Tier
from collectived_proto.v1 import coordinator_pb2, coordinator_pb2_grpc, status_pb2, trace_pb2
from collectived_proto.version import negotiate_version
from collectived_runtime.coordinator.codec import (
    AttachedGroups,
    Encoder,
    cut_to_proto,
    event_from_proto,
    hello_from_proto,
)
from collectived_runtime.coordinator.core.coordinator import Coordinator
from collectived_runtime.coordinator.core.events import (
    Disconnect,
    DrainDone,
    DrainRequested,
    Effect,
    Event,
    JoinDone,
    Log,
    Message,
    SaveTable,
    SendToWorker,
    Shutdown,
    Tick,
    WorkerAttached,
    WorkerDetached,
    WorkerHello,
)
from collectived_runtime.coordinator.core.registry import Registry
from collectived_runtime.coordinator.files import TaskIdFile
from collectived_runtime.coordinator.status import (
    LastStatus,
    coordinator_status,
    is_every_worker_attached,
    status_reply,
    take_snapshot,
)
from collectived_runtime.coordinator.trace_collector import TraceCollector, TracedWorker
from collectived_runtime.heap import HeapTrimmer
from collectived_runtime.logs import verdict_fields

INSPECTION_SECONDS = 0.3
TRIM_DELAY_SECONDS = 15.0  # after a worker's stream has ended: what is known of a worker that is lost is gone by then
MAX_GROUP_SENDS = 64  # workers to which a group is being sent at the same time
FAREWELL_SECONDS = 1.0  # in which a worker that says nothing more takes what is being written
GROUP_SEND_SECONDS = 0.1  # for so long one that does not read may keep others waiting

_log = logging.getLogger("collectived.coordinator")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_STATUS = {code.value[0]: code for code in grpc.StatusCode}

Context = grpc.aio.ServicerContext[coordinator_pb2.WorkerMessage, coordinator_pb2.CoordinatorMessage]


class WorkerStream:
    """The stream of one attached worker: what is still to be sent, and why it is to be broken."""

    def __init__(self, hello: WorkerHello, clock_name: str) -> None:
        self.hello = hello
        self.outgoing: asyncio.Queue[Message | coordinator_pb2.Inspect | coordinator_pb2.CoordinatorMessage | None] = (
            asyncio.Queue()
        )
        self.traced_worker = TracedWorker(hello.task, hello.host, clock_name, self.outgoing.put_nowait)
        self.close_status: tuple[Code, str] | None = None
        self.has_said_goodbye = False
        self.goodbye_reason = ""

    def close(self, code: Code, why: str) -> None:
        """End the stream once everything queued before has been sent."""
        if self.close_status is None:
            self.close_status = (code, why)
            self.outgoing.put_nowait(None)


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """Serves `collectived.v1.Coordinator` around its core.

    Args:
        coordinator: decides everything.
        job: name of the job, for status.
        address: where this coordinator is served, for status; may be set later.
        insecure: it admits every caller; likewise. restarted: another coordinator was there before; likewise.
        store: keeps the table of links that were measured; raises ValueError or OSError where it cannot.
        task_ids: numbers of workers that bring none; None: kept in memory alone.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        job: str = "",
        address: str = "",
        store: Callable[[str, tuple[Tier, ...]], None] = lambda name, table: None,
        task_ids: TaskIdFile | None = None,
    ) -> None:
        self.job = job
        self.address = address
        self.insecure = self.restarted = False
        self._save_table = store
        self._task_ids = task_ids or TaskIdFile()
        self._coordinator = coordinator
        self._streams: dict[int, WorkerStream] = {}
        self._started = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._inspections: dict[int, dict[int, asyncio.Future[status_pb2.WorkerStatus]]] = {}
        self._inspection_count = 0
        self._last_status = LastStatus()
        self._drains: dict[int, asyncio.Future[DrainDone]] = {}
        self._drain_count = 0
        self._trace_collector = TraceCollector()
        self._stopping = False
        self._encoder = Encoder()
        self._heap_trimmer = HeapTrimmer(TRIM_DELAY_SECONDS)
        self._group_sends = asyncio.Semaphore(MAX_GROUP_SENDS)
        self.shutdown_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when this coordinator must end itself."""

    # Workers

    async def Attach(self, requests: AsyncIterator[coordinator_pb2.WorkerMessage], context: Context) -> None:
        line = await self._open(requests, context)
        reading = asyncio.create_task(self._read(line, requests))
        writing = asyncio.create_task(self._write(line, context))
        why = "its stream was cancelled"
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():  # gRPC may never end a call whose write is cancelled
                line.outgoing.put_nowait(None)
                await asyncio.wait((writing,), timeout=FAREWELL_SECONDS)
            why = "its stream ended"
        finally:
            for task in (reading, writing):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(reading, writing, return_exceptions=True)
            self._on_stream_closed(line, why)
        if line.close_status:
            await context.abort(_STATUS[line.close_status[0]], line.close_status[1])

    async def _open(self, requests: AsyncIterator[coordinator_pb2.WorkerMessage], context: Context) -> WorkerStream:
        """Read the hello, and return the worker's stream; or refuse the call."""
        if self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator is stopping")
        message = await anext(aiter(requests), None)
        if message is None or not message.HasField("hello"):
            kind = message.WhichOneof("message") if message else "nothing"
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"a worker's first message must be its hello, got {kind}"
            )
        try:
            hello, groups = hello_from_proto(message.hello), AttachedGroups(message.hello)
            negotiate_version(hello.versions, f"worker {hello.task}", "this coordinator")
        except FailedPreconditionError as error:
            _log.warning("a worker is refused: %s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except InvalidArgumentError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"hello: {error}")
        attached = WorkerAttached(hello, time.time_ns() // 1_000_000, groups, groups.generations)
        effects = self._coordinator.step(attached, self._now())
        for effect in effects:
            if isinstance(effect, Shutdown) or (
                isinstance(effect, Disconnect) and effect.incarnation == hello.incarnation
            ):
                # A refusal is about this stream; an earlier one of the same worker goes on.
                self._perform(other for other in effects if other is not effect or isinstance(other, Shutdown))
                code = effect.code if isinstance(effect, Disconnect) else Code.UNAVAILABLE
                await context.abort(_STATUS[code], effect.reason)
        line = WorkerStream(hello, message.hello.clock)
        old = self._streams.get(hello.task)
        self._streams[hello.task] = line
        if old:
            old.close(Code.ABORTED, f"{hello} has attached again")
        self._perform(effects)
        return line

    async def _read(self, line: WorkerStream, requests: AsyncIterator[coordinator_pb2.WorkerMessage]) -> None:
        async for message in requests:
            if self._streams.get(line.hello.task) is not line:
                return
            self._handle_message(line, message)
            if line.has_said_goodbye:
                return

    async def _write(self, line: WorkerStream, context: Context) -> None:
        # Encoded only here, so that what waits for a slow worker is shared with all others.
        while (message := await line.outgoing.get()) is not None:
            if isinstance(message, coordinator_pb2.Inspect):
                await context.write(coordinator_pb2.CoordinatorMessage(inspect=message))
            elif isinstance(message, coordinator_pb2.CoordinatorMessage):
                await context.write(message)
            elif isinstance(message, JoinDone):
                async with self._group_send_slot():
                    await context.write(self._encoder.encode(message))
            else:
                await context.write(self._encoder.encode(message))

    @contextlib.asynccontextmanager
    async def _group_send_slot(self) -> AsyncIterator[None]:
        """Let few at a time send a group: gRPC copies it for each, and thousands may wait for it.

        A turn is over after `GROUP_SEND_SECONDS`, whether the worker has read by then or not.
        """
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._group_sends.release()

        await self._group_sends.acquire()
        late = asyncio.get_running_loop().call_later(GROUP_SEND_SECONDS, give_back)
        try:
            yield
        finally:
            late.cancel()
            give_back()

    def _handle_message(self, line: WorkerStream, message: coordinator_pb2.WorkerMessage) -> None:
        task = line.hello.task
        match message.WhichOneof("message"):
            case "goodbye":
                line.has_said_goodbye, line.goodbye_reason = True, message.goodbye.why
            case "inspection":
                self._last_status.record(task, message.inspection.status)  # one that comes late too
                answer = self._inspections.get(message.inspection.inspect, {}).get(task)
                if answer and not answer.done():
                    answer.set_result(message.inspection.status)
            case "trace_part":
                self._trace_collector.add_part(task, message.trace_part)
            case kind:
                if kind == "heartbeat":
                    self._compare_clocks(line, message.heartbeat)
                try:
                    event = event_from_proto(task, message)
                except InvalidArgumentError as error:
                    _log.warning("worker %d sent a %s that is not understood and is ignored: %s", task, kind, error)
                    return
                if event is not None:
                    self._step(event)

    def _compare_clocks(self, line: WorkerStream, beat: coordinator_pb2.Heartbeat) -> None:
        if beat.sent_at:
            echo = coordinator_pb2.Echo(sent_at=beat.sent_at, at=time.monotonic())
            line.outgoing.put_nowait(coordinator_pb2.CoordinatorMessage(echo=echo))
        if beat.HasField("clock"):
            line.traced_worker.clock, line.traced_worker.clock_at = beat.clock, time.monotonic()

    def _on_stream_closed(self, line: WorkerStream, why: str) -> None:
        task = line.hello.task
        if self._streams.get(task) is line:
            del self._streams[task]
            if not self._stopping:
                self._heap_trimmer.schedule()
                self._step(
                    WorkerDetached(task, line.hello.incarnation, why, line.has_said_goodbye, line.goodbye_reason)
                )

    async def Enlist(self, request: coordinator_pb2.EnlistRequest, context: Any) -> coordinator_pb2.EnlistReply:
        if not request.host:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a worker that wants a number names its host")
        try:
            task = self._task_ids.assign_task_id(request.host, self._coordinator.hosts)
        except OSError as error:
            await context.abort(grpc.StatusCode.INTERNAL, f"the numbers of workers cannot be written: {error}")
        return coordinator_pb2.EnlistReply(task=task)

    # The core

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _step(self, event: Event) -> None:
        self._perform(self._coordinator.step(event, self._now()))

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendToWorker(task, message):
                    if task in self._streams:
                        self._streams[task].outgoing.put_nowait(message)
                case Log(level, text, verdict):
                    if verdict is None:
                        _log.log(_LEVELS[level], "%s", text)
                    else:
                        _log.log(_LEVELS[level], "%s", text, extra=verdict_fields(verdict))
                case SaveTable(name, table):
                    self._store_table(name, table)
                case Disconnect(task, incarnation, code, why):
                    line = self._streams.get(task)
                    if line and line.hello.incarnation == incarnation:
                        del self._streams[task]
                        line.close(code, why)
                case DrainDone(request):
                    asked = self._drains.get(request)
                    if asked is not None and not asked.done():
                        asked.set_result(effect)
                case Shutdown(why):
                    if not self.shutdown_reason.done():
                        self.shutdown_reason.set_result(why)
        self._set_timer()

    def _store_table(self, name: str, table: tuple[Tier, ...]) -> None:
        try:
            self._save_table(name, table)
        except (OSError, ValueError) as error:
            _log.warning("the table of %r is used, but cannot be stored for later runs: %s", name, error)

    def _set_timer(self) -> None:
        due = self._coordinator.next_deadline()
        if self._timer is not None and self._timer.when() != due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and due is not None and not self._stopping:
            self._timer = asyncio.get_running_loop().call_at(due, self._tick)

    def _tick(self) -> None:
        due = self._timer.when() if self._timer else 0.0
        self._timer = None
        # The loop rounds: it may call a little before the time.
        self._perform(self._coordinator.step(Tick(), max(self._now(), due)))

    # People

    def read_registry(self) -> tuple[Registry, float]:
        """For metrics: the registry of groups and workers, and the time by its clock."""
        return self._coordinator.registry, self._now()

    async def Status(self, request: status_pb2.StatusRequest, context: Any) -> status_pb2.StatusReply:
        told, silent = ({}, []) if request.local_only else await self._inspect()
        warnings = [
            f"worker {task} did not answer within {INSPECTION_SECONDS} s: its last answer is shown, - if there is none"
            for task in silent
        ]
        view = take_snapshot(self._coordinator.registry, self._now())
        uptime = time.monotonic() - self._started
        if uptime < self._coordinator.heartbeat_seconds and not is_every_worker_attached(view):
            warnings.append(RESTARTED_WARNING)
        reply = status_reply(view, told, time.time(), warnings, silent)
        self._last_status.fill(reply)
        reply.coordinator.CopyFrom(
            coordinator_status(self.address, self._coordinator.epoch, os.getpid(), uptime, self.job, self.insecure)
        )
        reply.coordinator.restarted = self.restarted
        return reply

    async def Trace(self, request: trace_pb2.TraceRequest, context: Any) -> AsyncIterator[trace_pb2.TraceReply]:
        workers = {task: line.traced_worker for task, line in self._streams.items()}
        async with contextlib.aclosing(self._trace_collector.gather(request, workers)) as replies:
            async for reply in replies:
                yield reply

    async def _inspect(self) -> tuple[dict[int, status_pb2.WorkerStatus], list[int]]:
        """Ask every connected worker for its status.

        Return the answers, and the workers that did not answer in time.
        """
        self._inspection_count += 1
        number = self._inspection_count
        loop = asyncio.get_running_loop()
        answers = {task: loop.create_future() for task in self._streams}
        self._inspections[number] = answers
        question = coordinator_pb2.Inspect(inspect=number)
        for line in self._streams.values():
            line.outgoing.put_nowait(question)
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=INSPECTION_SECONDS)
        finally:
            del self._inspections[number]
        told = {task: answer.result() for task, answer in answers.items() if answer.done()}
        return told, [task for task in sorted(answers) if task not in told]

    async def Drain(self, request: status_pb2.DrainRequest, context: Any) -> status_pb2.DrainReply:
        try:
            check_drain_timeout(request.timeout_seconds)
        except InvalidArgumentError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self._drain_count += 1
        number = self._drain_count
        done: asyncio.Future[DrainDone] = asyncio.get_running_loop().create_future()
        self._drains[number] = done
        task = request.task if request.HasField("task") else -1
        try:
            self._step(DrainRequested(number, request.timeout_seconds, task, request.host, request.group, request.stay))
            found = await done
        finally:
            del self._drains[number]
        if found.error:
            await context.abort(grpc.StatusCode.NOT_FOUND, found.error)
        cut = [cut_to_proto(one) for one in found.abandoned]
        return status_pb2.DrainReply(
            workers=found.workers, groups=found.groups, cut=cut, notes=found.notes, uncertain=bool(found.notes)
        )

    # The end

    def stop(self) -> None:
        """End all streams in order; workers will attach again where a coordinator is started again."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for line in self._streams.values():
            line.close(Code.UNAVAILABLE, "the coordinator is stopping")
