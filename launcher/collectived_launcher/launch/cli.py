"""`collectived launch`: daemons and clients of one job, started, watched and taken down together."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from collectived_launcher.hosts.hostlist import check_separators
from collectived_launcher.hosts.output import Terminal
from collectived_launcher.hosts.selection import (
    HostOptions,
    choose_hosts,
    collect_forwarded_variables,
    parse_env_options,
)
from collectived_launcher.launch import restarts
from collectived_launcher.launch.daemons import DaemonCommand
from collectived_launcher.launch.job import Job, make_job_name
from collectived_launcher.launch.job_state import Policy
from collectived_launcher.launch.run import JobHosts, Run
from collectived_launcher.quantities import Time, check_http_address
from collectived_proto.ipc import job_files


class ProgramCommand(click.Command):
    """A command of hosts and a program; hosts that are separated by spaces are an error, and no program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        written = list(args)
        rest = super().parse_args(ctx, args)
        program = ctx.params["program"]  # None while a shell completes the line
        if program and written[-len(program) - 1 : -len(program)] != ["--"]:
            try:
                check_separators(ctx.params["hosts"], program)
            except ValueError as error:
                raise click.UsageError(str(error), ctx) from None
        return rest


@click.command(
    cls=ProgramCommand,
    short_help="Run a program as ranks, with daemons of its own.",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Workers on this host.  [default: 1]")
@click.option(
    "--clients",
    "--nproc-per-node",
    "--nproc_per_node",
    type=click.IntRange(min=1),
    metavar="N",
    help="Clients (processes of your program) per worker.  [default: 1]",
)
@click.option("-n", "-np", "ranks", type=click.IntRange(min=1), metavar="N", help="Ranks in all, as with mpirun.")
@click.option(
    "--hosts",
    default="",
    metavar="HOST[:CLIENTS],...",
    help="Hosts with one worker each, over ssh; localhost: this one.",
)
@click.option(
    "--hostfile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The same from a file: HOST, HOST:CLIENTS or HOST slots=CLIENTS a line.",
)
@click.option(
    "--coordinator",
    type=click.Choice(["first", "here"]),
    default="first",
    show_default=True,
    help="Where the coordinator runs: on the first host, or here.",
)
@click.option(
    "--interface",
    default="",
    metavar="NAME|NETWORK",
    help="The network by which hosts reach each other: eth0, 10.0.0.0/8.  [default: that of the route between them]",
)
@click.option("--ssh", "ssh_command", default="ssh", show_default=True, help="OpenSSH's client, with your options.")
@click.option("--python", default="", help="Interpreter on the other hosts that has collectived.  [default: this one]")
@click.option(
    "--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="Give this variable to PROGRAM; repeatable."
)
@click.option("--chdir", default="", metavar="FOLDER", help="Where PROGRAM runs.  [default: this folder]")
@click.option(
    "--host-timeout",
    type=Time(minimum=1),
    default="30s",
    show_default=True,
    help="Declare a host lost after this time of silence, 1s or more; its processes are stopped.",
)
@click.option(
    "--timeout",
    type=Time(),
    help="Timeout of collectives if neither the call nor the group has one; 0: none.  [default: none]",
)
@click.option(
    "--grace",
    type=Time(),
    default="10s",
    show_default=True,
    help="Time after the first failure before the other ranks get SIGTERM; SIGKILL follows 5 s later.",
)
@click.option("--log-dir", type=click.Path(path_type=Path, file_okay=False), help="Also write one file per process.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="Start each failed client again with its RANK, at most this often; COLLECTIVED_RESTART counts.",
)
@click.option(
    "--daemon-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    default=restarts.DEFAULT_MAX_RESTARTS,
    show_default=True,
    help="Restart a dead coordinator or worker, with growing pauses, at most this often each within 5 minutes; then "
    "the job fails. 0: never.",
)
@click.option(
    "--tune",
    is_flag=True,
    help="Measure the links when a group forms, and store the choices of AUTO under the group's name and shape; "
    "later runs with --tune use them without measuring.",
)
@click.option(
    "--metrics",
    is_flag=True,
    help="Each daemon serves Prometheus metrics at a port of its own, for callers with the job's viewing token; "
    "launch prints the ports and the file of the token.",
)
@click.option(
    "--http",
    callback=check_http_address,
    metavar="[HOST:]PORT",
    help="Serve a web page with the live output of `status`, for all readers with the printed link; on the loopback "
    "without HOST; port 0: a free one.",
)
@click.option(
    "--tls-cert",
    metavar="FILE",
    help="Encrypt the daemons' TCP connections, links between workers too: the certificate of a host, at the same "
    "path on every host.",
)
@click.option("--tls-key", metavar="FILE", help="The private key of --tls-cert, at the same path on every host.")
@click.option(
    "--tls-ca",
    metavar="FILE",
    help="Certificates of authorities, at the same path on every host: callers over TCP must show a certificate of "
    "one of them.",
)
@click.option(
    "--log-level",
    metavar="LEVEL",
    help="The lowest level of log lines that daemons write: debug, info, warning, error.  [default: warning]",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    help="Format of the daemons' logs; json: one object per line.  [default: text]",
)
@click.option(
    "--otel", is_flag=True, help="Workers send OpenTelemetry spans, one per collective (needs collectived[otel])."
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGS]...")
def launch(
    workers: int | None,
    clients: int | None,
    ranks: int | None,
    hosts: str,
    hostfile: Path | None,
    coordinator: str,
    interface: str,
    ssh_command: str,
    python: str,
    variables: tuple[str, ...],
    chdir: str,
    host_timeout: float,
    timeout: float | None,
    grace: float,
    log_dir: Path | None,
    max_restarts: int,
    daemon_restarts: int,
    tune: bool,
    metrics: bool,
    http: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_ca: str | None,
    log_level: str | None,
    log_format: str | None,
    otel: bool,
    program: tuple[str, ...],
) -> int:
    """Run PROGRAM as WORKERS x CLIENTS ranks on this host, or on those of --hosts.

    Starts a coordinator, the workers and one process of PROGRAM per rank, and shows their output. Ends everything when
    the processes have ended, when one fails, or on Ctrl-C. In a Slurm allocation, its nodes are the hosts.
    """
    wish = HostOptions(workers, clients, hosts, hostfile, ssh_command, python, host_timeout)
    places = choose_hosts(wish, os.environ, program)
    dealt = deal_ranks(ranks, clients, places.clients)
    if places.make_remote_command is None:
        _reject_remote_options("interface", "coordinator", "python", "host_timeout")
    if not (hosts or hostfile):
        _reject_remote_options("ssh_command")
    told = (
        collect_forwarded_variables(os.environ, variables)
        if places.has_remote_hosts
        else parse_env_options(os.environ, variables)
    )
    if places.local_host in places.hosts:
        check_program(program[0])
    make_log_dir(log_dir)
    name = make_job_name()
    folder = chdir or (os.getcwd() if places.has_remote_hosts else "")
    job = Job(name, dealt, program, timeout, places.hosts, told, folder)
    options = _options("--log-level", log_level) + _options("--log-format", log_format)
    options += ("--metrics", "0") if metrics else ()
    for option, path in (("--tls-cert", tls_cert), ("--tls-key", tls_key), ("--tls-ca", tls_ca)):
        options += _options(option, os.path.abspath(path) if path else None)
    command = DaemonCommand(
        options=options,
        coordinator_options=("--tune",) if tune else (),
        worker_options=("--otel",) if otel else (),
        http_address=http or "",
        variables=told if places.has_remote_hosts else {},
    )
    policy = Policy(grace, max_restarts, daemon_restarts=daemon_restarts)
    terminal = Terminal()
    return Run(
        job,
        policy,
        choose_folder(name, job.worker_count),
        hosts=JobHosts(
            partial(places.create_remote_hosts, name=name, silence=host_timeout, terminal=terminal),
            places.local_host,
            places.local_host if coordinator == "here" else places.hosts[0],
            interface,
        ),
        daemons=command,
        log_dir=log_dir,
        terminal=terminal,
    ).run()


def _reject_remote_options(*names: str) -> None:
    """Says of options that are for other hosts, and were given, that there are none."""
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in names and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[0]} is for other hosts: name them with --hosts or --hostfile")


