"""Asks a running job what its recorders have kept, and puts the parts of the answer together."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import click
import grpc

from collectived_launcher import calling
from collectived_launcher.status.find import Target, Unreachable, refused
from collectived_proto.v1.trace_pb2 import TraceCollective, TraceLane, TraceReply, TraceRequest, WorkerClock
from collectived_proto.v1.worker_pb2_grpc import WorkerStub

PATIENCE = 2.5  # seconds for each part; a worker waits 2 s for one of the coordinator, which waits 1.5 s for a worker's
_MOST_ASKED = 3
_MOST_PARTS = 32
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
    """What all workers told. `unix` is the time of day when the common clock showed `monotonic`. `told_by`: the worker
    that spoke for itself, as the coordinator does not answer; '' where the coordinator told."""

    unix: float = 0.0
    monotonic: float = 0.0
    told_by: str = ""
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
        _take(account, reply)
    return account


def _take(account: Account, reply: TraceReply) -> None:
    if reply.HasField("time"):
        account.unix, account.monotonic = reply.time.unix, reply.time.monotonic
    account.told_by = account.told_by or reply.answered_by
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


def ask(target: Target, request: TraceRequest) -> Account:
    """The account of the first worker that gives one, asked one after another.

    Where it must do without the coordinator, what the host's other workers know is put to it: they have the same clock.

    Raises:
        Unreachable: none answered in time.
        click.ClickException: one refused.
    """
    failures = []
    for address in target.workers[:_MOST_ASKED]:
        try:
            account = _ask_one(address, request)
        except grpc.RpcError as error:
            if error.code() not in (*_SILENT, grpc.StatusCode.CANCELLED):
                raise click.ClickException(refused(address, error)) from error
            failures.append(f"    {address}: {calling.why(address, error)}")
            continue
        if account.told_by and not request.local_only:
            _put_together(account, [other for other in target.workers if other != address][:_MOST_PARTS], request)
        return account
    raise Unreachable("\n".join([f"no worker answered (known from {target.origin}):", *failures]))


def _put_together(account: Account, others: Sequence[str], request: TraceRequest) -> None:
    alone = TraceRequest()
    alone.CopyFrom(request)
    alone.local_only = True
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        asked = [pool.submit(_ask_one, other, alone) for other in others]
    for other, answer in zip(others, asked, strict=True):
        try:
            part = answer.result()
        except grpc.RpcError:
            account.warnings.append(f"the worker at {other} does not answer: what it has recorded is missing")
            continue
        account.workers = part.workers | account.workers
        account.warnings += part.warnings
    count = len(account.workers)
    who = "one worker has" if count == 1 else f"{count} workers of one host have"
    account.warnings.append(f"this is what {who} recorded")


def _ask_one(address: str, request: TraceRequest) -> Account:
    account = Account()
    with calling.channel(address) as channel:
        try:
            for reply in _in_time(WorkerStub(channel).Trace(request)):
                _take(account, reply)
        except grpc.RpcError as error:
            if not account.workers:
                raise
            account.warnings.append(
                f"{address} stopped amid its answer ({error.details() or error.code().name}): the rest is missing"
            )
    return account


def _in_time(call: Any) -> Iterator[TraceReply]:
    """Each of which has come within `PATIENCE`."""
    while True:
        patience = threading.Timer(PATIENCE, call.cancel)
        patience.start()
        try:
            reply = next(call, None)
        finally:
            patience.cancel()
            patience.join()
        if reply is None:
            return
        yield reply
