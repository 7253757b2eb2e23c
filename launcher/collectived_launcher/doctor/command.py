"""`collectived doctor`: what is wrong on this host, or between hosts, before a job finds out."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from collectived_launcher.quantities import seconds

_LOOPBACK = "127.0.0.1:0"
TOKEN = "COLLECTIVED_DOCTOR_TOKEN"


@click.command()
@click.option("--hosts", metavar="A,B,…", help="Also look at these hosts, and measure between them, over ssh.")
@click.option("--ssh", "carrier", default="ssh", show_default=True, metavar="COMMAND", help="What reaches a host.")
@click.option("--python", metavar="PATH", help="The Python that has collectived on the hosts; default: as here.")
@click.option(
    "--serve",
    is_flag=False,
    flag_value=_LOOPBACK,
    metavar="[HOST:PORT]",
    help=f"Wait there for one `doctor --to` from another host, and print a token for it; default: {_LOOPBACK}.",
)
@click.option("--to", metavar="HOST:PORT", help="Measure to a `doctor --serve`; asks for its token.")
@click.option(
    "--within",
    type=float,
    callback=seconds,
    metavar="SECONDS",
    default=600.0,
    show_default=True,
    help="How long --serve waits; 0: for ever.",
)
@click.option("--json", "as_json", is_flag=True, help="Findings and facts as JSON.")
def doctor(
    hosts: str | None,
    carrier: str,
    python: str | None,
    serve: str | None,
    to: str | None,
    within: float,
    as_json: bool,
) -> int:
    """Look for what can keep a job from running, or make it slow.

    Each line is OK, WARNING or FAILURE, the latter two with what to do. Changes nothing. Exit status 1 if there is a
    failure.
    """
    if sum(option is not None for option in (hosts, serve, to)) > 1:
        raise click.UsageError("--hosts, --serve and --to exclude each other")
    if serve is not None:
        from collectived_launcher.doctor.pair import serve as wait_for_one

        return wait_for_one(*_address(serve, "--serve"), within, as_json)
    if to is not None:
        from collectived_launcher.doctor.pair import dial

        return _tell(*dial(*_address(to, "--to"), _token()), as_json)
    return _look(hosts, carrier, python, as_json)


def _look(hosts: str | None, carrier: str, python: str | None, as_json: bool) -> int:
    from collectived_launcher.doctor.checks import judge
    from collectived_launcher.doctor.gather import gather
    from collectived_launcher.doctor.hosts import look_at, names

    named = names(hosts) if hosts is not None else []
    facts = gather(os.environ, still=_say_what_takes_long)
    findings = judge(facts)
    if named:
        findings += look_at(named, carrier, python or sys.executable)
    return _tell(findings, facts, as_json)


def _say_what_takes_long(parts: list[str]) -> None:
    click.echo(f"still looking at {', '.join(parts)}, for a few seconds more", err=True)


def _tell(findings: list[Any], facts: Any, as_json: bool) -> int:
    """Shows findings; returns the exit status."""
    from collectived_launcher.doctor import report
    from collectived_launcher.doctor.finding import Grade, worst

    if as_json:
        click.echo(json.dumps(report.document(findings, facts), indent=2, ensure_ascii=False))
    else:
        for line in report.lines(findings, several=any(finding.host for finding in findings)):
            click.echo(line)
        click.echo(report.summary(findings))
    return int(worst(findings) is Grade.FAILURE)


def _address(text: str, option: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"{option} {text!r} is no address: expected host:port, such as 10.0.0.2:7459")
    return host.strip("[]") or "127.0.0.1", int(port)


def _token() -> str:
    """From the environment, else a line of standard input: a command line is seen by everybody on the host."""
    token = os.environ.get(TOKEN) or (
        click.prompt("token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline().strip()
    )
    if not token:
        raise click.UsageError(f"no token: `doctor --serve` prints one; type it, pipe it in, or set {TOKEN}")
    return str(token)
