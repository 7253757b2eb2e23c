"""`collectived status`: what runs, who waits for whom, and what failed; from any shell of the user."""

from __future__ import annotations

import os
import sys
import time

import click

from collectived_launcher.quantities import seconds

_WIDTH_OF_FILES = 160  # columns where the output is not a terminal


@click.command()
@click.option(
    "--worker", metavar="ADDRESS", help="Ask this worker (unix:/path or host:port); default: the running job's."
)
@click.option("--json", "as_json", is_flag=True, help="The whole answer as JSON; keys as in status.proto.")
@click.option("--watch", type=float, callback=seconds, metavar="SECONDS", help="Show it again every so many seconds.")
def status(worker: str | None, as_json: bool, watch: float | None) -> None:
    """Show workers, groups, ranks, what is in flight and what failed.

    Asks one worker of the running job, which asks the coordinator. Exit status 3 if nothing runs or nobody answers.
    """
    from collectived_launcher.status.find import ask, find  # gRPC and rich: `launch` must start without them

    while True:
        reply = ask(find(worker, os.environ))
        if as_json:
            click.echo(_as_json(reply))
        else:
            _print_tables(reply, clear=watch is not None and sys.stdout.isatty())
        if watch is None:
            return
        time.sleep(watch)


def _as_json(reply: object) -> str:
    from google.protobuf.json_format import MessageToJson
    from google.protobuf.message import Message

    assert isinstance(reply, Message)
    text: str = MessageToJson(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return text


def _print_tables(reply: object, clear: bool) -> None:
    from rich.console import Console

    from collectived_launcher.status.tables import tables
    from collectived_proto.v1.status_pb2 import StatusReply

    assert isinstance(reply, StatusReply)
    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if told else _WIDTH_OF_FILES)
    if clear:
        console.clear()
    for part in tables(reply):
        console.print(part)
