"""Asks a running job what its recorders have kept, and puts the parts of the answer together."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import click
import grpc

from collectived_launcher.status.find import Target, Unreachable
from collectived_proto.v1.trace_pb2 import TraceCollective, TraceLane, TraceReply, TraceRequest, WorkerClock
from collectived_proto.v1.worker_pb2_grpc import WorkerStub

PATIENCE = (
    1.5  # seconds for the first word: workers that hear nothing from the coordinator speak for themselves after 0.8
)
WHOLE = 60.0  # and for all of it
_MOST_ASKED = 3
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)


@dataclass(slots=True)
class Worker:
    """One worker's account. Times in it are its own; `shift` makes them those of the whole trace."""

    task: int
    host: str = ""
    pid: int = 0
    now: float = 0.0
    clock: WorkerClock = field(default_factory=WorkerClock)
    lanes: list[TraceLane] = field(default_factory=list)
    collectives: list[TraceCollective] = field(default_factory=list)
    left_out: int = 0
    whole: bool = False

    @property
    def shift(self) -> float:
        return self.clock.offset_seconds


@dataclass(slots=True)
class Account:
    """What all workers told. `unix` is the time of day when the common clock showed `monotonic`."""

    unix: float = 0.0
    monotonic: float = 0.0
    workers: dict[int, Worker] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)  # task -> host: asked, and not heard
    warnings: list[str] = field(default_factory=list)

    @property
    def groups(self) -> set[str]:
        """Names of those of which anybody has told."""
        return {lane.group for worker in self.workers.values() for lane in worker.lanes}

    @property
    def error(self) -> float:
        """By how many seconds times of different workers may be wrong at most, one to another."""
        errors = sorted(worker.clock.error_seconds for worker in self.workers.values())
        return sum(errors[-2:])


def collect(replies: Iterable[TraceReply]) -> Account:
    """The parts of an answer, put together."""
    account = Account()
    for reply in replies:
        if reply.HasField("time"):
            account.unix, account.monotonic = reply.time.unix, reply.time.monotonic
        if reply.HasField("worker"):
            part = reply.worker
            worker = account.workers.setdefault(part.task, Worker(part.task))
            if part.now:
                worker.host, worker.pid, worker.now, worker.clock = part.host, part.pid, part.now, part.clock
            worker.lanes.extend(part.lanes)
            worker.collectives.extend(part.collectives)
            worker.left_out += part.left_out
            worker.whole = part.last
        account.silent |= {one.task: one.host for one in reply.silent}
        account.warnings.extend(reply.warnings)
    return account


def ask(target: Target, request: TraceRequest) -> Account:
    """The account of the first worker that gives one, asked one after another.

    Raises:
        Unreachable: none answered in time.
        click.ClickException: one refused.
    """
    failures = []
    for address in target.workers[:_MOST_ASKED]:
        try:
            return _ask_one(address, request)
        except grpc.RpcError as error:
            if error.code() not in (*_SILENT, grpc.StatusCode.CANCELLED):
                raise click.ClickException(f"{address} answered {error.code().name}: {error.details()}") from error
            failures.append(f"    {address}: {error.details() or error.code().name}")
    raise Unreachable("\n".join([f"no worker answered (known from {target.origin}):", *failures]))


def _ask_one(address: str, request: TraceRequest) -> Account:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = WorkerStub(channel).Trace(request, timeout=WHOLE)
        patience = threading.Timer(PATIENCE, call.cancel)
        patience.start()
        try:
            return collect(_until_begun(call, patience))
        finally:
            patience.cancel()
            patience.join()


def _until_begun(replies: Iterable[TraceReply], patience: threading.Timer) -> Iterator[TraceReply]:
    for reply in replies:
        patience.cancel()
        yield reply
