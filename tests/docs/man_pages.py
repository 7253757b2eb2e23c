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
RELATED = {  # the commands whose pages a reader of this one wants next
    "launch": ("run", "status", "top", "logs", "doctor"),
    "run": ("up", "launch", "logs", "status"),
    "up": ("down", "run", "drain", "logs", "certs", "doctor"),
    "down": ("up", "drain"),
    "logs": ("status", "up", "launch"),
    "drain": ("down", "status", "worker"),
    "status": ("top", "trace", "logs", "drain", "doctor"),
    "top": ("status", "trace"),
    "trace": ("status", "top"),
    "bench": ("simulate", "doctor"),
    "doctor": ("status", "bench", "up"),
    "simulate": ("bench",),
    "completion": (),
    "config": ("coordinator", "worker"),
    "certs": ("coordinator", "worker", "up"),
    "coordinator": ("worker", "config", "certs", "drain"),
    "worker": ("coordinator", "config", "certs", "drain"),
}


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
        lines += [".SH EXIT STATUS", *_exit_statuses(found.epilog)]
    return _close(lines, name)


def _options(found: click.Command, context: click.Context, heading: bool = True) -> Iterator[str]:
    records = [one.get_help_record(context) for one in found.params]
    rows = [record for record in records if record]
    yield from [".SH OPTIONS"] if heading and rows else []
    for spelling, meaning in rows:
        yield from (".TP", f".B {escape(spelling)}", escape(meaning))


def _exit_statuses(text: str) -> Iterator[str]:
    for part in text.strip().removeprefix("Exit status: ").rstrip(".").split(", "):
        status, _, meaning = part.partition(" ")
        yield from (".TP", f".B {status}", f"{_capitalized(meaning)}.")


def _make_daemon_page(verb: str, parser: argparse.ArgumentParser) -> str:
    name, formatter = f"collectived {verb}", argparse.HelpFormatter("collectived")
    lines = [*_head(name, parser.description or ""), f".B {escape(name)}", escape("[OPTIONS]")]
    lines += [".SH DESCRIPTION", *_paragraphs(_capitalized(parser.description or "")), ".SH OPTIONS"]
    for action in parser._actions:
        if action.option_strings and not isinstance(action, argparse._HelpAction):
            value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
            spelling = ", ".join(f"{option} {value}".strip() for option in action.option_strings)
            meaning = " ".join(formatter._expand_help(action).split())
            lines += [".TP", f".B {escape(spelling)}", escape(_capitalized(meaning))]
    if parser.epilog:
        lines += [".SH NOTES", *_paragraphs(parser.epilog.strip())]
    return _close(lines, name)


def _head(name: str, text: str) -> list[str]:
    title = name.replace(" ", "-")
    sentence = " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    return [
        '.\\" Made by `make docs` of the commands: change their help texts.',
        f'.TH {title.upper()} 1 "" "collectived {RELEASE}" "User Commands"',
        ".nh",  # names and variables are whole, so that they can be copied and searched for
        ".ad l",
        ".SH NAME",
        f"{escape(title)} \\- {escape(sentence[0].lower() + sentence[1:])}",
        ".SH SYNOPSIS",
    ]


def _close(lines: list[str], name: str) -> str:
    verbs = MORE if name == "collectived" else RELATED[name.removeprefix("collectived ")]
    others = [*([] if name == "collectived" else ["collectived"]), *(f"collectived-{verb}" for verb in sorted(verbs))]
    shown = [f".BR {escape(other)} (1)," for other in others]
    shown[-1] = shown[-1].rstrip(",")
    here = ["The options of the installed version are printed by", f'.BR "{escape(name)} \\-\\-help" .']
    return "\n".join([*lines, ".SH SEE ALSO", *shown, ".PP", *here, ""])


def _paragraphs(text: str) -> Iterator[str]:
    for part in text.replace("\b", "").split("\n\n"):
        if part.strip():
            yield from (".PP", escape(" ".join(part.split())))


def _capitalized(text: str) -> str:
    """As a sentence, but for what begins with a value, a path or an address."""
    word = text.partition(" ")[0].rstrip(".,;")
    return text[0].upper() + text[1:] if word.isascii() and word.isalpha() else text


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
