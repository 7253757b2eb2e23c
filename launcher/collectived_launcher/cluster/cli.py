"""`collectived up` and `down`: daemons that stay when the command has ended, for many jobs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from collectived_launcher.cluster.file import Cluster, ClusterFileError, ClusterHost, read_cluster
from collectived_launcher.cluster.hosts import ClusterHosts, Interrupted, open_hosts
from collectived_launcher.cluster.spec import Spec
from collectived_launcher.hosts.output import Terminal
from collectived_launcher.hosts.preflight import HostUnreachable
from collectived_launcher.launch.daemons import join_host_port

FAILED, UNREACHABLE, INTERRUPTED = 1, 3, 130

_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False), metavar="CLUSTER.toml")
_only = click.option("--only", multiple=True, metavar="HOST", help="Only this host of the cluster; repeatable.")
_ssh = click.option("--ssh", "ssh_command", default="ssh", show_default=True, help="OpenSSH's client, with options.")


@click.command(short_help="Start the daemons of a cluster.")
@_file
@_only
@_ssh
def up(file: Path, only: tuple[str, ...], ssh_command: str) -> int:
    """Start the daemons of a cluster. A supervisor on each host keeps them running.

    Daemons that run already are left as they are, and named. `collectived down` ends them.
    """
    return _run_on_hosts(
        file,
        only,
        ssh_command,
        _start_cluster,
        "daemons that were started stay; `collectived down` ends them",
        with_leader=True,
    )


@click.command(short_help="Drain and end a cluster's daemons, and remove its files.")
@_file
@_only
@_ssh
@click.option("--now", is_flag=True, help="Do not drain: cut running collectives.")
def down(file: Path, only: tuple[str, ...], ssh_command: str, now: bool) -> int:
    """Drain and end the daemons of a cluster, and remove its files.

    Workers drain for at most their `drain_seconds`; the coordinator ends last. Exit status 1 if collectives were cut,
    which are named.
    """

    def end(cluster: Cluster, hosts: Sequence[ClusterHost], reached: ClusterHosts) -> Iterator[tuple[str, bool]]:
        return _stop_cluster(cluster, hosts, reached, now)

    return _run_on_hosts(file, only, ssh_command, end, "some daemons may still run; say `collectived down` again")


def _run_on_hosts(
    file: Path, only: tuple[str, ...], ssh_command: str, act: Any, if_interrupted: str, with_leader: bool = False
) -> int:
    """`with_leader`: the coordinator's host is asked too, whatever `only` says."""
    try:
        cluster = read_cluster(file)
    except ClusterFileError as error:
        raise click.UsageError(str(error)) from None
    hosts = select_hosts(cluster, only)
    well = True
    try:
        asked = [
            host for host in cluster.hosts if host in hosts or (with_leader and host is get_coordinator_host(cluster))
        ]
        with open_hosts(cluster, asked, ssh_command, Terminal()) as opened:
            for line, good in act(cluster, hosts, opened):
                click.echo(line, err=not good)
                well = well and good
    except HostUnreachable as error:
        click.echo(f"collectived: {error}", err=True)
        return UNREACHABLE
    except Interrupted:
        click.echo(f"collectived: interrupted: {if_interrupted}", err=True)
        return INTERRUPTED
    return 0 if well else FAILED


def get_coordinator_host(cluster: Cluster) -> ClusterHost:
    """The host of the coordinator."""
    return next(host for host in cluster.hosts if host.name == cluster.coordinator_host)


def select_hosts(cluster: Cluster, only: Sequence[str]) -> list[ClusterHost]:
    """Those hosts, or all.

    Raises:
        click.UsageError: the cluster has no host of that name.
    """
    names = [host.name for host in cluster.hosts]
    for name in only:
        if name not in names:
            raise click.UsageError(f"{name!r} is no host of cluster {cluster.name!r}; hosts: {', '.join(names)}")
    return [host for host in cluster.hosts if not only or host.name in only]


