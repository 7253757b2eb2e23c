"""Finds a running job from any shell of its user, and asks it for its status."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import grpc

from collectived_launcher import grpc_channel
from collectived_launcher.credential import SECRET_FILE, TOKEN_FILE
from collectived_proto.error_status import describe_failure
from collectived_proto.ipc import job_files
from collectived_proto.ipc.job_files import JobFile
from collectived_proto.report.merge import merge_replies
from collectived_proto.v1.coordinator_pb2_grpc import CoordinatorStub
from collectived_proto.v1.status_pb2 import StatusReply, StatusRequest
from collectived_proto.v1.worker_pb2_grpc import WorkerStub

TIMEOUT = 2.0  # seconds for an answer, where the machine is busy; a stopped process is not waited for
WHOLE_REPLY_SECONDS = 0.4  # after so many, what workers know by themselves is taken instead of the whole
HEDGE_DELAY = 0.05  # seconds before the next one is asked too
PARTS_TIMEOUT = 0.2  # seconds for what workers know by themselves
_MAX_ASKED = 3  # workers
_MAX_PARTS = 32
UNREACHABLE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_CONNECT_SECONDS = 0.05


class Unreachable(click.ClickException):
    """Nothing runs, or what runs does not answer."""

    exit_code = 3

    def format_message(self) -> str:
        return f"UNREACHABLE: {self.message}"


@dataclass(frozen=True, slots=True)
class Target:
    """Workers of one job, any of which can answer for all; `origin` says how we came to know them.

    The coordinator is asked itself where no worker answers at once, if it can be without the job's secret.
    `unavailable`: workers that do not serve now, for people.
    """

    workers: tuple[str, ...]
    origin: str
    coordinator: str = ""
    unavailable: tuple[str, ...] = ()


def find_target(worker: str | None, job: str | None, environment: Mapping[str, str]) -> Target:
    """The job that is meant: of the options `--worker` and `--job` one that is given, else COLLECTIVED_WORKER, else the
    one job of this user that runs here; where none runs, that of the system's worker.

    Raises:
        Unreachable: none runs, or not the one that is named.
        click.UsageError: several run, or both options are given.
    """
    if worker and job:
        raise click.UsageError("--worker and --job exclude each other: a worker belongs to one job")
    if worker:
        return Target((worker,), "--worker")
    if not job and (named := environment.get("COLLECTIVED_WORKER")):
        return Target((named,), "COLLECTIVED_WORKER")
    running = job_files.list_running_jobs()
    if job:
        return _make_job_target(find_job(job, running))
    if not running:
        if system := job_files.find_system_worker():
            return Target((system,), "the system's worker")
        if starting := job_files.list_starting_jobs():
            raise Unreachable(f"you have no job on this host that serves yet; starting: {', '.join(starting)}")
        raise Unreachable(
            f"you have no job running on this host (none in {job_files.runtime_path()}, and no "
            f"{job_files.SYSTEM_FOLDER / job_files.SYSTEM_SOCKET}); start one with\n"
            "    collectived launch --workers 2 --clients 2 -- python train.py\n"
            "or name a worker: --worker unix:/path or --worker host:port"
        )
    if len(running) > 1:
        lines = "\n".join(f"    --job {one.job}  ({one.command})" for one in running)
        raise click.UsageError(f"you have {len(running)} jobs running on this host; say which:\n{lines}")
    return _make_job_target(running[0])


def find_job(name: str, running: Sequence[JobFile]) -> JobFile:
    """The job of that name.

    Raises:
        Unreachable: it is none of these.
    """
    for job in running:
        if job.job == name:
            return job
    names = ", ".join(job.job for job in running) or "none"
    raise Unreachable(f"you have no job {name!r} running on this host; running jobs: {names}")


def _make_job_target(job: JobFile) -> Target:
    coordinator = job.coordinator if job.coordinator.startswith("unix:") else ""
    return Target(job.workers, f"job {job.job}", coordinator, job.away)


def request_status(target: Target) -> StatusReply:
    """The first answer for the whole job; the next is asked when one has refused or takes its time.

    Beside that, workers are asked what each knows by itself: that is put together where they must do without their
    coordinator, or where the whole takes too long.

    Raises:
        Unreachable: none answered in time.
        click.ClickException: one refused.
    """
    with contextlib.ExitStack() as channels:
        begun = time.monotonic()
        parts = _LocalReplies(target.workers[:_MAX_PARTS], channels)
        reply = _await_first_reply(target, channels, parts, begun)
        if reply is not None and reply.answered_by in ("", "coordinator"):
            return reply
        told, silent = parts.collect(begun + PARTS_TIMEOUT)
        if reply is None:
            reply, *told = told
            reply.warnings.append(
                f"no answer for the whole job within {WHOLE_REPLY_SECONDS} s: this is what workers know by themselves"
            )
        known = set(reply.answered_by.split(", "))
        others = [part for part in told if part.answered_by not in known]
        whole = merge_replies([reply, *others]) if others else reply
        whole.warnings.extend(f"the worker at {worker} does not answer: what it knows is missing" for worker in silent)
        return whole


class _LocalReplies:
    """The answers of these workers about themselves: all are asked at once.

    `answers` has an entry for each that has ended.
    """

    def __init__(self, workers: Sequence[str], channels: contextlib.ExitStack) -> None:
        self.answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        request = StatusRequest(local_only=True)
        self._calls = {
            worker: WorkerStub(_open_channel(worker, channels)).Status.future(request, timeout=TIMEOUT)
            for worker in workers
        }
        for worker, answer in self._calls.items():
            answer.add_done_callback(
                lambda answer, worker=worker: self.answers.put(_Answer(worker, answer, is_part=True))
            )

    @property
    def has_reply(self) -> bool:
        return any(answer.done() and answer.code() is grpc.StatusCode.OK for answer in self._calls.values())

    def collect(self, until: float) -> tuple[list[StatusReply], list[str]]:
        """Return the answers until then, and the workers that have not answered."""
        parts, silent = [], []
        for worker, answer in self._calls.items():
            try:
                parts.append(answer.result(max(0.0, until - time.monotonic())))
            except (grpc.RpcError, grpc.FutureTimeoutError):
                silent.append(worker)
        return parts, silent


@dataclass(frozen=True, slots=True)
class _Answer:
    address: str
    reply: grpc.Future[StatusReply]
    is_part: bool = False


def _await_first_reply(
    target: Target, channels: contextlib.ExitStack, parts: _LocalReplies, begun: float
) -> StatusReply | None:
    """Wait for a whole answer. None: it takes too long, and some worker has answered its part."""
    failures: list[str] = []
    asked: list[tuple[str, Callable[[grpc.Channel], Any]]] = [(one, WorkerStub) for one in target.workers[:_MAX_ASKED]]
    if target.coordinator:
        asked.insert(1, (target.coordinator, CoordinatorStub))
    candidates = deque(asked)
    waiting, judged, due = 0, False, begun + WHOLE_REPLY_SECONDS
    while candidates or waiting:
        if candidates:
            address, stub = candidates.popleft()
            question = stub(_open_channel(address, channels)).Status.future(StatusRequest(), timeout=TIMEOUT)
            question.add_done_callback(lambda done, address=address: parts.answers.put(_Answer(address, done)))
            waiting += 1
        try:
            answer = parts.answers.get(timeout=_next_timeout(bool(candidates), due - time.monotonic()))
        except queue.Empty:
            answer = None
        if answer is not None and not answer.is_part:
            waiting -= 1
            try:
                return answer.reply.result()
            except grpc.RpcError as error:
                failures.append(_describe_failure(answer.address, error, target))
        if time.monotonic() >= due:
            if parts.has_reply:
                return None
            if not judged and not candidates:
                judged = True
                _check_stopped([address for address, _ in asked], target)
    raise Unreachable("\n".join([f"no worker answered (known from {target.origin}):", *failures]))


def _next_timeout(more: bool, left: float) -> float | None:
    """Seconds to wait for news: until the next is asked, or until the whole is late; then as long as it takes."""
    if more:
        return HEDGE_DELAY
    return left if left > 0 else None


def _describe_failure(address: str, error: grpc.RpcError, target: Target) -> str:
    code = error.code()
    if code not in UNREACHABLE_CODES and address != target.coordinator:
        raise click.ClickException(refusal_text(address, error)) from error
    return f"    {address}: {grpc_channel.describe_rpc_error(address, error)}"


def refusal_text(address: str, error: grpc.RpcError) -> str:
    """Describe the answer of a daemon that refused, and how it may be made to answer."""
    said = f"{address} answered {error.code().name}: {describe_failure(error)}"
    if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
        return said
    return f"{said}; set {SECRET_FILE}, or {TOKEN_FILE} to look only, to a file that holds it"


def _check_stopped(addresses: Sequence[str], target: Target) -> None:
    """Raise at once if all of these workers are stopped, for a stopped process cannot answer."""
    pids = {address: find_stopped_pid(address) for address in addresses}
    if all(pids.values()):
        lines = [
            f"    {address}: process {pid} is stopped; `kill -CONT {pid}` lets it go on"
            for address, pid in pids.items()
        ]
        raise Unreachable("\n".join([f"no worker answered (known from {target.origin}):", *lines]))


def _open_channel(address: str, channels: contextlib.ExitStack) -> grpc.Channel:
    return channels.enter_context(grpc_channel.open_channel(address))


def find_stopped_pid(address: str) -> int:
    """The pid behind a Unix socket if it is stopped (Ctrl-Z, SIGSTOP, a debugger) and so cannot answer, else 0."""
    if not address.startswith("unix:"):
        return 0
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_CONNECT_SECONDS)
        sock.connect(address.removeprefix("unix:"))
        pid: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return pid if state in ("T", "t") else 0
    return 0
