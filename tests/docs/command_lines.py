"""Command lines of the pages, split as a shell does, and read by the parsers of the programs that they call."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest
from packaging.requirements import Requirement
from tests.docs.blocks import ROOT, Block
from tests.docs.cli_page import find_parser

from collectived_launcher.__main__ import collectived

_ENDS = {"&&", "||", ";", "&", "|", "(", ")", "{", "}"}
_REPOSITORY = "/path/to/this/repository"


class _Parsed(Exception):
    """The program has read its arguments; nothing shall follow."""


def lines_of(block: Block) -> list[str]:
    """The commands of a block: of a session the lines behind `$`, otherwise all; continued lines are joined."""
    text = block.text.replace("\\\n", " ")
    lines = text.splitlines()
    return [line[2:] for line in lines if line.startswith("$ ")] if block.language == "console" else lines


def commands(line: str) -> Iterator[list[str]]:
    """The simple commands of a line, without redirections and variables."""
    splitter = shlex.shlex(line, posix=True, punctuation_chars=True)
    splitter.whitespace_split = True
    words: list[str] = []
    skip = False
    for word in [*splitter, ";"]:
        if word in _ENDS:
            if words:
                yield words
            words = []
        elif skip or word in ("<", ">", ">>"):
            skip = not skip
        elif words or not re.match(r"\w+=", word):
            words.append(word)


def read(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise what the program says about arguments that it does not take; KeyError for a program that is not known."""
    _READERS[words[0]](words[1:], monkeypatch)


def read_ours(words: list[str]) -> None:
    """The same for `collectived WORDS`; daemons take their settings from files too, so that none is missed."""
    verb, *rest = words
    assert verb in collectived.commands, f"there is no command `collectived {verb}`"
    if parser := find_parser(verb):
        parser.parse_args(rest)
    else:
        above = click.Context(collectived, info_name="collectived")
        collectived.commands[verb].make_context(verb, rest, parent=above)


def _make(words: list[str], _: pytest.MonkeyPatch) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        assert re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE), f"there is no `make {word}`"


def _python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert words[0] == "-m", words
    is_package = (ROOT / words[1].replace(".", "/")).is_dir()
    module = importlib.import_module(f"{words[1]}.__main__" if is_package else words[1])
    parse = argparse.ArgumentParser.parse_args

    def stop(*arguments: Any, **options: Any) -> None:
        raise _Parsed(parse(*arguments, **options))

    with monkeypatch.context() as within:
        within.setattr(sys, "argv", words[1:])
        within.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(_Parsed):
            module.main()


def _pip(words: list[str], _: pytest.MonkeyPatch) -> None:
    verb, *wanted = words
    assert verb == "install", words
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for one in wanted:
        requirement = Requirement(one.replace(_REPOSITORY, "collectived", 1))
        assert requirement.name == "collectived" and requirement.extras <= set(extras), f"there is no {one}"


_READERS: dict[str, Callable[[list[str], pytest.MonkeyPatch], None]] = {
    "collectived": lambda words, _: read_ours(words),
    "make": _make,
    "python": _python,
    "pip": _pip,
}
