"""The coordinator's shell: streams of workers in, events to the mind, effects out.

It decides nothing. Every message of a worker becomes one event, stepped at once; effects are carried out in order, a
`Send` into the queue of that worker's *line*. One timer of the event loop is set to the mind's next wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import grpc
import grpc.aio

from collectived_proto.errors import Code, FailedPreconditionError, InvalidArgumentError
from collectived_proto.lanes import UNHEARD
from collectived_proto.protocol import agree
from collectived_proto.types import Tier
from collectived_proto.v1 import coordinator_pb2, coordinator_pb2_grpc, status_pb2, trace_pb2
from collectived_runtime.coordinator.census import Census
from collectived_runtime.coordinator.events import (
    DrainAsked,
    DrainDone,
    Drop,
    Effect,
    End,
    Event,
    Hello,
    JoinDone,
    Log,
    Message,
    Send,
    Store,
    Tick,
    WorkerAttached,
    WorkerGone,
)
from collectived_runtime.coordinator.messages import Encoder, cut_to_proto, event_from_proto, hello_from_proto
from collectived_runtime.coordinator.overview import coordinator_status, everybody_is_back, status_reply
from collectived_runtime.coordinator.recollection import Recollection
from collectived_runtime.coordinator.roll import Roll
from collectived_runtime.coordinator.state import Coordinator
from collectived_runtime.coordinator.traces import Correspondent, Traces
from collectived_runtime.logs import facts_of, text_of

INSPECTION_SECONDS = 0.3
TURNS = 64  # workers to which a group is being sent at the same time
TURN_SECONDS = 0.1  # for so long one that does not read may keep others waiting

_log = logging.getLogger("collectived.coordinator")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_STATUS = {code.value[0]: code for code in grpc.StatusCode}

Context = grpc.aio.ServicerContext[coordinator_pb2.WorkerMessage, coordinator_pb2.CoordinatorMessage]


class _Line:
    """The stream of one attached worker: what is still to be sent, and why it is to be broken."""

    def __init__(self, hello: Hello, clock_name: str) -> None:
        self.hello = hello
        self.outgoing: asyncio.Queue[Message | coordinator_pb2.Inspect | coordinator_pb2.CoordinatorMessage | None] = (
            asyncio.Queue()
        )
        self.correspondent = Correspondent(hello.task, hello.host, clock_name, self.outgoing.put_nowait)
        self.broken: tuple[Code, str] | None = None
        self.goodbye = False
        self.said = ""

    def break_off(self, code: Code, why: str) -> None:
        """Ends the stream once everything queued before has been sent."""
        if self.broken is None:
            self.broken = (code, why)
            self.outgoing.put_nowait(None)


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """Serves `collectived.v1.Coordinator` around a mind.

    Args:
        mind: decides everything.
        job: name of the job, for status.
        address: where this coordinator is served, for status; may be set later.
        insecure: it admits everybody; likewise.
        store: keeps the table of links that were measured; raises ValueError or OSError where it cannot.
        roll: numbers of workers that bring none; None: kept in memory alone.
    """

    def __init__(
        self,
        mind: Coordinator,
        job: str = "",
        address: str = "",
        store: Callable[[str, tuple[Tier, ...]], None] = lambda name, table: None,
        roll: Roll | None = None,
    ) -> None:
        self.job = job
        self.address = address
        self.insecure = False
        self._store = store
        self._roll = roll or Roll()
        self._mind = mind
        self._lines: dict[int, _Line] = {}
        self._started = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._inspections: dict[int, dict[int, asyncio.Future[status_pb2.WorkerStatus]]] = {}
        self._inspected = 0
        self._recollection = Recollection()
        self._drains: dict[int, asyncio.Future[DrainDone]] = {}
        self._drains_asked = 0
        self._traces = Traces()
        self._stopping = False
        self._encoder = Encoder()
        self._turns = asyncio.Semaphore(TURNS)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when this coordinator must end itself."""

    # Workers

    async def Attach(self, requests: AsyncIterator[coordinator_pb2.WorkerMessage], context: Context) -> None:
        line = await self._open(requests, context)
        reading = asyncio.create_task(self._read(line, requests))
        writing = asyncio.create_task(self._write(line, context))
        why = "its stream was cancelled"
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            why = "its stream ended"
        finally:
            for task in (reading, writing):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(reading, writing, return_exceptions=True)
            self._closed(line, why)
        if line.broken:
            await context.abort(_STATUS[line.broken[0]], line.broken[1])

    async def _open(self, requests: AsyncIterator[coordinator_pb2.WorkerMessage], context: Context) -> _Line:
        """Hears the hello; the worker's line, or the call is refused."""
        if self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator is stopping")
        message = await anext(aiter(requests), None)
        if message is None or not message.HasField("hello"):
            kind = message.WhichOneof("message") if message else "nothing"
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"a worker's first message must be its hello, got {kind}"
            )
        try:
            hello = hello_from_proto(message.hello)
            agree(hello.versions, f"worker {hello.task}", "this coordinator")
        except FailedPreconditionError as error:
            _log.warning("a worker is refused: %s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except InvalidArgumentError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"hello: {error}")
        effects = self._mind.step(WorkerAttached(hello, time.time_ns() // 1_000_000), self._now())
        for effect in effects:
            if isinstance(effect, End) or (isinstance(effect, Drop) and effect.incarnation == hello.incarnation):
                # A refusal is about this stream; an earlier one of the same worker goes on.
                self._perform(other for other in effects if other is not effect or isinstance(other, End))
                code = effect.code if isinstance(effect, Drop) else Code.UNAVAILABLE
                await context.abort(_STATUS[code], effect.why)
        line = _Line(hello, message.hello.clock)
        old = self._lines.get(hello.task)
        self._lines[hello.task] = line
        if old:
            old.break_off(Code.ABORTED, f"{hello} has attached again")
        self._perform(effects)
        return line

    async def _read(self, line: _Line, requests: AsyncIterator[coordinator_pb2.WorkerMessage]) -> None:
        async for message in requests:
            if self._lines.get(line.hello.task) is not line:
                return
            self._hear(line, message)
            if line.goodbye:
                return

    async def _write(self, line: _Line, context: Context) -> None:
        # Encoded only here, so that what waits for a slow worker is shared with all others.
        while (message := await line.outgoing.get()) is not None:
            if isinstance(message, coordinator_pb2.Inspect):
                await context.write(coordinator_pb2.CoordinatorMessage(inspect=message))
            elif isinstance(message, coordinator_pb2.CoordinatorMessage):
                await context.write(message)
            elif isinstance(message, JoinDone):
                async with self._turn():
                    await context.write(self._encoder.encode(message))
            else:
                await context.write(self._encoder.encode(message))

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Lets few at a time send a group: gRPC copies it for each, and there may be thousands who wait for it.

        A turn is over after `TURN_SECONDS`, whether the worker has read by then or not.
        """
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._turns.release()

        await self._turns.acquire()
        late = asyncio.get_running_loop().call_later(TURN_SECONDS, give_back)
        try:
            yield
        finally:
            late.cancel()
            give_back()

    def _hear(self, line: _Line, message: coordinator_pb2.WorkerMessage) -> None:
        task = line.hello.task
        match message.WhichOneof("message"):
            case "goodbye":
                line.goodbye, line.said = True, message.goodbye.why
            case "inspection":
                self._recollection.hear(task, message.inspection.status)  # one that comes late too
                answer = self._inspections.get(message.inspection.inspect, {}).get(task)
                if answer and not answer.done():
                    answer.set_result(message.inspection.status)
            case "trace_part":
                self._traces.hear(task, message.trace_part)
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

    def _compare_clocks(self, line: _Line, beat: coordinator_pb2.Heartbeat) -> None:
        if beat.sent_at:
            echo = coordinator_pb2.Echo(sent_at=beat.sent_at, at=time.monotonic())
            line.outgoing.put_nowait(coordinator_pb2.CoordinatorMessage(echo=echo))
        if beat.HasField("clock"):
            line.correspondent.clock, line.correspondent.clock_at = beat.clock, time.monotonic()

    def _closed(self, line: _Line, why: str) -> None:
        task = line.hello.task
        if self._lines.get(task) is line:
            del self._lines[task]
            if not self._stopping:
                self._step(WorkerGone(task, line.hello.incarnation, why, line.goodbye, line.said))

    async def Enlist(self, request: coordinator_pb2.EnlistRequest, context: Any) -> coordinator_pb2.EnlistReply:
        if not request.host:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a worker that wants a number names its host")
        try:
            task = self._roll.enlist(request.host, self._mind.hosts)
        except OSError as error:
            await context.abort(grpc.StatusCode.INTERNAL, f"the roll of workers cannot be written: {error}")
        return coordinator_pb2.EnlistReply(task=task)

    # The mind

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _step(self, event: Event) -> None:
        self._perform(self._mind.step(event, self._now()))

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(task, message):
                    if task in self._lines:
                        self._lines[task].outgoing.put_nowait(message)
                case Log(level, text, verdict):
                    if verdict is None:
                        _log.log(_LEVELS[level], "%s", text)
                    else:
                        _log.log(_LEVELS[level], "%s", text_of(verdict, text), extra=facts_of(verdict))
                case Store(name, table):
                    self._keep(name, table)
                case Drop(task, incarnation, code, why):
                    line = self._lines.get(task)
                    if line and line.hello.incarnation == incarnation:
                        del self._lines[task]
                        line.break_off(code, why)
                case DrainDone(request):
                    asked = self._drains.get(request)
                    if asked is not None and not asked.done():
                        asked.set_result(effect)
                case End(why):
                    if not self.ended.done():
                        self.ended.set_result(why)
        self._set_timer()

    def _keep(self, name: str, table: tuple[Tier, ...]) -> None:
        try:
            self._store(name, table)
        except (OSError, ValueError) as error:
            _log.warning("the table of %r is used, but cannot be stored for later runs: %s", name, error)

    def _set_timer(self) -> None:
        due = self._mind.next_wakeup()
        if self._timer is not None and self._timer.when() != due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and due is not None and not self._stopping:
            self._timer = asyncio.get_running_loop().call_at(due, self._tick)

    def _tick(self) -> None:
        due = self._timer.when() if self._timer else 0.0
        self._timer = None
        # The loop rounds: it may call a little before the time.
        self._perform(self._mind.step(Tick(), max(self._now(), due)))

    # People

    def census(self) -> Iterator[Census | None]:
        """What is counted: see `census.census`."""
        return self._mind.census(self._now())

    async def Status(self, request: status_pb2.StatusRequest, context: Any) -> status_pb2.StatusReply:
        told, silent = ({}, []) if request.local_only else await self._inspect()
        warnings = [
            f"worker {task} did not answer within {INSPECTION_SECONDS} s: shown is what it told before, - if nothing"
            for task in silent
        ]
        view = self._mind.snapshot(self._now())
        uptime = time.monotonic() - self._started
        if uptime < self._mind.heartbeat_seconds and not everybody_is_back(view):
            warnings.append(UNHEARD)
        reply = status_reply(view, told, time.time(), warnings, silent)
        self._recollection.fill(reply)
        reply.coordinator.CopyFrom(
            coordinator_status(self.address, self._mind.epoch, os.getpid(), uptime, self.job, self.insecure)
        )
        return reply

    async def Trace(self, request: trace_pb2.TraceRequest, context: Any) -> AsyncIterator[trace_pb2.TraceReply]:
        workers = {task: line.correspondent for task, line in self._lines.items()}
        async with contextlib.aclosing(self._traces.gather(request, workers)) as replies:
            async for reply in replies:
                yield reply

    async def _inspect(self) -> tuple[dict[int, status_pb2.WorkerStatus], list[int]]:
        """Asks every connected worker for its own account: what they told, and who did not in time."""
        self._inspected += 1
        number = self._inspected
        loop = asyncio.get_running_loop()
        answers = {task: loop.create_future() for task in self._lines}
        self._inspections[number] = answers
        question = coordinator_pb2.Inspect(inspect=number)
        for line in self._lines.values():
            line.outgoing.put_nowait(question)
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=INSPECTION_SECONDS)
        finally:
            del self._inspections[number]
        told = {task: answer.result() for task, answer in answers.items() if answer.done()}
        return told, [task for task in sorted(answers) if task not in told]

    async def Drain(self, request: status_pb2.DrainRequest, context: Any) -> status_pb2.DrainReply:
        self._drains_asked += 1
        number = self._drains_asked
        done: asyncio.Future[DrainDone] = asyncio.get_running_loop().create_future()
        self._drains[number] = done
        task = request.task if request.HasField("task") else -1
        try:
            self._step(DrainAsked(number, request.timeout_seconds, task, request.host, request.group, request.stay))
            found = await done
        finally:
            del self._drains[number]
        if found.error:
            await context.abort(grpc.StatusCode.NOT_FOUND, found.error)
        cut = [cut_to_proto(one) for one in found.cut]
        return status_pb2.DrainReply(
            workers=found.workers, groups=found.groups, cut=cut, notes=found.notes, uncertain=bool(found.notes)
        )

    # The end

    def stop(self) -> None:
        """Ends all streams in order; workers will attach again where a coordinator is started again."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for line in self._lines.values():
            line.break_off(Code.UNAVAILABLE, "the coordinator is stopping")
