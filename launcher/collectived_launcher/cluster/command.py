"""`collectived up` and `down`: daemons that stay when the command has ended, for many jobs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from collectived_launcher.cluster.file import BadCluster, Cluster, ClusterHost, read
from collectived_launcher.cluster.reach import Interrupted, Reach, reach
from collectived_launcher.cluster.spec import Spec
from collectived_launcher.launch.daemons import with_port
from collectived_launcher.launch.ground import Unreachable
from collectived_launcher.launch.output import Terminal

FAILED, UNREACHABLE, INTERRUPTED = 1, 3, 130

_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False), metavar="CLUSTER.toml")
_only = click.option("--only", multiple=True, metavar="HOST", help="Only this host of the cluster; repeatable.")
_ssh = click.option("--ssh", "ssh_command", default="ssh", show_default=True, help="OpenSSH's client, with options.")


@click.command()
@_file
@_only
@_ssh
def up(file: Path, only: tuple[str, ...], ssh_command: str) -> int:
    """Start the daemons of a cluster, which stay: a supervisor on each host keeps them running.

    What runs already is left as it is, and said. `collectived down` ends them.
    """
    return _carry_out(
        file, only, ssh_command, _up, "what was started stays; `collectived down` ends it", with_leader=True
    )


@click.command()
@_file
@_only
@_ssh
@click.option("--now", is_flag=True, help="Do not drain: cut what runs.")
def down(file: Path, only: tuple[str, ...], ssh_command: str, now: bool) -> int:
    """Drain and end the daemons of a cluster, and leave nothing of it.

    Workers drain for as long as their `drain_seconds` say; the coordinator ends last. Exit status 1 if something was
    cut, which is said.
    """

    def end(cluster: Cluster, hosts: Sequence[ClusterHost], open_hosts: Reach) -> Iterator[tuple[str, bool]]:
        return _down(cluster, hosts, open_hosts, now)

    return _carry_out(file, only, ssh_command, end, "what has not ended yet may stay; say `collectived down` again")


def _carry_out(
    file: Path, only: tuple[str, ...], ssh_command: str, act: Any, if_interrupted: str, with_leader: bool = False
) -> int:
    """`with_leader`: the coordinator's host is asked too, whatever `only` says."""
    try:
        cluster = read(file)
    except BadCluster as error:
        raise click.UsageError(str(error)) from None
    hosts = chosen(cluster, only)
    well = True
    try:
        asked = [host for host in cluster.hosts if host in hosts or (with_leader and host is leader_of(cluster))]
        with reach(cluster, asked, ssh_command, Terminal()) as open_hosts:
            for line, good in act(cluster, hosts, open_hosts):
                click.echo(line, err=not good)
                well = well and good
    except Unreachable as error:
        click.echo(f"collectived: {error}", err=True)
        return UNREACHABLE
    except Interrupted:
        click.echo(f"collectived: interrupted: {if_interrupted}", err=True)
        return INTERRUPTED
    return 0 if well else FAILED


def leader_of(cluster: Cluster) -> ClusterHost:
    """The host of the coordinator."""
    return next(host for host in cluster.hosts if host.name == cluster.coordinator_host)


def chosen(cluster: Cluster, only: Sequence[str]) -> list[ClusterHost]:
    """Those hosts, or all.

    Raises:
        click.UsageError: the cluster has no host of that name.
    """
    names = [host.name for host in cluster.hosts]
    for name in only:
        if name not in names:
            raise click.UsageError(f"{name!r} is no host of cluster {cluster.name!r}; hosts: {', '.join(names)}")
    return [host for host in cluster.hosts if not only or host.name in only]


def _up(cluster: Cluster, hosts: Sequence[ClusterHost], open_hosts: Reach) -> Iterator[tuple[str, bool]]:
    """(line, whether it went well) for each host."""
    leader = leader_of(cluster)
    concerned = [host for host in cluster.hosts if host in hosts or host is leader]
    known = _secret(cluster, concerned, open_hosts)
    if leader not in hosts and not known:
        yield f"{leader.name}: no coordinator runs there; start the cluster without --only first", False
        return
    known = known or secrets.token_hex(32)
    addresses = _addresses(cluster, concerned, open_hosts)
    at = with_port(addresses[leader.name], cluster.coordinator_port)
    specs = {
        host.name: Spec(
            cluster.name,
            host.name,
            tuple(cluster.tasks_of(host)),
            host is leader,
            at if cluster.spread else "",
            addresses[host.name] if cluster.spread else "",
            cluster.coordinator if host is leader else (),
            cluster.worker,
            cluster.restarts,
            cluster.source,
            host.slots,
        )
        for host in hosts
    }
    for names in ([name for name in specs if name == leader.name], [name for name in specs if name != leader.name]):
        answers = open_hosts.ask("up", cluster.name, {name: specs[name].to_json() for name in names}, known)
        for name, answer in answers.items():
            yield _told(name, answer)
        if any("trouble" in answer for answer in answers.values()):
            return


def _addresses(cluster: Cluster, hosts: Sequence[ClusterHost], open_hosts: Reach) -> dict[str, str]:
    """By which these hosts are reached; what the file says goes over what is found."""
    said = {host.name: host.address for host in hosts if host.address}
    unsaid = [host.name for host in hosts if not host.address]
    found = open_hosts.survey(unsaid, cluster.interface, cluster.spread).addresses if unsaid else {}
    return {**found, **said}


def _secret(cluster: Cluster, hosts: Sequence[ClusterHost], open_hosts: Reach) -> str:
    """That of what runs already on any of them, else ''."""
    answers = open_hosts.ask("secret", cluster.name, {host.name: "" for host in hosts})
    return next((str(found) for answer in answers.values() if (found := answer.get("secret"))), "")


def _told(name: str, answer: Mapping[str, Any]) -> tuple[str, bool]:
    if "trouble" in answer:
        return f"{name}: {answer['trouble']}", False
    what = ", ".join(_daemon(daemon, one) for daemon, one in answer["daemons"].items())
    if not answer["already"]:
        return f"{name}: started {what}", True
    if answer["same"]:
        return f"{name}: runs already: {what}", True
    return (
        f"{name}: runs already, but not as this file says it: {what}; end that with `collectived down` first",
        False,
    )


def _daemon(name: str, one: Mapping[str, Any]) -> str:
    pid = f" (pid {one['pid']})" if one["pid"] else ""
    return f"{name}{pid}" if one["state"] == "serving" else f"{name}{pid} is {one['state']}"


def _down(cluster: Cluster, hosts: Sequence[ClusterHost], open_hosts: Reach, now: bool) -> Iterator[tuple[str, bool]]:
    """Workers of other hosts drain while the coordinator still sees to it."""
    about = json.dumps({"now": now})
    leader = cluster.coordinator_host
    for names in ([host.name for host in hosts if host.name != leader], [h.name for h in hosts if h.name == leader]):
        for name, answer in open_hosts.ask("down", cluster.name, dict.fromkeys(names, about)).items():
            if "trouble" in answer:
                yield f"{name}: {answer['trouble']}", False
            elif not answer["ran"]:
                yield f"{name}: nothing runs", True
            else:
                for line in answer["cut"]:
                    yield f"{name}: {line}", False
                yield (f"{name}: had to be killed", False) if answer["killed"] else (f"{name}: ended", True)
