"""`collectived logs`: what the daemons of a cluster or job have logged; of a cluster over ssh on its other hosts."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from collectived_launcher.cluster import state
from collectived_launcher.cluster.cli import select_hosts
from collectived_launcher.cluster.file import Cluster, ClusterFileError, read_cluster
from collectived_launcher.cluster.hosts import Interrupted, open_hosts
from collectived_launcher.cluster.spec import Spec
from collectived_launcher.hosts.host import LOCALHOST
from collectived_launcher.hosts.output import Terminal
from collectived_launcher.hosts.preflight import HostUnreachable
from collectived_launcher.launch.job_logs import list_logged_jobs, read_job_logs
from collectived_proto.ipc import job_files
from collectived_proto.report.phrases import sanitize_text

FAILED, UNREACHABLE, INTERRUPTED = 1, 3, 130

Answers = Mapping[str, Mapping[str, Any]]


class _NothingRuns(click.ClickException):
    """Says what to start."""

    exit_code = UNREACHABLE


@click.command(short_help="Show the latest log lines of daemons.")
@click.argument("host", required=False, metavar="[HOST]")
@click.option(
    "--cluster",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="CLUSTER.toml",
    help="Of this cluster.  [default: your running cluster or job on this host]",
)
@click.option("--job", metavar="NAME", help="Of this job, whose `collectived launch` runs on this host.")
@click.option("--lines", "-n", type=click.IntRange(min=1), default=20, show_default=True, help="Of each daemon.")
@click.option("--ssh", "ssh_command", default="ssh", show_default=True, help="OpenSSH's client, with options.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: lines by host and daemon.")
def logs(host: str | None, file: Path | None, job: str | None, lines: int, ssh_command: str, as_json: bool) -> int:
    """Show the last lines that daemons have logged, on HOST or on all hosts of their cluster or job.

    The daemons are those of `collectived up`, or of a running `collectived launch`.
    """
    if host and host.endswith(".toml"):
        raise click.UsageError(f"{host!r} is a file, and a host is expected: collectived logs --cluster {host}")
    if file and job:
        raise click.UsageError("--cluster and --job exclude each other: daemons belong to a cluster or to a job")
    try:
        chosen = read_cluster(file) if file else _find_source(job)
    except ClusterFileError as error:
        raise click.UsageError(str(error)) from None
    if isinstance(chosen, Cluster):
        what = f"cluster {chosen.name!r}"
        try:
            answers = _ask_cluster(chosen, host, lines, ssh_command)
        except HostUnreachable as error:
            click.echo(f"collectived: {error}", err=True)
            return UNREACHABLE
        except Interrupted:
            return INTERRUPTED
    else:
        what = f"job {chosen.name}"
        answers = _read_job(chosen, host, lines)
    if as_json:
        click.echo(json.dumps({name: answer.get("logs", {}) for name, answer in answers.items()}))
    else:
        for line in format_logs(answers):
            click.echo(line)
    return _report_trouble(what, answers)


def _ask_cluster(cluster: Cluster, host: str | None, lines: int, ssh_command: str) -> Answers:
    """
    Raises:
        HostUnreachable, Interrupted: a host does not answer, or a signal came first.
    """
    hosts = select_hosts(cluster, [_name_as(host, [one.name for one in cluster.hosts])] if host else [])
    with open_hosts(cluster, hosts, ssh_command, Terminal()) as opened:
        about = json.dumps({"lines": lines})
        return opened.run_command("logs", cluster.name, {one.name: about for one in hosts})


def _read_job(folder: Path, host: str | None, lines: int) -> Answers:
    try:
        found = read_job_logs(folder, lines)
    except FileNotFoundError:
        raise _NothingRuns(f"job {folder.name} has just ended, and its logs with it; --log-dir keeps them") from None
    if host is not None and (host := _name_as(host, list(found))) not in found:
        raise click.UsageError(f"{host!r} is no host of job {folder.name}; hosts: {', '.join(found)}")
    return {name: {"logs": found[name]} for name in ([host] if host else found)}


def _name_as(host: str, known: Sequence[str]) -> str:
    """A host as a cluster or job knows it: errors and `status` show this host by its own name."""
    return LOCALHOST if host not in known and host == socket.gethostname() else host


def format_logs(answers: Answers) -> list[str]:
    """The lines of all daemons, each behind the name of its host, where there are several, and of its daemon."""
    return [
        f"[{f'{host} ' if len(answers) > 1 else ''}{daemon}] {sanitize_text(line)}"
        for host, answer in answers.items()
        for daemon, lines in answer.get("logs", {}).items()
        for line in lines
    ]


def _report_trouble(what: str, answers: Answers) -> int:
    """Say which hosts have no logs, and why; the exit status."""
    for host, answer in answers.items():
        if trouble := answer.get("trouble"):
            click.echo(f"collectived: {host}: {trouble}", err=True)
        elif not answer["logs"]:
            click.echo(f"collectived: {host}: nothing of {what} runs there", err=True)
        elif silent := [daemon for daemon, lines in answer["logs"].items() if not lines and daemon != "supervisor"]:
            click.echo(f"collectived: {host}: nothing is logged by {', '.join(silent)}", err=True)
    return FAILED if any("trouble" in answer or not answer["logs"] for answer in answers.values()) else 0


def _find_source(job: str | None) -> Cluster | Path:
    """The cluster of this user that runs on this host, or the folder of a job; else the job of that name.

    Raises:
        click.ClickException: nothing runs, or several do and none is named.
        ClusterFileError: the file of the cluster cannot be read any more.
    """
    jobs = list_logged_jobs()
    if job is not None:
        if job not in jobs:
            names = ", ".join(jobs) or "none"
            raise _NothingRuns(f"you have no job {job!r} launched and running on this host; running jobs: {names}")
        return jobs[job]
    sources = {folder.name: Spec.from_json(known["spec"]).source for folder, known in state.list_running()}
    if not sources and not jobs:
        raise _NothingRuns(
            f"you have no cluster or job running on this host (none in {job_files.runtime_path()}): name a "
            "cluster with --cluster CLUSTER.toml. The logs of a job are on the host of its `collectived launch`, until "
            "it ends; --log-dir keeps them"
        )
    if len(sources) + len(jobs) > 1:
        choices = [f"--cluster {source}" for source in sources.values()] + [f"--job {name}" for name in jobs]
        lines = "\n".join(f"    collectived logs {choice}" for choice in choices)
        raise click.UsageError(f"you have {len(choices)} clusters and jobs running here; say which:\n{lines}")
    return next(iter(jobs.values())) if jobs else read_cluster(Path(next(iter(sources.values()))))
