"""The man pages in launcher/man: `python -m tests.docs.man_pages` (`make docs`) writes them, from the commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import click
from tests.docs.cli_page import MORE, find_parser
from tests.docs.contents import ROOT

from collectived_launcher.__main__ import collectived as command
from collectived_proto.types import RELEASE

FOLDER = ROOT / "launcher" / "man"
_HOME = "The pages of the project: docs/README.md"


def fresh() -> dict[str, str]:
    """The name of each file, and its text."""
    pages = {"collectived.1": _make_page("collectived", command)}
    for verb in MORE:
        parser = find_parser(verb)
        pages[f"collectived-{verb}.1"] = (
            _make_daemon_page(verb, parser) if parser else _make_page(f"collectived {verb}", command.commands[verb])
        )
    return pages


def _make_page(name: str, found: click.Command) -> str:
    context = click.Context(found, info_name=name)
    lines = [
        *_head(name, found.help or ""),
        f".B {escape(name)}",
        escape(" ".join(found.collect_usage_pieces(context))),
    ]
    lines += [".SH DESCRIPTION", *_paragraphs(found.help or ""), *_options(found, context)]
    if isinstance(found, click.Group):
        lines.append(".SH COMMANDS")
        for verb, part in found.commands.items():
            lines += [".TP", f".B {escape(verb)}", escape(part.get_short_help_str(200))]
            if name != "collectived":
                lines += [".RS", *_options(part, click.Context(part, info_name=verb), heading=False), ".RE"]
    if found.epilog:
        lines += [".SH EXIT STATUS", *_paragraphs(found.epilog.removeprefix("Exit status: "))]
    return _close(lines, name)


def _options(found: click.Command, context: click.Context, heading: bool = True) -> Iterator[str]:
    records = [one.get_help_record(context) for one in found.params]
    rows = [record for record in records if record]
    yield from [".SH OPTIONS"] if heading and rows else []
    for spelling, meaning in rows:
        yield from (".TP", f".B {escape(spelling)}", escape(meaning))


def _make_daemon_page(verb: str, parser: argparse.ArgumentParser) -> str:
    name, formatter = f"collectived {verb}", argparse.HelpFormatter("collectived")
    lines = [*_head(name, parser.description or ""), f".B {escape(name)}", escape("[OPTIONS]")]
    lines += [".SH DESCRIPTION", *_paragraphs(parser.description or ""), ".SH OPTIONS"]
    for action in parser._actions:
        if action.option_strings and not isinstance(action, argparse._HelpAction):
            value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
            spelling = ", ".join(f"{option} {value}".strip() for option in action.option_strings)
            lines += [".TP", f".B {escape(spelling)}", escape(" ".join(formatter._expand_help(action).split()))]
    if parser.epilog:
        lines += [".SH NOTES", *_paragraphs(parser.epilog.strip())]
    return _close(lines, name)


def _head(name: str, text: str) -> list[str]:
    title = name.replace(" ", "-")
    sentence = " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    return [
        '.\\" Made by `make docs` of the commands: change their help texts.',
        f'.TH {title.upper()} 1 "" "collectived {RELEASE}" "User Commands"',
        ".SH NAME",
        f"{escape(title)} \\- {escape(sentence[0].lower() + sentence[1:])}",
        ".SH SYNOPSIS",
    ]


def _close(lines: list[str], name: str) -> str:
    others = ["collectived"] if name != "collectived" else [f"collectived-{verb}" for verb in MORE]
    shown = [f".BR {escape(other)} (1)," for other in others]
    shown[-1] = shown[-1].rstrip(",")
    return "\n".join([*lines, ".SH SEE ALSO", *shown, ".PP", escape(_HOME), ""])


def _paragraphs(text: str) -> Iterator[str]:
    for part in text.replace("\b", "").split("\n\n"):
        if part.strip():
            yield from (".PP", escape(" ".join(part.split())))


def escape(text: str) -> str:
    """Text as roff shows it: no character begins a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return f"\\&{text}" if text.startswith(".") else text


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    pages = fresh()
    for old in FOLDER.glob("*.1"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    write()
