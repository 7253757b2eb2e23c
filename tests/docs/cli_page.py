"""docs/reference/cli.md: `python -m tests.docs.cli_page` (`make docs`) writes it again, from the commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import click
from tests.docs.contents import ROOT

from collectived_launcher.__main__ import collectived as command
from collectived_proto.config.flags import build_parser
from collectived_runtime.simulation.arguments import build_parser as build_simulate_parser

PAGE = ROOT / "docs" / "reference" / "cli.md"
MORE = {  # the pages that say more about a command
    "launch": ("../start/laptop.md", "../operate/ssh.md", "../operate/slurm.md"),
    "run": ("../operate/clusters.md",),
    "up": ("../operate/clusters.md",),
    "down": ("../operate/clusters.md",),
    "logs": ("../operate/clusters.md",),
    "drain": ("../operate/operations.md",),
    "status": ("../operate/status.md",),
    "top": ("../operate/watching.md",),
    "trace": ("../operate/trace.md",),
    "bench": ("../operate/bench.md",),
    "doctor": ("../operate/doctor.md",),
    "simulate": ("../guide/simulate.md", "../guide/algorithms.md"),
    "completion": ("../start/laptop.md",),
    "config": ("configuration.md",),
    "certs": ("../operate/tls.md",),
    "coordinator": ("configuration.md", "../operate/metrics.md"),
    "worker": ("configuration.md", "../operate/metrics.md"),
}
_HEAD = """\
# Command line

<!-- Made by `make docs` of the commands: change their help texts. -->

Everything is a command of `collectived`. `collectived COMMAND --help` shows the same as this page. A TIME is a number
of seconds, or one with `ms`, `s`, `min` (`m`) or `h`: `2.5`, `250ms`, `30s`. A SIZE is a number of bytes, or one with
`KiB`, `MiB`, `GiB` or `TiB`, for which `K`, `M`, `G` and `T` are short: `64KiB`.
"""


def fresh() -> str:
    """The page as the commands are now."""
    parts = [_HEAD, _paragraphs(command.epilog or ""), _overview()]
    parts += [part for verb in _verbs() for part in _section(verb)]
    return "\n".join(parts)


def _verbs() -> list[str]:
    return list(MORE)


def _overview() -> str:
    rows = [f"| [`collectived {verb}`](#collectived-{verb}) | {_summary(verb)} |" for verb in _verbs()]
    return "\n".join(["| command | |", "|---|---|", *rows, ""])


def _summary(verb: str) -> str:
    parser = find_parser(verb)
    text = (parser.description if parser else command.commands[verb].help) or ""
    sentence = " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    return _cell(f"{sentence[0].upper()}{sentence[1:]}.")


def find_parser(verb: str) -> argparse.ArgumentParser | None:
    """Of the commands that the runtime reads itself."""
    if verb == "simulate":
        return build_simulate_parser()
    daemons = build_parser("collectived")._subparsers
    assert daemons is not None
    choices = daemons._group_actions[0].choices
    assert isinstance(choices, dict)
    return choices.get(verb)


def _section(verb: str) -> Iterator[str]:
    yield f"## `collectived {verb}`\n"
    parser = find_parser(verb)
    if parser is not None:
        yield from _from_argparse(verb, parser)
    else:
        yield from _from_click(verb, command.commands[verb])
    links = [f"[{page.rpartition('/')[2].removesuffix('.md')}]({page})" for page in MORE[verb]]
    yield f"More: {', '.join(links)}.\n"


def _from_argparse(verb: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"```\ncollectived {verb} [OPTIONS]\n```\n"
    description = parser.description or ""
    yield _paragraphs(f"{description[0].upper()}{description[1:]}")
    formatter = argparse.HelpFormatter(parser.prog)
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or not action.option_strings:
            continue
        value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
        rows.append(([*action.option_strings], value, formatter._expand_help(action)))
    yield _table(rows)
    if parser.epilog:
        yield _paragraphs(parser.epilog.strip())


def _from_click(verb: str, found: click.Command) -> Iterator[str]:
    context = click.Context(found, info_name=verb)
    usage = " ".join(found.collect_usage_pieces(context))
    yield f"```\ncollectived {verb} {usage}\n```\n"
    yield _paragraphs(found.help or "")
    rows = []
    for parameter in found.params:
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None:
            value = "" if parameter.is_flag else parameter.make_metavar(context)
            rows.append(([*parameter.opts, *parameter.secondary_opts], value, record[1]))
    yield from [_table(rows)] if rows else []
    if isinstance(found, click.Group):
        for name, part in found.commands.items():
            yield f"### `collectived {verb} {name}`\n"
            yield from _from_click(f"{verb} {name}", part)


def _table(rows: list[tuple[list[str], str, str]]) -> str:
    lines = ["| option | meaning |", "|---|---|"]
    for spellings, value, meaning in rows:
        names = ", ".join(f"`{name} {value}`" if value else f"`{name}`" for name in spellings)
        said = _cell(meaning).replace("[", "\\[")  # no link
        lines.append(f"| {_cell(names)} | {said} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _paragraphs(text: str) -> str:
    paragraphs = [" ".join(part.replace("\b", "").split()) for part in text.split("\n\n")]
    return "\n".join(f"{part}\n" for part in paragraphs if part)


if __name__ == "__main__":
    PAGE.write_text(fresh())
