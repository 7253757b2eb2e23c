"""`doctor --hosts`: over a carrier that stays here, and over a real sshd where one is installed."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tests.docs.blocks import claimed
from tests.e2e.launcher.conftest import Place
from tests.forked_launch import run_launcher

from collectived_launcher.doctor.checks import CHECKS, PAIRWISE_CHECKS
from collectived_launcher.doctor.hosts import HostAccess, ReachedHost, choose_pairs, parse_hosts

COMMAND = [sys.executable, "-m", "collectived_launcher", "doctor"]
PATIENCE = 60.0


def look(place: Place, *options: str) -> subprocess.CompletedProcess[str]:
    return run_launcher([*COMMAND, *options], place.environment, timeout=PATIENCE, fresh_programs=True)


def reached(*hosts: str) -> list[ReachedHost]:
    carriers = {host: () if host == "here" else ("ssh",) for host in hosts}
    return [ReachedHost(HostAccess(host, carriers[host], "python"), "10.0.0.1", ()) for host in hosts]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["b"], []),
        (["here", "b"], ["here>b"]),
        (["b", "here"], ["here>b"]),
        (["a", "b", "c"], ["a>b", "a>c", "b>c"]),
        (["a", "b", "c", "d", "e"], ["a>b", "b>c", "c>d", "d>e", "e>a"]),
        (["here", "b", "c", "d", "e"], ["here>b", "b>c", "c>d", "d>e", "here>e"]),
    ],
)
def test_who_dials_whom(hosts: list[str], expected: list[str]) -> None:
    assert [f"{one.access.host}>{other.access.host}" for one, other in choose_pairs(reached(*hosts))] == expected


def test_hosts_are_named_as_launch_has_them() -> None:
    assert parse_hosts("a:2, b ,user@c:4") == ["a", "b", "user@c"]
    with pytest.raises(click.UsageError, match="is no host"):
        parse_hosts("a,-v")


@pytest.fixture
def carrier(tmp_path: Path) -> str:
    """Reaches every host but one, and all of them are this one."""
    path = tmp_path / "carrier"
    path.write_text('#!/bin/sh\n[ "$1" = gone ] && { echo "no route to $1" >&2; exit 255; }\nshift\nexec sh -c "$1"\n')
    path.chmod(0o755)
    return str(path)


def test_hosts_look_at_themselves_and_are_measured(place: Place, carrier: str) -> None:
    done = look(place, "--hosts", "localhost:2,b:2,gone", "--ssh", carrier, "--json")
    said = json.loads(done.stdout)["findings"]
    assert done.returncode == 1, "one is gone"
    assert {finding["check"] for finding in said if finding["host"] == "b"} >= {check.name for check in CHECKS}
    assert [finding["check"] for finding in said if finding["host"] == "localhost → b"] == list(PAIRWISE_CHECKS)
    (gone,) = [finding for finding in said if finding["host"] == "gone"]
    assert (gone["check"], gone["grade"]) == ("reach", "FAILURE")
    assert "no route to gone" in gone["text"] and "without a password" in gone["remedy"]
    assert done.stderr == "asking b, gone, for 60 s at most\nmeasuring localhost → b (1 of 1)\n"


def test_a_host_without_collectived_is_a_failure(place: Place, carrier: str) -> None:
    done = look(place, "--hosts", "b", "--ssh", carrier, "--python", "/no/such/python")
    assert done.returncode == 1
    assert "b cannot be asked" in done.stdout and "/no/such/python" in done.stdout


def test_a_carrier_that_is_not_there(place: Place) -> None:
    done = look(place, "--hosts", "b", "--ssh", "no-such-carrier")
    assert done.returncode == 1 and "'no-such-carrier' cannot be run: No such file" in done.stdout


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[str]:
    """A daemon of our own on the loopback; the command that reaches it."""
    daemon = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if daemon is None or shutil.which("ssh") is None:
        pytest.skip("sshd and ssh are not installed: apt-get install openssh-server")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it when root starts it
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    (tmp_path / "authorized").write_text((tmp_path / "user.pub").read_text())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": tmp_path / "host",
        "AuthorizedKeysFile": tmp_path / "authorized",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    line = [daemon, "-D", "-e", "-f", "/dev/null", *(f"-o{name}={value}" for name, value in options.items())]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        if "listening" not in first:
            process.kill()
            pytest.skip(f"sshd does not run here: {first.strip()}")
        files = f"-i {tmp_path}/user -o UserKnownHostsFile={tmp_path}/known -o StrictHostKeyChecking=accept-new"
        try:
            yield f"ssh -p {port} -F none {files} -l {getpass.getuser()}"
        finally:
            process.kill()


def test_over_a_real_sshd(place: Place, sshd: str) -> None:
    (block,) = claimed(__file__)
    assert block.text == "collectived doctor --hosts a,b\n"
    done = look(place, "--hosts", "a,b", "--ssh", sshd.replace("-p ", "-o Hostname=127.0.0.1 -p "))
    assert done.returncode == 0, done.stdout + done.stderr
    shown = click.unstyle(done.stdout)
    assert " checks      a: well" in shown and " checks      b: well" in shown
    assert "reach          a → b: 127.0.0.1:" in shown, "by the address at which ssh came in"
