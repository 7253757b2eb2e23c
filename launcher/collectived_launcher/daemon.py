"""`collectived coordinator`, `worker` and `simulate`: this process becomes the runtime's."""

from __future__ import annotations

import os
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from collectived_launcher.launch.daemons import DAEMON_COMMAND
from collectived_proto.config.flags import list_options

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}


class PassingCommand(click.Command):
    """A command whose options a daemon reads, and which completes them nevertheless."""

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        options = list_options(self.name or "")
        return [CompletionItem(name, help=text) for name, text in options.items() if name.startswith(incomplete)]


@click.command(
    short_help="Run the coordinator of a job.",
    cls=PassingCommand,
    context_settings=_PASS_THROUGH,
    add_help_option=False,
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def coordinator(options: tuple[str, ...]) -> NoReturn:
    """Run the coordinator of a job; `collectived coordinator --help` shows its options."""
    _exec_daemon("coordinator", options)


@click.command(
    short_help="Run the worker of a host.", cls=PassingCommand, context_settings=_PASS_THROUGH, add_help_option=False
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def worker(options: tuple[str, ...]) -> NoReturn:
    """Run the worker of a host; `collectived worker --help` shows its options."""
    _exec_daemon("worker", options)


@click.command(short_help="Predict how long collectives take.", context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def simulate(options: tuple[str, ...]) -> NoReturn:
    """Predict how long collectives take; `collectived simulate --help` shows its options."""
    _exec_daemon("simulate", options)


def _exec_daemon(kind: str, options: tuple[str, ...]) -> NoReturn:
    os.execv(DAEMON_COMMAND[0], [*DAEMON_COMMAND, kind, *options])
