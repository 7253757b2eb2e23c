"""`collectived doctor`: what is wrong on this host, or between hosts, before a job finds out."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from collectived_launcher.quantities import Time
from collectived_proto.addresses import LOOPBACK, parse_address

_ANY_PORT = f"{LOOPBACK}:0"
TOKEN_VARIABLE = "COLLECTIVED_DOCTOR_TOKEN"


@click.command(short_help="Find what can keep a job from running, or slow it down.")
@click.option("--hosts", metavar="A,B,…", help="Also check these hosts, and measure between them, over ssh.")
@click.option(
    "--ssh", "carrier", default="ssh", show_default=True, metavar="COMMAND", help="Command that reaches a host."
)
@click.option("--python", metavar="PATH", help="The Python with collectived on the hosts; default: as here.")
@click.option(
    "--serve",
    is_flag=False,
    flag_value=_ANY_PORT,
    metavar="[HOST:PORT]",
    help=f"Wait there for one `doctor --to` from another host, and print a token for it; default: {_ANY_PORT}.",
)
@click.option("--to", metavar="HOST:PORT", help="Measure to a `doctor --serve`; asks for its token.")
@click.option(
    "--within",
    type=Time(),
    default="10min",
    show_default=True,
    help="How long --serve waits; 0: without end.",
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
    """Find conditions that can keep a job from running, or make it slow.

    Each line is OK, WARNING or FAILURE; the latter two say what to do. Changes nothing. Exit status 1 if there is a
    failure.
    """
    if sum(option is not None for option in (hosts, serve, to)) > 1:
        raise click.UsageError("--hosts, --serve and --to exclude each other")
    if serve is not None:
        from collectived_launcher.doctor.measure import serve as wait_for_one

        return wait_for_one(*_parse_address(serve, "--serve"), within, as_json)
    if to is not None:
        from collectived_launcher.doctor.measure import dial

        return _show_findings(*dial(*_parse_address(to, "--to"), _read_token()), as_json)
    return _examine(hosts, carrier, python, as_json)


def _examine(hosts: str | None, carrier: str, python: str | None, as_json: bool) -> int:
    from collectived_launcher.doctor.checks import evaluate_checks
    from collectived_launcher.doctor.collect import collect_facts
    from collectived_launcher.doctor.hosts import examine_hosts, parse_hosts

    named = parse_hosts(hosts) if hosts is not None else []
    facts = collect_facts(os.environ, still=_report_slow_probes)
    findings = evaluate_checks(facts)
    if named:
        findings += examine_hosts(named, carrier, python or sys.executable)
    return _show_findings(findings, facts, as_json)


def _report_slow_probes(parts: list[str]) -> None:
    click.echo(f"still looking at {', '.join(parts)}, for a few seconds more", err=True)


def _show_findings(findings: list[Any], facts: Any, as_json: bool) -> int:
    """Shows findings; returns the exit status."""
    from collectived_launcher.doctor import report
    from collectived_launcher.doctor.finding import Grade, worst_grade

    if as_json:
        click.echo(json.dumps(report.build_document(findings, facts), indent=2, ensure_ascii=False))
    else:
        for line in report.format_lines(findings, several=any(finding.host for finding in findings)):
            click.echo(line)
        click.echo(report.summary(findings))
    return int(worst_grade(findings) is Grade.FAILURE)


def _parse_address(text: str, option: str) -> tuple[str, int]:
    try:
        host, port = parse_address(text)
    except ValueError as error:
        raise click.UsageError(f"{option} {error}") from None
    return host or LOOPBACK, port


def _read_token() -> str:
    """From the environment, else a line of standard input: every user of the host can see a command line."""
    token = os.environ.get(TOKEN_VARIABLE) or (
        click.prompt("token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline().strip()
    )
    if not token:
        raise click.UsageError(f"no token: `doctor --serve` prints one; type it, pipe it in, or set {TOKEN_VARIABLE}")
    return str(token)
