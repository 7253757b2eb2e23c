"""Every command line on the pages is one that the shell and the program take: options that exist, values that fit.

Those in prose, between backticks, too. Most commands in blocks are run by other tests besides; the blocks that belong
to this one take too long, or need what a test cannot have: a package index, a GPU, a second host.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click
import pytest
from click.exceptions import NoArgsIsHelpError
from tests.docs.blocks import PAGES, ROOT, Block, all_blocks, claimed
from tests.docs.command_lines import commands, lines_of, read, read_ours

SHELL = [block for block in all_blocks() if block.language in ("sh", "console") and block.how != "generated"]
OWN = claimed(__file__)
MOST_OWN = 4  # commands are better run


def place(block: Block) -> str:
    return block.place


@pytest.mark.parametrize("block", SHELL, ids=place)
def test_a_shell_understands_it(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input="\n".join(lines_of(block)), text=True, capture_output=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", SHELL, ids=place)
def test_our_commands_take_what_they_are_given(block: Block) -> None:
    for words in chain.from_iterable(map(commands, lines_of(block))):
        if words[0] == "collectived":
            read_ours(words[1:])


@pytest.mark.parametrize("block", OWN, ids=place)
def test_every_command_of_these_blocks_is_read_by_its_program(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [words for line in lines_of(block) for words in commands(line)]
    assert found
    for words in found:
        read(words, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_our_commands_in_prose_exist_with_their_options(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`((?:\w+=\S+\s)*collectived\s[a-z][^`]*)`", prose):
        for words in commands(re.sub(r"\bN\b", "3", command.replace("\n", " "))):
            if words[0] == "collectived" and words[1:] != ["COMMAND", "--help"]:
                with allow_less():
                    read_ours(words[1:])


@contextlib.contextmanager
def allow_less() -> Iterator[None]:
    """Prose names a command, or an option, and leaves out what it would be given."""
    try:
        yield
    except (click.MissingParameter, NoArgsIsHelpError):
        pass
    except click.BadOptionUsage as error:
        if "requires an argument" not in error.message:
            raise


def test_blocks_that_are_only_read_stay_few() -> None:
    assert len(OWN) <= MOST_OWN, "let a test run the new one"
