"""Every command line in deploy/ is one that the command takes: flags that exist, with values that they can have."""

from __future__ import annotations

import re

import click
import pytest
from tests.e2e.deploy.commands import Command, all_commands, of_compose, of_manifests, of_units

from collectived_launcher.__main__ import collectived
from collectived_proto.config import flags
from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.resolve import resolve_settings

FILLED = {"$(NODE_NAME)": "node-7", "$(POD_IP)": "10.0.0.7", "%d": "/credentials", "%S": "/var/lib", "%t": "/run"}
IN_A_FILE: dict[str, dict[str, object]] = {
    "coordinator": {"listen": ("head:7450",)},
    "worker": {"coordinator": "head:7450"},
}


def filled(word: str) -> str:
    """As the engine would give it to the process."""
    for name, value in (*FILLED.items(), ("%i", "3")):
        word = word.replace(name, value)
    assert not re.search(r"\$\(|%", word), word
    return word


def test_each_place_has_some() -> None:
    for found in (of_manifests(), of_units(), of_compose()):
        assert {"coordinator", "worker"} <= {command.arguments[0] for command in found}


@pytest.mark.parametrize("command", all_commands(), ids=lambda command: str(command.place))
def test_it_is_understood(command: Command) -> None:
    verb, *rest = map(filled, command.arguments)
    if verb not in DAEMONS:
        known = collectived.commands[verb]
        known.make_context(verb, rest, parent=click.Context(collectived, info_name="collectived"))
        return
    options = flags.build_parser("collectived").parse_args([verb, *rest])
    given = flags.collect_flags(DAEMONS[verb], options)
    by_file = IN_A_FILE[verb] if options.config else {}
    given.pop("secret_file", None)  # which is not there now
    settings = resolve_settings(
        DAEMONS[verb], {**by_file, **given}, {"COLLECTIVED_SECRET": "of-these-daemons"}, None, None
    )
    assert settings.secret == "of-these-daemons" and not settings.insecure


@pytest.mark.parametrize("command", all_commands(), ids=lambda command: str(command.place))
def test_no_secret_stands_on_a_command_line(command: Command) -> None:
    assert not [word for word in command.arguments if re.match(r"--secret(?!-file)", word) or word == "--insecure"]
