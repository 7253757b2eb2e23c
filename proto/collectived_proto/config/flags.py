"""The command line of a daemon, made of its configuration keys."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from collectived_proto.config.daemons import DAEMONS, DaemonSettings
from collectived_proto.config.settings import REQUIRED, Setting, list_settings
from collectived_proto.config.sources import NO_FILE, suggest_nearest

SUMMARY = {
    "coordinator": "assigns group keys and ranks, watches deadlines, distributes verdicts",
    "worker": "owns this host's devices and runs collectives",
}
_SOURCES = (
    "Each value is taken from the command line, else from its variable of the environment, else from the file "
    "(the page Configuration of the documentation lists them); `collectived config` shows the result."
)


# First flags of a daemon that a launcher starts for other users. Certificates that the environment names belong to the
# launcher's user, for calls. They are no certificates of a host, so the daemon must not serve with them.
NO_TLS_FLAGS = ("--tls-cert=", "--tls-key=", "--tls-ca=")


class SuggestingParser(argparse.ArgumentParser):
    """Suggests the nearest option where one is not known."""

    def error(self, message: str) -> NoReturn:
        marker = "unrecognized arguments: "
        if message.startswith(marker):
            wrong = message.removeprefix(marker).split()[0].partition("=")[0]
            options = [option for action in self._all_actions() for option in action.option_strings]
            message += suggest_nearest(wrong, options)
        super().error(message)

    def _all_actions(self) -> list[argparse.Action]:
        nested = [
            action
            for part in self._actions
            if isinstance(part, argparse._SubParsersAction)
            for parser in part.choices.values()
            for action in parser._actions
        ]
        return [*self._actions, *nested]


def build_parser(program: str) -> argparse.ArgumentParser:
    """Read `coordinator …` and `worker …`: `daemon`, `config`, `attached`, and the keys that were given, as words."""
    made = SuggestingParser(prog=program, description="The daemons of collectived.")
    daemons = made.add_subparsers(dest="daemon", required=True)
    for name, settings in DAEMONS.items():
        daemon = daemons.add_parser(name, help=SUMMARY[name], description=f"{SUMMARY[name]}. {_SOURCES}")
        daemon.add_argument(
            "--attached",
            action="store_true",
            help="the first line of standard input is the job's secret, and its end means: end in order",
        )
        add_settings(daemon, settings)
    return made


def add_settings(daemon: argparse.ArgumentParser, settings: type[DaemonSettings]) -> None:
    """An option for each key of a daemon, and `--config`."""
    daemon.add_argument("--config", metavar="FILE", help=f"configuration file; {NO_FILE}: read none")
    for key in list_settings(settings):
        if not key.flags:
            continue
        told: dict[str, Any] = {"dest": key.name, "default": argparse.SUPPRESS, "help": _help_text(key)}
        if key.value_type.is_boolean:
            daemon.add_argument(*key.flags, action=argparse.BooleanOptionalAction, **told)
        else:
            metavar = key.value_type.name.split()[-1].upper() if "`" not in key.value_type.name else "WORD"
            action = "append" if key.value_type.is_repeated else "store"
            if key.const is not None:
                told |= {"nargs": "?", "const": key.const}
            daemon.add_argument(*key.flags, action=action, metavar=metavar, **told)


def list_options(daemon: str) -> dict[str, str]:
    """The long options of a daemon, each with its meaning."""
    parser = argparse.ArgumentParser()
    add_settings(parser, DAEMONS[daemon])
    actions = [(name, action) for action in parser._actions for name in action.option_strings]
    return {name: (action.help or "").partition(";")[0] for name, action in actions if name.startswith("--")}


def collect_flags(settings: type[DaemonSettings], options: argparse.Namespace) -> dict[str, Any]:
    """Return the keys that were given on the command line."""
    return {key.name: getattr(options, key.name) for key in list_settings(settings) if hasattr(options, key.name)}


def _help_text(key: Setting) -> str:
    default = "" if key.default in (REQUIRED, None, "", False) else f"; default: {key.value_type.to_toml(key.default)}"
    needed = "; needed" if key.default is REQUIRED else ""
    return f"{key.description.removesuffix('.')}{default}{needed} [{key.variable}]".replace("%", "%%")
