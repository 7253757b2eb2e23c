"""`launch` over ssh on hosts with addresses of their own, in network namespaces, one of which is cut off."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.drills.hosts import CONTROL, DATA, Hosts, hosts_or_skip
from tests.e2e.launcher.ssh.test_launch_over_ssh import PATIENCE, WAIT, Launches, told
from tests.e2e.launcher.sshd import Missing, Network

LAUNCHER, ALPHA, BETA = 0, 1, 2
pytestmark = pytest.mark.timeout(150)
TWICE = """
import os, sys, time, collectived as cd
with cd.connect() as session, session.join() as group:
    options = cd.CommunicationOptions(timeout_seconds=50)
    group.all_reduce("sum", 1.0, options=options)
    print("up", os.environ["MASTER_ADDR"])
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    print("sum", group.all_reduce("sum", float(group.rank), options=options))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(3) as made:
        yield made


@pytest.fixture
def launches(place: Any, hosts: Hosts) -> Iterator[Launches]:
    names = {"a": ALPHA, "b": BETA}
    try:
        network = Network(
            {name: hosts.address(host, CONTROL) for name, host in names.items()},
            {name: hosts.inside(host) for name, host in names.items()},
        )
    except Missing as error:
        pytest.skip(str(error))
    made = Inside(place, network)
    made.before = hosts.inside(LAUNCHER)
    try:
        yield made
        made.await_end()
        assert not [path for runtime in network.runtime.values() for path in runtime.rglob("*")]
    finally:
        hosts.heal(BETA)
        network.close()


class Inside(Launches):
    """From a host in a namespace of its own."""

    before: tuple[str, ...]

    def command(self, *words: str, hosts: str = "a:2,b:2") -> list[str]:
        return [*self.before, *super().command(*words, hosts=hosts)]


def test_a_host_that_is_cut_off_for_a_while_loses_nothing(launches: Inside, hosts: Hosts, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    launcher = launches.start("--interface", DATA, "--", "python", "-c", TWICE, str(gate))
    up = launches.place.lines_with(launcher, "up", 4)
    assert {line.split()[-1] for line in up} == {hosts.address(ALPHA, DATA)}
    hosts.part(BETA)
    time.sleep(1.0)  # packets are lost, and sent again when it is back: far too short for anybody to be given up
    hosts.heal(BETA)
    gate.touch()
    out, err = launcher.communicate(timeout=2 * PATIENCE)
    assert (launcher.returncode, told(err)) == (0, "")
    assert out.count("sum 6.0") == 4


def test_a_host_that_is_cut_off_for_good_ends_by_itself_and_is_named(launches: Inside, hosts: Hosts) -> None:
    launcher = launches.start("--host-timeout", "6", "--grace", "1", "--", "python", "-c", WAIT)
    launches.place.lines_with(launcher, "up", 4)
    hosts.part(BETA)
    _, err = launcher.communicate(timeout=2 * PATIENCE)
    assert launcher.returncode == 1
    lost = r"its host b is lost \(ssh\): (no message came from it for 6 s|Timeout, server .* not responding)"
    assert re.search(rf"first failure: rank 2 on b \(pid \d+\): {lost}", err), err
    launches.await_end()  # on b too, where nobody can be told to


def test_hosts_that_cannot_reach_each_other_are_named_before_anything_starts(launches: Inside, hosts: Hosts) -> None:
    address = hosts.address(BETA, DATA)
    wall = ("ip", "route", "add", "unreachable", f"{address}/32")
    subprocess.run([*hosts.inside(ALPHA), *wall], check=True, timeout=PATIENCE)
    try:
        done = launches.run("--interface", DATA, "--", sys.executable, "-c", "print('started')")
    finally:
        subprocess.run([*hosts.inside(ALPHA), *wall[:2], "del", *wall[3:]], check=True, timeout=PATIENCE)
    assert (done.returncode, "started" in done.stdout) == (3, False)
    assert re.search(rf"^collectived: a cannot reach b at {address} \(No route to host\); choose", told(done.stderr))
