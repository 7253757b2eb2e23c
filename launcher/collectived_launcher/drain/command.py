"""`collectived drain`: takes workers, or a group, out of use without breaking what runs."""

from __future__ import annotations

import os

import click

from collectived_launcher.quantities import time

FAILED = 1


@click.command()
@click.option("--worker", metavar="ADDRESS", help="This worker: unix:/path or host:port.")
@click.option("--host", metavar="HOST", help="All workers of this host, as `collectived status` names it.")
@click.option("--group", metavar="NAME", help="This group alone; its workers go on with others.")
@click.option(
    "--timeout",
    callback=time,
    metavar="TIME",
    default="30s",
    show_default=True,
    help="What runs may take this long to finish (250ms, 30s, 2min); then it is cut.",
)
@click.option("--stay", is_flag=True, help="Drained workers go on living, and refusing, instead of ending.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON; keys as DrainReply in status.proto.")
def drain(worker: str | None, host: str | None, group: str | None, timeout: float, stay: bool, as_json: bool) -> int:
    """Let running collectives finish and refuse new ones; then end the drained workers.

    Drained are the workers of the running job on this host, or what is named. What some rank has submitted runs on, and
    the others may come to it; what is submitted later fails on all ranks with the same UnavailableError. Exit status 1
    if something was cut, which is said.
    """
    if (worker is not None) + (host is not None) + (group is not None) > 1:
        raise click.UsageError("--worker, --host and --group exclude each other")
    from collectived_launcher.drain.ask import drained  # gRPC: other commands must start without it
    from collectived_launcher.drain.show import document, lines
    from collectived_proto.v1.status_pb2 import DrainRequest
    from collectived_proto.wording import clean

    request = DrainRequest(host=host or "", group=group or "", timeout_seconds=timeout, stay=stay)
    reply = drained(worker, request, os.environ)
    if as_json:
        click.echo(document(reply))
    else:
        for line in lines(reply, timeout, stay):
            click.echo(clean(line))
    return FAILED if reply.cut or reply.uncertain else 0
