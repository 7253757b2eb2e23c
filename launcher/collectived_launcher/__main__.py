"""The `collectived` command.

Exit status: 0 done, 1 something failed, 2 wrong usage, 3 nobody to talk to, 130 interrupted.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib.metadata import version

import click

from collectived_launcher.bench.command import bench
from collectived_launcher.certs.command import certs
from collectived_launcher.cluster.command import down, up
from collectived_launcher.cluster.run import run as run_clients
from collectived_launcher.config.command import config
from collectived_launcher.daemon import coordinator, simulate, worker
from collectived_launcher.doctor.command import doctor
from collectived_launcher.drain.command import drain
from collectived_launcher.launch.command import launch
from collectived_launcher.status.command import status
from collectived_launcher.top.command import top
from collectived_launcher.trace.command import trace

FAILED, INTERRUPTED = 1, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=__doc__.split("\n", 2)[2])
@click.version_option(version("collectived"), prog_name="collectived")
def collectived() -> None:
    """Collective communication as a service: start it, use it, look at it."""


_COMMANDS = (
    *(launch, run_clients, up, down, drain),
    *(status, top, trace, bench, doctor, simulate, config, certs),
    *(coordinator, worker),
)
for command in _COMMANDS:
    collectived.add_command(command)


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
        if isinstance(stream, io.TextIOWrapper):  # what its encoding has not is shown as `?`, and is no reason to end
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
