"""Asks workers to drain, and puts what they answer together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import click
import grpc

from collectived_launcher import calling
from collectived_launcher.credential import SECRET_FILE
from collectived_launcher.drain.together import together
from collectived_launcher.status.find import Target, Unreachable, find
from collectived_proto.v1.status_pb2 import DrainReply, DrainRequest
from collectived_proto.v1.worker_pb2_grpc import WorkerStub

_BEYOND = 9.0  # seconds after the timeout in which an answer comes, whatever happens


def drained(worker: str | None, request: DrainRequest, environment: Mapping[str, str]) -> DrainReply:
    """What came of it.

    Raises:
        Unreachable: nobody runs, or no worker answers.
        click.ClickException: it was refused: there is no such host or group.
    """
    target = find(worker, environment)
    if request.host or request.group:
        return _any(target, request)
    return _every(target, request)


def _any(target: Target, request: DrainRequest) -> DrainReply:
    """Of the first worker that answers: it asks the coordinator for all."""
    failures = []
    for address in target.workers:
        with contextlib.ExitStack() as channels:
            try:
                return _call(address, request, channels).result()
            except grpc.RpcError as error:
                failures.append(_failure(address, error))
    raise _unreachable(target, failures)


def _every(target: Target, request: DrainRequest) -> DrainReply:
    """Of all these workers, which are drained side by side."""
    replies, failures = [], []
    with contextlib.ExitStack() as channels:
        calls = [(address, _call(address, request, channels)) for address in target.workers]
        for address, call in calls:
            try:
                replies.append(call.result())
            except grpc.RpcError as error:
                failures.append(_failure(address, error))
    if len(failures) == len(calls):
        raise _unreachable(target, failures)
    skipped = [f"{one} is away, and was skipped" for one in target.away]
    return together([*replies, DrainReply(notes=[*failures, *skipped], uncertain=bool(failures))])


def _call(address: str, request: DrainRequest, channels: contextlib.ExitStack) -> grpc.Future[DrainReply]:
    channel = channels.enter_context(calling.channel(address))
    answer: grpc.Future[DrainReply] = WorkerStub(channel).Drain.future(
        request, timeout=request.timeout_seconds + _BEYOND
    )
    return answer


def _failure(address: str, error: grpc.RpcError) -> str:
    """Raises what no other worker would answer differently."""
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        raise click.ClickException(f"{error.details()}; set {SECRET_FILE} to a file that holds it") from error
    if error.code() is grpc.StatusCode.NOT_FOUND:
        raise click.ClickException(str(error.details())) from error
    return f"{address}: {calling.why(address, error)}"


def _unreachable(target: Target, failures: list[str]) -> Unreachable:
    return Unreachable("\n    ".join([f"no worker was drained (known from {target.origin}):", *failures, *target.away]))
