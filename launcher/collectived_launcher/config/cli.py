"""`collectived config`: prints the effective configuration."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from collectived_proto.config import flags
from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.resolve import DEFAULT, Resolved, resolve_values
from collectived_proto.config.sources import ConfigError, find_config_file, load_config_file


class ConfigUsageError(click.ClickException):
    """The configuration cannot be used."""

    exit_code = 2


@click.command(
    short_help="Show a daemon's configuration, and where it comes from.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    options_metavar="[OPTIONS]",
)
@click.argument("daemon", type=click.Choice(list(DAEMONS)), required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS OF THE DAEMON]...")
@click.option("--config", "named", metavar="FILE", help="The configuration file; `none` for none.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@click.option("--toml", "as_toml", is_flag=True, help="A commented file with the same values.")
def config(daemon: str | None, arguments: tuple[str, ...], named: str | None, as_json: bool, as_toml: bool) -> None:
    """Show the configuration of a daemon started here, and the source of each value.

    Reads the first file of --config, COLLECTIVED_CONFIG, ~/.config/collectived/collectived.toml and
    /etc/collectived/collectived.toml. The environment overrides the file, and FLAGS override both. Secrets are not
    shown. Exit status 2 if a value is wrong.
    """
    if as_json and as_toml:
        raise click.UsageError("--json and --toml exclude each other")
    if arguments and daemon is None:
        raise click.UsageError(f"say of which daemon {arguments[0]!r} is a flag: {' or '.join(DAEMONS)}")
    from collectived_launcher.config import show

    try:
        path = find_config_file(named, os.environ)
        file = load_config_file(path) if path else None
        found = {
            one: resolve_values(DAEMONS[one], _parse_flags(one, arguments), os.environ, file)
            for one in _select_daemons(daemon)
        }
    except ConfigError as error:
        raise ConfigUsageError(str(error)) from None
    if as_json:
        click.echo(json.dumps(show.document(found, path), indent=2, ensure_ascii=False))
    elif as_toml:
        click.echo(show.toml(found), nl=False)
    else:
        click.echo(f"file: {path or 'none'}")
        _print_table(found)


def _select_daemons(daemon: str | None) -> list[str]:
    return [daemon] if daemon else list(DAEMONS)


def _parse_flags(daemon: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    if not arguments:
        return {}
    parser = flags.SuggestingParser(prog=f"collectived config {daemon}", add_help=False)
    flags.add_settings(parser, DAEMONS[daemon])
    return flags.collect_flags(DAEMONS[daemon], parser.parse_args(list(arguments)))


def _print_table(found: dict[str, Resolved]) -> None:
    """Nothing is cut off, however wide: paths are to be read."""
    from collectived_launcher.config import show
    from collectived_proto.report.phrases import sanitize_text

    rows = [("key", "value", "from"), *(row for daemon, what in found.items() for row in show.rows(daemon, what))]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for row in rows:
        line = sanitize_text(f"{row[0]:{first}}  {row[1]:{second}}  {row[2]}")
        click.echo(click.style(line, dim=True) if row[2] == DEFAULT else line)