def _options(name: str, value: str | None) -> tuple[str, ...]:
    return (name, value) if value else ()


def deal_ranks(ranks: int | None, clients: int | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """How many clients each worker gets where `-n` says the ranks in all; `default` where it does not.

    Raises:
        click.UsageError: it says something else than `--clients` or the hosts do, or does not go into the workers.
    """
    if ranks is None or sum(default) == ranks:
        return default
    workers = len(default)
    if clients is None and set(default) == {1} and ranks % workers == 0:
        return (ranks // workers,) * workers
    each = -(-ranks // workers)
    raise click.UsageError(
        f"-n {ranks} is the number of ranks in all, and {sum(default)} are asked for otherwise on {workers} "
        f"worker{'s' if workers > 1 else ''}: say how many each worker has, with --clients {each} instead of -n {ranks}"
    )


def check_program(program: str) -> None:
    """Before anything is started."""
    if shutil.which(program):
        return
    if os.path.dirname(program) and os.path.exists(program):
        raise click.UsageError(f"program {program!r} cannot be run: expected an executable file (chmod +x?)")
    where = "no such file" if os.path.dirname(program) else "not found in PATH"
    raise click.UsageError(
        f"program {program!r} does not exist ({where}); usage: collectived launch -- python train.py"
    )


def make_log_dir(log_dir: Path | None) -> None:
    if log_dir is None:
        return
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"--log-dir {str(log_dir)!r} cannot be made: {error.strerror}") from error
    if not os.access(log_dir, os.W_OK):
        raise click.UsageError(f"--log-dir {str(log_dir)!r} is not writable by you")


def choose_folder(name: str, workers: int) -> Path:
    """Where the job's sockets will lie."""
    try:
        folder = job_files.ensure_runtime_folder() / name
        job_files.check_socket_path(folder / f"worker-{workers - 1}.sock")
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    return folder
