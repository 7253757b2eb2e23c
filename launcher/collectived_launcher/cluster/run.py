"""`collectived run`: clients of one job, against daemons that run already."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from collectived_launcher.cluster import state
from collectived_launcher.cluster.cli import INTERRUPTED, UNREACHABLE, select_hosts
from collectived_launcher.cluster.file import Cluster, ClusterFileError, ClusterHost, read_cluster
from collectived_launcher.cluster.hosts import SILENCE_TIMEOUT, Interrupted, make_host_plan, open_hosts
from collectived_launcher.cluster.spec import Spec
from collectived_launcher.hosts.host import LOCALHOST
from collectived_launcher.hosts.output import Terminal
from collectived_launcher.hosts.preflight import HostUnreachable
from collectived_launcher.hosts.selection import collect_forwarded_variables, parse_env_options
from collectived_launcher.launch.cli import ProgramCommand, check_program, deal_ranks, make_log_dir
from collectived_launcher.launch.job import COORDINATOR, Addresses, Job, make_job_name
from collectived_launcher.launch.job_state import Policy
from collectived_launcher.launch.run import JobHosts, Run
from collectived_launcher.quantities import Time
from collectived_proto.ipc import job_files


@dataclass(frozen=True, slots=True)
class RunningWorkers:
    """Workers that run, each with its host and with how many clients it is to get."""

    coordinator: str
    workers: tuple[str, ...]
    hosts: tuple[str, ...]
    clients: tuple[int, ...]


@click.command(
    cls=ProgramCommand,
    short_help="Run a program as ranks at daemons that run already.",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option(
    "--cluster",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="CLUSTER.toml",
    help="The cluster whose daemons are used; default: the one that runs on this host.",
)
@click.option("--hosts", default="", metavar="HOST,...", help="Only these hosts of the cluster.")
@click.option(
    "--clients",
    "--nproc-per-node",
    "--nproc_per_node",
    type=click.IntRange(min=1),
    metavar="N",
    help="Clients (processes of your program) per worker; default: the host's slots.",
)
@click.option("-n", "-np", "ranks", type=click.IntRange(min=1), metavar="N", help="Ranks in all, as with mpirun.")
@click.option("--ssh", "ssh_command", default="ssh", show_default=True, help="OpenSSH's client, with options.")
@click.option(
    "--timeout",
    type=Time(),
    help="Timeout of collectives if neither the call nor the group has one; 0: none.",
)
@click.option(
    "--grace",
    type=Time(),
    default="10s",
    show_default=True,
    help="Time after the first failure before the other ranks get SIGTERM; SIGKILL follows 5 s later.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Start a failed client again, this often.",
)
@click.option("--log-dir", type=click.Path(path_type=Path, file_okay=False), help="Also write one file per process.")
@click.option("--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="Give this variable to PROGRAM.")
@click.option("--chdir", default="", metavar="FOLDER", help="Where PROGRAM runs.  [default: this folder]")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGS]...")
def run(
    file: Path | None,
    hosts: str,
    clients: int | None,
    ranks: int | None,
    ssh_command: str,
    timeout: float | None,
    grace: float,
    max_restarts: int,
    log_dir: Path | None,
    variables: tuple[str, ...],
    chdir: str,
    program: tuple[str, ...],
) -> int:
    """Run PROGRAM as ranks at running daemons, and leave the daemons as they are.

    The daemons are those of `collectived up`. The environment of each rank, the output and the reaction to failures are
    those of `launch`. Each run is a job of its own, with group names of its own.
    """
    if hosts and file is None:
        raise click.UsageError("--hosts chooses among the hosts of a cluster: name its file with --cluster")
    terminal = Terminal()
    if file is None:
        cluster, found = None, find_local_workers(clients)
    else:
        try:
            cluster = read_cluster(file)
            among = select_hosts(cluster, [name for name in hosts.split(",") if name])
            found = find_cluster_workers(cluster, among, clients, ssh_command, terminal)
        except ClusterFileError as error:
            raise click.UsageError(str(error)) from None
        except HostUnreachable as error:
            click.echo(f"collectived: {error}", err=True)
            return UNREACHABLE
        except Interrupted:
            return INTERRUPTED
    dealt = deal_ranks(ranks, clients, found.clients)
    spread = any(host != LOCALHOST for host in found.hosts)
    if LOCALHOST in found.hosts:
        check_program(program[0])
    make_log_dir(log_dir)
    name = make_job_name()
    told = collect_forwarded_variables(os.environ, variables) if spread else parse_env_options(os.environ, variables)
    job = Job(name, dealt, program, timeout, found.hosts, told, chdir or (os.getcwd() if spread else ""))
    others = None
    if cluster is not None and spread:
        others = partial(
            make_host_plan(cluster, ssh_command).create_remote_hosts,
            name=name,
            silence=SILENCE_TIMEOUT,
            terminal=terminal,
        )
    return Run(
        job,
        Policy(grace, max_restarts),
        job_files.ensure_runtime_folder() / name,
        hosts=JobHosts(others, coordinator=found.hosts[0]),
        daemons=Addresses(found.coordinator, found.workers, 0),
        log_dir=log_dir,
        terminal=terminal,
    ).run()


def find_local_workers(clients: int | None) -> RunningWorkers:
    """The workers of the one job of this user that runs on this host.

    Raises:
        click.ClickException: none does, or several do, or a worker of it does not serve.
    """
    running = [job for job in job_files.list_running_jobs() if job.workers or job.away]
    if not running:
        raise _NoDaemonsError(
            f"you have no daemons running on this host (none in {job_files.ensure_runtime_folder()}); start some with\n"
            "    collectived up CLUSTER.toml\nor start them with your program: collectived launch -- python train.py"
        )
    if len(running) > 1:
        lines = "\n".join(f"    {job.job}: {job.command}" for job in running)
        raise click.UsageError(f"you have {len(running)} jobs with daemons here; name one with --cluster:\n{lines}")
    job = running[0]
    slots, known = 1, state.read(job_files.ensure_runtime_folder() / job.job)
    if known is not None:  # of a cluster, not of `launch`
        spec = Spec.from_json(known["spec"])
        slots = spec.slots
        _check_all_serve({LOCALHOST: known["daemons"]}, f"collectived up {spec.source}")
    if not job.workers:
        raise _NoDaemonsError(f"no worker of {job.job} serves: {', '.join(job.away)}; {job.command}")
    count = len(job.workers)
    return RunningWorkers(job.coordinator, job.workers, (LOCALHOST,) * count, (clients or slots,) * count)


def find_cluster_workers(
    cluster: Cluster, hosts: Sequence[ClusterHost], clients: int | None, ssh_command: str, terminal: Terminal
) -> RunningWorkers:
    """The workers of a cluster.

    Raises:
        click.ClickException: they do not run, or one does not serve. HostUnreachable, Interrupted: as `open_hosts`.
    """
    with open_hosts(cluster, hosts, ssh_command, terminal) as opened:
        answers = opened.run_command("state", cluster.name, {host.name: "" for host in hosts})
    missing = [
        f"    {name}: {_explain_not_running(answer)}" for name, answer in answers.items() if not answer.get("running")
    ]
    if missing:
        raise _NoDaemonsError(
            "\n".join([f"cluster {cluster.name!r} does not run; collectived up {cluster.source}", *missing])
        )
    daemons = {host.name: answers[host.name]["daemons"] for host in hosts}
    _check_all_serve(daemons, f"collectived up {cluster.source}")
    workers = [
        (one["address"], host.name, clients or host.slots)
        for host in hosts
        for name, one in daemons[host.name].items()
        if name != COORDINATOR
    ]
    if not workers:
        raise _NoDaemonsError(f"cluster {cluster.name!r} has no worker on {', '.join(daemons)}")
    addresses, names, counts = zip(*workers, strict=True)
    return RunningWorkers("", addresses, names, counts)


def _check_all_serve(hosts: Mapping[str, Mapping[str, Mapping[str, Any]]], remedy: str) -> None:
    """A job is never smaller than its user takes it to be.

    Raises:
        click.ClickException: a daemon of one of these hosts does not serve.
    """
    lines = [
        f"{name} on {host} is {one['state']}"
        for host, daemons in hosts.items()
        for name, one in daemons.items()
        if one["state"] != "serving"
    ]
    if lines:
        raise _NoDaemonsError("\n    ".join([*lines, f"{remedy} starts again what is drained or failed"]))


def _explain_not_running(answer: Mapping[str, Any]) -> str:
    return str(answer.get("trouble") or "no daemons run there")


class _NoDaemonsError(click.ClickException):
    """No daemon runs that the command could ask."""

    exit_code = UNREACHABLE
