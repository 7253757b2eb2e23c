"""The `collectived` command.

Exit status: 0 done, 1 something failed, 2 wrong usage, 3 no daemon reachable, 130 interrupted.
"""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Sequence

import click

from collectived_launcher.lazy_commands import LazyCommands
from collectived_proto.types import RELEASE

FAILED, INTERRUPTED = 1, 130

_VERBS = LazyCommands(
    {
        "launch": "launch.cli",
        "run": "cluster.run",
        "up": "cluster.cli",
        "down": "cluster.cli",
        "logs": "cluster.logs",
        "drain": "drain",
        "status": "status.cli",
        "top": "top.cli",
        "trace": "trace.cli",
        "bench": "bench.cli",
        "doctor": "doctor.cli",
        "simulate": "daemon",
        "completion": "completion",
        "config": "config.cli",
        "certs": "certs.cli",
        "coordinator": "daemon",
        "worker": "daemon",
    }
)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]}, epilog=__doc__.split("\n", 2)[2], commands=_VERBS
)
@click.version_option(RELEASE, prog_name="collectived")
def collectived() -> None:
    """Collective communication as a service: start it, use it, look at it."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    try:
        result = collectived.main(list(arguments), prog_name="collectived", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.Exit as end:
        return end.exit_code
    return result if isinstance(result, int) else 0


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that its encoding lacks is shown as `?`
            stream.reconfigure(errors="replace")
    status = run(sys.argv[1:])
    gc.freeze()  # else the end looks through all of it for garbage: a sixth of what a short command takes
    sys.exit(status)


if __name__ == "__main__":
    main()
