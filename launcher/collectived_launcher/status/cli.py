"""`collectived status`: running groups, ranks that others wait for, and failures; from any shell of the user."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from typing import Any

import click

from collectived_launcher.quantities import REFRESH_INTERVAL
from collectived_launcher.target_options import target_options

_NON_TTY_WIDTH = 160  # columns where the output is not a terminal


@click.command(short_help="Show problems, groups and workers of a running job.")
@target_options
@click.option(
    "--wide",
    is_flag=True,
    help="Also collectives in flight with their algorithm and its reason, choices of AUTO, workers, ranks and all "
    "known failures.",
)
@click.option("--group", metavar="NAME", help="All about this group.")
@click.option("--host", metavar="NAME", help="All about this host: its workers and their ranks.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="The answer as JSON; the documentation describes every field on its page Fields of collectived status --json.",
)
@click.option("--watch", type=REFRESH_INTERVAL, help="Repeat at this interval, 200ms or more.")
def status(
    worker: str | None,
    job: str | None,
    wide: bool,
    group: str | None,
    host: str | None,
    as_json: bool,
    watch: float | None,
) -> None:
    """Show problems (ranks that others wait for, lost workers, recent failures), then counts.

    Asks one worker of the running job, which asks the coordinator. Exit status 3 if no job runs or no daemon answers.
    """
    from collectived_launcher.status.discovery import (  # gRPC and rich: `launch` must start without them
        find_target,
        request_status,
    )
    from collectived_launcher.status.filters import filter_findings, filter_status
    from collectived_launcher.status.tables import build_tables
    from collectived_proto.report.status_json import status_to_json

    while True:
        whole = request_status(find_target(worker, job, os.environ))
        part = filter_status(whole, group, host)
        if as_json:
            click.echo(status_to_json(part))
        else:
            parts = build_tables(part, filter_findings(whole, part), wide=wide or group is not None or host is not None)
            _print(parts, clear=watch is not None and sys.stdout.isatty())
        if watch is None:
            return
        time.sleep(watch)


def _print(parts: Iterable[Any], clear: bool) -> None:
    from rich.console import Console

    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if told else _NON_TTY_WIDTH, markup=False, emoji=False, highlight=False)
    if clear:
        console.clear()
    for part in parts:
        console.print(part)
