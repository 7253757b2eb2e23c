"""Finds a running job from any shell of its user, and asks it for its status."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import click
import grpc

from collectived_proto.local import jobs
from collectived_proto.v1.status_pb2 import StatusReply, StatusRequest
from collectived_proto.v1.worker_pb2_grpc import WorkerStub

PATIENCE = 0.9  # seconds for all attempts together
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
    """The job that is meant: the argument, else COLLECTIVED_WORKER, else the one job of this user that runs here.

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
        raise Unreachable(
            f"no job of yours runs on this host (none in {jobs.runtime_folder()}); start one with\n"
            "    collectived launch --workers 2 --clients 2 -- python train.py\n"
            "or name a worker: --worker unix:/path or --worker host:port"
        )
    if len(running) > 1:
        lines = "\n".join(f"    --worker {job.workers[0]}  ({job.job}: {job.command})" for job in running)
        raise click.UsageError(f"{len(running)} jobs of yours run on this host; say which:\n{lines}")
    return Target(running[0].workers, f"job {running[0].job}")


def ask(target: Target) -> StatusReply:
    """The answer of the first worker that gives one.

    Raises:
        Unreachable: none answered in time.
        click.ClickException: one refused.
    """
    failures = []
    deadline = time.monotonic() + PATIENCE
    candidates = target.workers[:3]
    for tried, address in enumerate(candidates):
        patience = max(0.05, (deadline - time.monotonic()) / (len(candidates) - tried))
        try:
            return _ask_one(address, patience)
        except grpc.RpcError as error:
            if error.code() not in _SILENT:
                raise click.ClickException(f"{address} answered {error.code().name}: {error.details()}") from error
            failures.append(f"    {address}: {error.details() or error.code().name}")
    raise Unreachable("\n".join([f"no worker answered (known from {target.origin}):", *failures]))


def _ask_one(address: str, patience: float) -> StatusReply:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = WorkerStub(channel)
        reply: StatusReply = stub.Status(StatusRequest(), timeout=patience)
        return reply
