"""Finds a running job from any shell of its user, and asks it for its status."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import click
import grpc

from collectived_proto.local import jobs
from collectived_proto.v1.status_pb2 import StatusReply, StatusRequest
from collectived_proto.v1.worker_pb2_grpc import WorkerStub

PATIENCE = 1.2  # seconds for an answer: workers that hear nothing from the coordinator speak for themselves after 0.8
HEAD_START = 0.3  # seconds before the next worker is asked too
_MOST_ASKED = 3
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)


class Unreachable(click.ClickException):
    """Nothing runs, or what runs does not answer."""

    exit_code = 3

    def format_message(self) -> str:
        return f"UNREACHABLE: {self.message}"


@dataclass(frozen=True, slots=True)
class Target:
    """Workers of one job, any of which can answer for all; `origin` says how we came to know them."""

    workers: tuple[str, ...]
    origin: str


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
        lines = "\n".join(f"    --worker {job.workers[0]}  ({job.job}: {job.command})" for job in running)
        raise click.UsageError(f"{len(running)} jobs of yours run on this host; say which:\n{lines}")
    return Target(running[0].workers, f"job {running[0].job}")


def ask(target: Target) -> StatusReply:
    """The answer of the first worker that gives one; the next is asked when one has refused or takes its time.

    Raises:
        Unreachable: none answered in time.
        click.ClickException: one refused.
    """
    failures = []
    candidates = deque(target.workers[:_MOST_ASKED])
    answers: queue.SimpleQueue[tuple[str, grpc.Future[StatusReply]]] = queue.SimpleQueue()
    waiting = 0
    with contextlib.ExitStack() as channels:
        while candidates or waiting:
            if candidates:
                _ask_one(candidates.popleft(), channels, answers.put)
                waiting += 1
            try:
                address, answer = answers.get(timeout=HEAD_START if candidates else None)
            except queue.Empty:
                continue
            waiting -= 1
            try:
                return answer.result()
            except grpc.RpcError as error:
                code, details = error.code(), error.details()
                if code not in _SILENT:
                    raise click.ClickException(f"{address} answered {code.name}: {details}") from error
                failures.append(f"    {address}: {details or code.name}")
    raise Unreachable("\n".join([f"no worker answered (known from {target.origin}):", *failures]))


def _ask_one(
    address: str, channels: contextlib.ExitStack, answered: Callable[[tuple[str, grpc.Future[StatusReply]]], None]
) -> None:
    channel = channels.enter_context(grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]))
    answer = WorkerStub(channel).Status.future(StatusRequest(), timeout=PATIENCE)
    answer.add_done_callback(lambda answer: answered((address, answer)))
