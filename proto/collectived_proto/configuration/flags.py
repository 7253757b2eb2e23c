"""The command line of a daemon, made of the keys that it can be told."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from collectived_proto.configuration.daemons import DAEMONS, DaemonSettings
from collectived_proto.configuration.files import NONE, meant
from collectived_proto.configuration.keys import REQUIRED, Key, keys_of

SUMMARY = {
    "coordinator": "hands out group keys and ranks, watches deadlines, spreads verdicts",
    "worker": "owns this host's devices and runs collectives",
}
_SOURCES = (
    "Each value is taken from the command line, else from its variable of the environment, else from the file "
    "(docs/configuration.md); `collectived config` shows what that comes to."
)


# What daemons are told first by whoever starts them for others: certificates that the environment names are those with
# which its user calls, and no host's.
NO_CERTIFICATES = ("--tls-cert=", "--tls-key=", "--tls-ca=")


class Parser(argparse.ArgumentParser):
    """Suggests the nearest option where one is not known."""

    def error(self, message: str) -> NoReturn:
        marker = "unrecognized arguments: "
        if message.startswith(marker):
            wrong = message.removeprefix(marker).split()[0].partition("=")[0]
            options = [option for action in self._every_action() for option in action.option_strings]
            message += meant(wrong, options)
        super().error(message)

    def _every_action(self) -> list[argparse.Action]:
        nested = [
            action
            for part in self._actions
            if isinstance(part, argparse._SubParsersAction)
            for parser in part.choices.values()
            for action in parser._actions
        ]
        return [*self._actions, *nested]


def parser(program: str) -> argparse.ArgumentParser:
    """Reads `coordinator …` and `worker …`: `daemon`, `config`, `attached`, and the keys that were given, as words."""
    made = Parser(prog=program, description="The daemons of collectived.")
    daemons = made.add_subparsers(dest="daemon", required=True)
    for name, settings in DAEMONS.items():
        daemon = daemons.add_parser(name, help=SUMMARY[name], description=f"{SUMMARY[name]}. {_SOURCES}")
        daemon.add_argument(
            "--attached",
            action="store_true",
            help="the first line of standard input is the job's secret, and its end means: end in order",
        )
        add_keys(daemon, settings)
    return made


def add_keys(daemon: argparse.ArgumentParser, settings: type[DaemonSettings]) -> None:
    """An option for each key of a daemon, and `--config`."""
    daemon.add_argument("--config", metavar="FILE", help=f"configuration file; {NONE}: read none")
    for key in keys_of(settings):
        if not key.flags:
            continue
        told: dict[str, Any] = {"dest": key.name, "default": argparse.SUPPRESS, "help": _help(key)}
        if key.kind.yes_or_no:
            daemon.add_argument(*key.flags, action=argparse.BooleanOptionalAction, **told)
        else:
            metavar = key.kind.name.split()[-1].upper() if "`" not in key.kind.name else "WORD"
            action = "append" if key.kind.repeats else "store"
            if key.alone is not None:
                told |= {"nargs": "?", "const": key.alone}
            daemon.add_argument(*key.flags, action=action, metavar=metavar, **told)


def given(settings: type[DaemonSettings], options: argparse.Namespace) -> dict[str, Any]:
    """The keys that were given on the command line."""
    return {key.name: getattr(options, key.name) for key in keys_of(settings) if hasattr(options, key.name)}


def _help(key: Key) -> str:
    default = "" if key.default in (REQUIRED, None, "", False) else f"; default: {key.kind.write(key.default)}"
    needed = "; needed" if key.default is REQUIRED else ""
    return f"{key.sentence.removesuffix('.')}{default}{needed} [{key.variable}]".replace("%", "%%")
