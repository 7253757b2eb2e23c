"""Finds a running job from any shell of its user, and asks it for its status."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import grpc

from collectived_proto.lanes import together
from collectived_proto.local import jobs
from collectived_proto.v1.coordinator_pb2_grpc import CoordinatorStub
from collectived_proto.v1.status_pb2 import StatusReply, StatusRequest
from collectived_proto.v1.worker_pb2_grpc import WorkerStub

PATIENCE = 2.0  # seconds for an answer: workers that hear nothing from the coordinator speak for themselves after 0.6
HEAD_START = 0.1  # seconds before the next one is asked too
PARTS_PATIENCE = 0.2  # seconds for what other workers know by themselves, where there is no coordinator
_MOST_ASKED = 3  # workers
_MOST_PARTS = 32
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)


class Unreachable(click.ClickException):
    """Nothing runs, or what runs does not answer."""

    exit_code = 3

    def format_message(self) -> str:
        return f"UNREACHABLE: {self.message}"


@dataclass(frozen=True, slots=True)
class Target:
    """Workers of one job, any of which can answer for all; `origin` says how we came to know them.

    The coordinator is asked itself where no worker answers at once, if it can be without the job's secret. `away`:
    workers that do not serve now, for people.
    """

    workers: tuple[str, ...]
    origin: str
    coordinator: str = ""
    away: tuple[str, ...] = ()


def find(worker: str | None, environment: Mapping[str, str]) -> Target:
    """The job that is meant: the argument, else COLLECTIVED_WORKER, else the one job of this user that runs here; where
    none runs, that of the system's worker.

    Raises:
        Unreachable: none runs.
        click.UsageError: several run.
    """
    if worker:
        return Target((worker,), "--worker")
    if named := environment.get("COLLECTIVED_WORKER"):
        return Target((named,), "COLLECTIVED_WORKER")
    running = jobs.running()
    if not running:
        if system := jobs.system_worker():
            return Target((system,), "the system's worker")
        raise Unreachable(
            f"no job of yours runs on this host (none in {jobs.runtime_path()}, and no "
            f"{jobs.SYSTEM_FOLDER / jobs.SYSTEM_SOCKET}); start one with\n"
            "    collectived launch --workers 2 --clients 2 -- python train.py\n"
            "or name a worker: --worker unix:/path or --worker host:port"
        )
    if len(running) > 1:
        lines = "\n".join(
            f"    --worker {(job.workers or ('(none serves)',))[0]}  ({job.job}: {job.command})" for job in running
        )
        raise click.UsageError(f"{len(running)} jobs of yours run on this host; say which:\n{lines}")
    job = running[0]
    coordinator = job.coordinator if job.coordinator.startswith("unix:") else ""
    return Target(job.workers, f"job {job.job}", coordinator, job.away)


def ask(target: Target) -> StatusReply:
    """The first answer for the whole job; the next is asked when one has refused or takes its time.

    Where workers must do without their coordinator, what each of them knows by itself is put together.

    Raises:
        Unreachable: none answered in time.
        click.ClickException: one refused.
    """
    with contextlib.ExitStack() as channels:
        reply = _first_answer(target, channels)
        others = [worker for worker in target.workers if worker != reply.answered_at]
        if reply.status.answered_by in ("", "coordinator") or not others:
            return reply.status
        parts, silent = _parts(others[:_MOST_PARTS], channels)
        whole = together([reply.status, *parts])
        whole.warnings.extend(f"the worker at {worker} does not answer: what it knows is missing" for worker in silent)
        return whole


@dataclass(frozen=True, slots=True)
class _Answer:
    status: StatusReply
    answered_at: str


def _first_answer(target: Target, channels: contextlib.ExitStack) -> _Answer:
    failures = []
    asked: list[tuple[str, Callable[[grpc.Channel], Any]]] = [(one, WorkerStub) for one in target.workers[:_MOST_ASKED]]
    if target.coordinator:
        asked.insert(1, (target.coordinator, CoordinatorStub))
    candidates = deque(asked)
    answers: queue.SimpleQueue[tuple[str, grpc.Future[StatusReply]]] = queue.SimpleQueue()
    waiting = 0
    while candidates or waiting:
        if candidates:
            address, stub = candidates.popleft()
            answer = stub(_channel(address, channels)).Status.future(StatusRequest(), timeout=PATIENCE)
            answer.add_done_callback(lambda answer, address=address: answers.put((address, answer)))
            waiting += 1
        try:
            address, answer = answers.get(timeout=HEAD_START if candidates else None)
        except queue.Empty:
            continue
        waiting -= 1
        try:
            return _Answer(answer.result(), address)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code not in _SILENT and address != target.coordinator:
                raise click.ClickException(f"{address} answered {code.name}: {details}") from error
            failures.append(f"    {address}: {details or code.name}")
    raise Unreachable("\n".join([f"no worker answered (known from {target.origin}):", *failures]))


def _parts(workers: Sequence[str], channels: contextlib.ExitStack) -> tuple[list[StatusReply], list[str]]:
    """What these workers know by themselves, and which do not tell at once."""
    request = StatusRequest(local_only=True)
    asked = [
        WorkerStub(_channel(worker, channels)).Status.future(request, timeout=PARTS_PATIENCE) for worker in workers
    ]
    parts, silent = [], []
    for worker, answer in zip(workers, asked, strict=True):
        try:
            parts.append(answer.result())
        except grpc.RpcError:
            silent.append(worker)
    return parts, silent


def _channel(address: str, channels: contextlib.ExitStack) -> grpc.Channel:
    return channels.enter_context(grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]))