def _start_cluster(cluster: Cluster, hosts: Sequence[ClusterHost], reached: ClusterHosts) -> Iterator[tuple[str, bool]]:
    """(line, whether it went well) for each host."""
    leader = get_coordinator_host(cluster)
    concerned = [host for host in cluster.hosts if host in hosts or host is leader]
    known = _fetch_secret(cluster, concerned, reached)
    if leader not in hosts and not known:
        yield f"{leader.name}: no coordinator runs there; start the cluster without --only first", False
        return
    known = known or secrets.token_hex(32)
    addresses = _find_addresses(cluster, concerned, reached)
    at = join_host_port(addresses[leader.name], cluster.coordinator_port)
    specs = {
        host.name: Spec(
            cluster.name,
            host.name,
            tuple(cluster.get_tasks(host)),
            host is leader,
            at if cluster.has_remote_hosts else "",
            addresses[host.name] if cluster.has_remote_hosts else "",
            cluster.coordinator_flags if host is leader else (),
            cluster.worker_flags,
            cluster.restarts,
            cluster.source,
            host.slots,
        )
        for host in hosts
    }
    for names in ([name for name in specs if name == leader.name], [name for name in specs if name != leader.name]):
        answers = reached.run_command("up", cluster.name, {name: specs[name].to_json() for name in names}, known)
        for name, answer in answers.items():
            yield _format_answer(name, answer)
        if any("trouble" in answer for answer in answers.values()):
            return


def _find_addresses(cluster: Cluster, hosts: Sequence[ClusterHost], reached: ClusterHosts) -> dict[str, str]:
    """Find the addresses of these hosts. An address in the file goes before one that is found."""
    said = {host.name: host.address for host in hosts if host.address}
    unsaid = [host.name for host in hosts if not host.address]
    found = reached.find_addresses(unsaid, cluster.interface, cluster.has_remote_hosts).addresses if unsaid else {}
    return {**found, **said}


def _fetch_secret(cluster: Cluster, hosts: Sequence[ClusterHost], reached: ClusterHosts) -> str:
    """That of what runs already on any of them, else ''."""
    answers = reached.run_command("secret", cluster.name, {host.name: "" for host in hosts})
    return next((str(found) for answer in answers.values() if (found := answer.get("secret"))), "")


def _format_answer(name: str, answer: Mapping[str, Any]) -> tuple[str, bool]:
    if "trouble" in answer:
        return f"{name}: {answer['trouble']}", False
    what = ", ".join(_format_daemon(daemon, one) for daemon, one in answer["daemons"].items())
    if not answer["already"]:
        return f"{name}: started {what}", True
    if answer["same"]:
        return f"{name}: runs already: {what}", True
    return (
        f"{name}: runs already, but not as this file says it: {what}; end that with `collectived down` first",
        False,
    )


def _format_daemon(name: str, one: Mapping[str, Any]) -> str:
    pid = f" (pid {one['pid']})" if one["pid"] else ""
    return f"{name}{pid}" if one["state"] == "serving" else f"{name}{pid} is {one['state']}"


def _stop_cluster(
    cluster: Cluster, hosts: Sequence[ClusterHost], reached: ClusterHosts, now: bool
) -> Iterator[tuple[str, bool]]:
    """Workers of other hosts drain while the coordinator still sees to it."""
    about = json.dumps({"now": now})
    leader = cluster.coordinator_host
    for names in ([host.name for host in hosts if host.name != leader], [h.name for h in hosts if h.name == leader]):
        for name, answer in reached.run_command("down", cluster.name, dict.fromkeys(names, about)).items():
            if "trouble" in answer:
                yield f"{name}: {answer['trouble']}", False
            elif not answer["ran"]:
                yield f"{name}: nothing runs", True
            else:
                for line in answer["cut"]:
                    yield f"{name}: {line}", False
                yield (f"{name}: had to be killed", False) if answer["killed"] else (f"{name}: ended", True)
