"""docs/reference/cli.md says what the commands say: all commands, all options."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from tests.docs.cli_page import MORE, PAGE, fresh

from collectived_launcher.__main__ import collectived as command

TEXT = PAGE.read_text()


def test_the_page_is_what_the_commands_say() -> None:
    assert fresh() == TEXT, "run `make docs` and commit the result"


def test_each_command_has_a_page_that_says_more() -> None:
    assert sorted(MORE) == sorted(command.commands)


@pytest.mark.parametrize("verb", sorted(command.commands))
def test_every_command_is_documented(verb: str) -> None:
    assert f"## `collectived {verb}`" in TEXT


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        (verb, option)
        for verb in sorted(command.commands)
        for parameter in command.commands[verb].params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    ],
)
def test_every_option_is_documented(verb: str, option: str) -> None:
    section = TEXT.partition(f"\n## `collectived {verb}`\n")[2].partition("\n## ")[0]
    assert f"`{option}" in section, f"`collectived {verb}` has {option}, docs/reference/cli.md does not say so"


def test_the_list_of_commands_says_each_whole_on_a_narrow_terminal() -> None:
    said = CliRunner().invoke(command, ["--help"], env={"COLUMNS": "80"}).output
    assert "..." not in said[said.index("Commands:") :]
