"""`collectived drain`: takes workers, or a group, out of use without breaking what runs.

It asks several workers side by side, and shows what came of it as one, in words or as JSON.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping

import click
import grpc
from google.protobuf.json_format import MessageToJson

from collectived_launcher import grpc_channel
from collectived_launcher.credential import SECRET_FILE
from collectived_launcher.quantities import Time
from collectived_launcher.status.discovery import Target, Unreachable, find_target
from collectived_launcher.target_options import job_option
from collectived_proto.config.units import format_time
from collectived_proto.report.phrases import is_or_are, ranks_text
from collectived_proto.v1.status_pb2 import Cut, DrainReply, DrainRequest
from collectived_proto.v1.worker_pb2_grpc import WorkerStub

_REPLY_MARGIN = 9.0  # seconds after the timeout in which an answer comes, whatever happens


def request_drain(
    worker: str | None, job: str | None, request: DrainRequest, environment: Mapping[str, str]
) -> DrainReply:
    """Send a request to drain, and return the reply.

    Raises:
        Unreachable: no job runs, or no worker answers.
        click.ClickException: it was refused: there is no such host or group.
    """
    target = find_target(worker, job, environment)
    if request.host or request.group:
        return _drain_via_any(target, request)
    return _drain_each(target, request)


def _drain_via_any(target: Target, request: DrainRequest) -> DrainReply:
    """Of the first worker that answers: it asks the coordinator for all."""
    failures = []
    for address in target.workers:
        with contextlib.ExitStack() as channels:
            try:
                return _start_drain(address, request, channels).result()
            except grpc.RpcError as error:
                failures.append(_describe_failure(address, error))
    raise _unreachable(target, failures)


def _drain_each(target: Target, request: DrainRequest) -> DrainReply:
    """Of all these workers, which are drained side by side."""
    replies, failures = [], []
    with contextlib.ExitStack() as channels:
        calls = [(address, _start_drain(address, request, channels)) for address in target.workers]
        for address, call in calls:
            try:
                replies.append(call.result())
            except grpc.RpcError as error:
                failures.append(_describe_failure(address, error))
    if len(failures) == len(calls):
        raise _unreachable(target, failures)
    skipped = [f"{one} is away, and was skipped" for one in target.unavailable]
    return merge_replies([*replies, DrainReply(notes=[*failures, *skipped], uncertain=bool(failures))])


def _start_drain(address: str, request: DrainRequest, channels: contextlib.ExitStack) -> grpc.Future[DrainReply]:
    channel = channels.enter_context(grpc_channel.open_channel(address))
    answer: grpc.Future[DrainReply] = WorkerStub(channel).Drain.future(
        request, timeout=request.timeout_seconds + _REPLY_MARGIN
    )
    return answer


def _describe_failure(address: str, error: grpc.RpcError) -> str:
    """Raises what no other worker would answer differently."""
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        raise click.ClickException(f"{error.details()}; set {SECRET_FILE} to a file that holds it") from error
    if error.code() is grpc.StatusCode.NOT_FOUND:
        raise click.ClickException(str(error.details())) from error
    return f"{address}: {grpc_channel.describe_rpc_error(address, error)}"


def _unreachable(target: Target, failures: list[str]) -> Unreachable:
    return Unreachable(
        "\n    ".join([f"no worker was drained (known from {target.origin}):", *failures, *target.unavailable])
    )


def format_reply(reply: DrainReply, timeout: float, stay: bool) -> Iterator[str]:
    """Format a reply for people: the drained workers and groups, and the collectives that were cut, one line each."""
    end = "refuse everything new" if stay else "end"
    if reply.workers:
        names = ", ".join(map(str, reply.workers))
        one = len(reply.workers) == 1
        yield f"worker{'' if one else 's'} {names} {is_or_are(len(reply.workers))} drained, and {_conjugate(end, one)}"
    for group in reply.groups:
        yield f"group {group!r} begins nothing new"
    for cut in reply.cut:
        yield f"cut after {format_time(timeout)}: {describe_cut(cut)}"
    yield from reply.notes
    if not reply.cut and not reply.uncertain:
        yield "all that ran has finished"


def format_losses(reply: DrainReply) -> Iterator[str]:
    """Format the collectives that were cut, or may have been, one line each; none where all has finished."""
    for cut in reply.cut:
        yield f"cut: {describe_cut(cut)}"
    if reply.uncertain:
        yield from reply.notes


def describe_cut(cut: Cut) -> str:
    """`all_reduce(sum) #3 of group 'train' at train.py:8 (worker 1); rank 1 did not come to it`"""
    number = f" #{cut.instance}" if cut.instance >= 0 else ""
    site = f" at {cut.site}" if cut.site else ""
    missing = f"; {ranks_text(cut.missing)} did not come to it" if cut.missing else ""
    return f"{cut.op or 'a collective'}{number} of group {cut.group!r}{site} (worker {cut.worker}){missing}"


def document(reply: DrainReply) -> str:
    text: str = MessageToJson(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return text


def _conjugate(verb: str, one: bool) -> str:
    first, _, rest = verb.partition(" ")
    return f"{first}{'s' if one else ''} {rest}".rstrip()


def merge_replies(replies: Iterable[DrainReply]) -> DrainReply:
    """A collective of a group with several drained workers is cut once, and reported once."""
    whole = DrainReply()
    for reply in replies:
        whole.MergeFrom(reply)
    merged = DrainReply(
        workers=sorted(set(whole.workers)),
        groups=sorted(set(whole.groups)),
        notes=list(dict.fromkeys(whole.notes)),
        uncertain=whole.uncertain,
    )
    seen = set()
    for cut in whole.cut:
        if cut.instance < 0 or (cut.generation, cut.instance) not in seen:
            merged.cut.append(cut)
        seen.add((cut.generation, cut.instance))
    return merged


FAILED = 1


@click.command(short_help="End workers, or a group, without cutting what runs.")
@click.option("--worker", metavar="ADDRESS", help="This worker: unix:/path or host:port.")
@job_option
@click.option("--host", metavar="HOST", help="All workers of this host, as `collectived status` names it.")
@click.option("--group", metavar="NAME", help="This group alone; its workers go on with others.")
@click.option(
    "--timeout",
    type=Time(),
    default="30s",
    show_default=True,
    help="Time for running collectives to finish (250ms, 30s, 2min); then they are cut.",
)
@click.option("--stay", is_flag=True, help="Drained workers live on and refuse new work, instead of ending.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON; keys as DrainReply in status.proto.")
def drain(
    worker: str | None,
    job: str | None,
    host: str | None,
    group: str | None,
    timeout: float,
    stay: bool,
    as_json: bool,
) -> int:
    """Let running collectives finish and refuse new ones; then end the drained workers.

    Drains the workers of the running job on this host, or those of the options. A collective that some rank has
    submitted goes on, and the others may join it; later ones fail on all ranks with the same UnavailableError. Exit
    status 1 if collectives were cut, which are named.
    """
    if (worker is not None) + (host is not None) + (group is not None) > 1:
        raise click.UsageError("--worker, --host and --group exclude each other")
    from collectived_proto.report.phrases import sanitize_text
    from collectived_proto.v1.status_pb2 import DrainRequest

    request = DrainRequest(host=host or "", group=group or "", timeout_seconds=timeout, stay=stay)
    reply = request_drain(worker, job, request, os.environ)
    if as_json:
        click.echo(document(reply))
    else:
        for line in format_reply(reply, timeout, stay):
            click.echo(sanitize_text(line))
    return FAILED if reply.cut or reply.uncertain else 0
