"""`up`, `run` and `down` over OpenSSH: its server on two loopback addresses, real daemons, real clients."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Signer
from tests.docs.blocks import claimed, taken_from
from tests.docs.sessions import steps
from tests.docs.stage import plain
from tests.e2e.launcher.conftest import Place
from tests.e2e.launcher.sshd import Missing, Network

FILE, SESSION, RESTART = claimed(__file__)
PATIENCE = 60.0
MEAN = """
import os, collectived as cd
with cd.connect() as session, session.join() as group:
    print(os.environ["HOST_NAME"], group.rank, group.size, group.all_reduce("sum", 1.0))
"""


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network({"a": "127.0.0.1", "b": "127.0.0.2"})
    except Missing as error:
        pytest.skip(str(error))
    yield made
    made.close()


def own_address() -> str:
    """An address of the loopback that is made of our number: nobody else has it, and so all its ports are ours."""
    pid = os.getpid()
    return f"127.{1 + (pid >> 16 & 63)}.{pid >> 8 & 255}.{pid & 255}"


class Shell:
    """A shell with two.toml and mean.py of the page, whose ssh reaches the hosts a and b."""

    def __init__(self, place: Place, network: Network, folder: Path) -> None:
        self.folder = folder
        # Only that both hosts are this one is said besides.
        addressed = re.sub(r"^name = .*$", rf"\g<0>\naddress = '{own_address()}'", FILE.text, flags=re.MULTILINE)
        (folder / "two.toml").write_text(addressed)
        (folder / "mean.py").write_text(taken_from("docs/operate/clusters.md", "import collectived as cd"))
        (folder / "ssh").write_text(f'#!/bin/sh\nPATH="{os.environ["PATH"]}" exec {network.ssh()} "$@"\n')
        (folder / "ssh").chmod(0o700)
        path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**place.environment, "PATH": path, "COLUMNS": "200"}

    def run(self, command: str, **variables: str) -> list[str]:
        """What a command prints."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={**self.environment, **variables},
            text=True,
            capture_output=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.splitlines()


@pytest.fixture
def shell(place: Place, network: Network, tmp_path: Path) -> Iterator[Shell]:
    made = Shell(place, network, tmp_path)
    try:
        yield made
    finally:
        made.run("collectived down two.toml")
    assert not place.processes()


@pytest.mark.timeout(150)
def test_a_cluster_of_two_hosts_does_what_the_page_shows(shell: Shell) -> None:
    for command, shown in steps(SESSION.text):
        assert sorted(map(plain, shell.run(command))) == sorted(map(plain, shown)), command


@pytest.mark.timeout(150)
def test_one_host_after_the_other_is_restarted_as_the_page_says(shell: Shell, network: Network) -> None:
    drains, ups, asks = RESTART.text.splitlines()
    on_a = {"XDG_RUNTIME_DIR": str(network.runtime["a"])}  # where the daemons of the cluster are found
    shell.run("collectived up two.toml")
    before = shell.run(asks, **on_a)
    shell.run(drains, **on_a)
    assert list(map(plain, shell.run(asks, **on_a))) != list(map(plain, before))
    assert plain(*shell.run(ups)) == plain("b: started worker 1 (pid 1)")
    assert list(map(plain, shell.run(asks, **on_a))) == list(map(plain, before))


@pytest.mark.timeout(150)
def test_a_cluster_of_two_hosts_speaks_tls(place: Place, network: Network, tmp_path: Path) -> None:
    address = own_address()
    file = tmp_path / "pair.toml"
    tables = "".join(f"[[hosts]]\nname = '{name}'\naddress = '{address}'\n" for name in ("a", "b"))
    files = Signer(tmp_path / "certs").issue("hosts", names=(address,))
    tables = f"tls_cert = '{files.cert}'\ntls_key = '{files.key}'\ntls_ca = '{files.ca}'\n{tables}"
    file.write_text(f"{tables}[worker]\nmemory_limit = '64MiB'\ndrain_seconds = 5\n")

    def do(verb: str, *words: str) -> list[str]:
        command = [sys.executable, "-m", "collectived_launcher", verb, "--ssh", network.ssh(), *words]
        done = subprocess.run(command, env=place.environment, text=True, capture_output=True, timeout=PATIENCE)
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout.splitlines()

    def left() -> list[Path]:
        return [path for runtime in network.runtime.values() for path in runtime.rglob("*") if path.is_file()]

    try:
        lines = do("up", str(file))
        assert [line.split(" (pid")[0] for line in lines] == ["a: started coordinator", "b: started worker 1"]
        opening, *lines = do("run", "--cluster", str(file), "--", sys.executable, "-c", MEAN)
        assert opening.startswith("2 workers × 1 client = 2 ranks on a, b")
        assert sorted(lines) == ["[rank 0] a 0 2 2.0", "[rank 1] b 1 2 2.0"]
        assert left()
    finally:
        ended = do("down", str(file))
    assert ended == ["b: ended", "a: ended"]
    assert not left() and not place.processes()
