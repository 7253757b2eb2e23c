"""Asks a running job what its recorders have kept, and puts the parts of the answer together."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import click
import grpc

from collectived_launcher import grpc_channel
from collectived_launcher.status.discovery import UNREACHABLE_CODES, Target, Unreachable, refusal_text
from collectived_proto.error_status import describe_failure
from collectived_proto.v1.trace_pb2 import TraceCollective, TraceLane, TraceReply, TraceRequest, WorkerClock
from collectived_proto.v1.worker_pb2_grpc import WorkerStub

# Seconds for each part; a worker waits 2 s for one of the coordinator, which waits 1.5 s for a worker's.
PART_TIMEOUT = 2.5
_MAX_ASKED = 3
_MAX_PARTS = 32


@dataclass(slots=True)
class TracedProcess:
    """One worker's account. Times in it are its own; `clock_offset` makes them those of the whole trace."""

    task: int
    host: str = ""
    pid: int = 0
    now: float = 0.0
    clock: WorkerClock = field(default_factory=WorkerClock)
    group_loops: list[TraceLane] = field(default_factory=list)
    collectives: list[TraceCollective] = field(default_factory=list)
    left_out: int = 0
    is_complete: bool = False

    @property
    def clock_offset(self) -> float:
        return self.clock.offset_seconds


@dataclass(slots=True)
class CollectedTrace:
    """The reports of all workers. `unix_time` is the time of day when the common clock showed `monotonic_time`.
    `answered_by`: the worker that answered, if the coordinator does not answer; '' where the coordinator
    answered.
    """

    unix_time: float = 0.0
    monotonic_time: float = 0.0
    answered_by: str = ""
    workers: dict[int, TracedProcess] = field(default_factory=dict)
    silent_workers: dict[int, str] = field(default_factory=dict)  # task -> host: asked, without an answer
    warnings: list[str] = field(default_factory=list)

    @property
    def group_names(self) -> set[str]:
        """Names of the groups that some worker has reported."""
        return {group_loop.group for worker in self.workers.values() for group_loop in worker.group_loops}

    @property
    def clock_error(self) -> float:
        """By how many seconds times of different workers may be wrong at most, one to another."""
        errors = sorted(worker.clock.error_seconds for worker in self.workers.values())
        return sum(errors[-2:])


def add_reply(account: CollectedTrace, reply: TraceReply) -> None:
    """Add one part of an answer."""
    if reply.HasField("time"):
        account.unix_time, account.monotonic_time = reply.time.unix, reply.time.monotonic
    account.answered_by = account.answered_by or reply.answered_by
    if reply.HasField("worker"):
        part = reply.worker
        worker = account.workers.setdefault(part.task, TracedProcess(part.task))
        if part.now:
            worker.host, worker.pid, worker.now, worker.clock = part.host, part.pid, part.now, part.clock
        worker.group_loops.extend(part.lanes)
        worker.collectives.extend(part.collectives)
        worker.left_out += part.left_out
        worker.is_complete = part.last
    account.silent_workers |= {one.task: one.host for one in reply.silent}
    account.warnings.extend(reply.warnings)


def request_trace(target: Target, request: TraceRequest) -> CollectedTrace:
    """The account of the first worker that gives one, asked one after another.

    Where it must do without the coordinator, what the host's other workers know is put to it: they have the same clock.

    Raises:
        Unreachable: none answered in time.
        click.ClickException: one refused.
    """
    failures = []
    for address in target.workers[:_MAX_ASKED]:
        try:
            account = _request_worker(address, request)
        except grpc.RpcError as error:
            if error.code() not in (*UNREACHABLE_CODES, grpc.StatusCode.CANCELLED):
                raise click.ClickException(refusal_text(address, error)) from error
            failures.append(f"    {address}: {grpc_channel.describe_rpc_error(address, error)}")
            continue
        if account.answered_by and not request.local_only:
            _add_host_workers(account, [other for other in target.workers if other != address][:_MAX_PARTS], request)
        return account
    raise Unreachable("\n".join([f"no worker answered (known from {target.origin}):", *failures]))


def _add_host_workers(account: CollectedTrace, others: Sequence[str], request: TraceRequest) -> None:
    alone = TraceRequest()
    alone.CopyFrom(request)
    alone.local_only = True
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        asked = [pool.submit(_request_worker, other, alone) for other in others]
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


def _request_worker(address: str, request: TraceRequest) -> CollectedTrace:
    account = CollectedTrace()
    with grpc_channel.open_channel(address) as channel:
        try:
            for reply in _with_timeout(WorkerStub(channel).Trace(request)):
                add_reply(account, reply)
        except grpc.RpcError as error:
            if not account.workers:
                raise
            account.warnings.append(
                f"{address} stopped amid its answer ({describe_failure(error)}): the rest is missing"
            )
    return account


def _with_timeout(call: Any) -> Iterator[TraceReply]:
    """Each of which has come within `PART_TIMEOUT`."""
    while True:
        patience = threading.Timer(PART_TIMEOUT, call.cancel)
        patience.start()
        try:
            reply = next(call, None)
        finally:
            patience.cancel()
            patience.join()
        if reply is None:
            return
        yield reply
