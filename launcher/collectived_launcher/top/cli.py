"""`collectived top`: the picture of `status`, live, until the person has seen enough or the job is over."""

from __future__ import annotations

import os
import signal

import click

from collectived_launcher.quantities import REFRESH_INTERVAL
from collectived_launcher.target_options import target_options


@click.command(short_help="Watch the running job live, problems first.")
@target_options
@click.option(
    "--interval",
    type=REFRESH_INTERVAL,
    default="1s",
    show_default=True,
    help="Time between requests, 200ms or more; + and - change it.",
)
def top(worker: str | None, job: str | None, interval: float) -> None:
    """Watch the running job live, problems first.

    Keys: ? shows them, q quits. Ends by itself when the job does. Exit status 3 if no job runs or no daemon answers.
    """
    from collectived_launcher.status.discovery import (  # gRPC and rich: `launch` must start without them
        find_target,
        request_status,
    )
    from collectived_launcher.top.loop import TopLoop
    from collectived_launcher.top.terminal import check_terminal

    if reason := check_terminal():
        raise click.UsageError(
            f"top needs a terminal, and {reason}: use `collectived status`, with --watch TIME or --json"
        )
    target = find_target(worker, job, os.environ)
    watch = TopLoop(target, request_status(target), interval)
    ended_by = watch.run()
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt
    if ended_by:
        # The terminal is itself again: now this may end as if it had never been caught.
        signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
    if watch.is_job_over:
        click.echo(f"{target.origin} is over")
