"""`collectived logs`: what the daemons of a cluster have logged, on this host and over ssh on the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from collectived_launcher.cluster import state
from collectived_launcher.cluster.cli import select_hosts
from collectived_launcher.cluster.file import Cluster, ClusterFileError, read_cluster
from collectived_launcher.cluster.hosts import Interrupted, open_hosts
from collectived_launcher.cluster.spec import Spec
from collectived_launcher.hosts.output import Terminal
from collectived_launcher.hosts.preflight import HostUnreachable
from collectived_proto.ipc import job_files

FAILED, UNREACHABLE, INTERRUPTED = 1, 3, 130

Answers = Mapping[str, Mapping[str, Any]]


class _NothingRuns(click.ClickException):
    """Says what to start."""

    exit_code = UNREACHABLE


@click.command()
@click.argument("host", required=False, metavar="[HOST]")
@click.option(
    "--cluster",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="CLUSTER.toml",
    help="Of this cluster.  [default: the one that runs on this host]",
)
@click.option("--lines", "-n", type=click.IntRange(min=1), default=20, show_default=True, help="Of each daemon.")
@click.option("--ssh", "ssh_command", default="ssh", show_default=True, help="OpenSSH's client, with options.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: lines by host and daemon.")
def logs(host: str | None, file: Path | None, lines: int, ssh_command: str, as_json: bool) -> int:
    """Show the last lines that the daemons of a cluster have logged, on HOST or on all its hosts.

    The daemons are those of `collectived up`. `collectived launch` shows what its daemons log, and writes a file for
    each with --log-dir.
    """
    try:
        cluster = read_cluster(file or _find_cluster_file())
    except ClusterFileError as error:
        raise click.UsageError(str(error)) from None
    hosts = select_hosts(cluster, [host] if host else [])
    try:
        with open_hosts(cluster, hosts, ssh_command, Terminal()) as opened:
            about = json.dumps({"lines": lines})
            answers = opened.run_command("logs", cluster.name, {one.name: about for one in hosts})
    except HostUnreachable as error:
        click.echo(f"collectived: {error}", err=True)
        return UNREACHABLE
    except Interrupted:
        return INTERRUPTED
    if as_json:
        click.echo(json.dumps({name: answer.get("logs", {}) for name, answer in answers.items()}))
    else:
        for line in format_logs(answers):
            click.echo(line)
    return _report_trouble(cluster, answers)


def format_logs(answers: Answers) -> list[str]:
    """The lines of all daemons, each behind the name of its host, where there are several, and of its daemon."""
    return [
        f"[{f'{host} ' if len(answers) > 1 else ''}{daemon}] {line}"
        for host, answer in answers.items()
        for daemon, lines in answer.get("logs", {}).items()
        for line in lines
    ]


def _report_trouble(cluster: Cluster, answers: Answers) -> int:
    """Say which hosts have no logs, and why; the exit status."""
    for host, answer in answers.items():
        if trouble := answer.get("trouble"):
            click.echo(f"collectived: {host}: {trouble}", err=True)
        elif not answer["logs"]:
            click.echo(f"collectived: {host}: nothing of cluster {cluster.name!r} runs there", err=True)
        elif silent := [daemon for daemon, lines in answer["logs"].items() if not lines and daemon != "supervisor"]:
            click.echo(f"collectived: {host}: nothing is logged by {', '.join(silent)}", err=True)
    return FAILED if any("trouble" in answer or not answer["logs"] for answer in answers.values()) else 0


def _find_cluster_file() -> Path:
    """Of the one cluster of this user that runs on this host.

    Raises:
        click.ClickException: none does, or several do.
    """
    sources = {folder.name: Spec.from_json(known["spec"]).source for folder, known in state.list_running()}
    if not sources:
        raise _NothingRuns(
            f"no cluster of yours runs on this host (none in {job_files.ensure_runtime_folder()}): name one with "
            "--cluster CLUSTER.toml. A job of `collectived launch` shows what its daemons log; --log-dir keeps it"
        )
    if len(sources) > 1:
        lines = "\n".join(f"    {name}: collectived logs --cluster {source}" for name, source in sources.items())
        raise click.UsageError(f"{len(sources)} clusters of yours run here; name one with --cluster:\n{lines}")
    return Path(next(iter(sources.values())))
