"""`--worker` and `--job`, in the same words for every command that asks a running job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_Command = Callable[..., Any]

job_option = click.option(
    "--job", metavar="NAME", help="Your job of this name on this host.  [default: the one that runs]"
)


def target_options(command: _Command) -> _Command:
    """Add `--worker` and `--job`; `status.discovery.find_target` takes both."""
    worker = click.option(
        "--worker", metavar="ADDRESS", help="Ask this worker (unix:/path or host:port); default: the running job's."
    )
    return worker(job_option(command))
