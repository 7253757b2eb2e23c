"""`up`, `run` and `down` over OpenSSH: its server on two loopback addresses, real daemons, real clients."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Signer
from tests.e2e.launcher.conftest import Place
from tests.e2e.launcher.sshd import Missing, Network

PATIENCE = 60.0
MEAN = """
import os, collectived as cd
with cd.connect() as session, session.join() as group:
    print(os.environ["HOST_NAME"], group.rank, group.size, group.all_reduce("sum", 1.0))
"""


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network({"alpha": "127.0.0.1", "beta": "127.0.0.2"})
    except Missing as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("tls", [False, True], ids=["plain text", "TLS"])
def test_a_cluster_of_two_hosts_is_started_used_and_ended(
    place: Place, network: Network, tmp_path: Path, tls: bool
) -> None:
    pid = os.getpid()  # nobody else has an address of the loopback that is made of it, and so all its ports are ours
    address = f"127.{1 + (pid >> 16 & 63)}.{pid >> 8 & 255}.{pid & 255}"
    file = tmp_path / "pair.toml"
    tables = "".join(f"[[hosts]]\nname = '{name}'\naddress = '{address}'\n" for name in ("alpha", "beta"))
    if tls:
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
        assert [line.split(" (pid")[0] for line in lines] == ["alpha: started coordinator", "beta: started worker 1"]
        opening, *lines = do("run", "--cluster", str(file), "--", sys.executable, "-c", MEAN)
        assert opening.startswith("2 workers × 1 client = 2 ranks on alpha, beta")
        assert sorted(lines) == ["[rank 0] alpha 0 2 2.0", "[rank 1] beta 1 2 2.0"]
        assert left()
    finally:
        ended = do("down", str(file))
    assert ended == ["beta: ended", "alpha: ended"]
    assert not left() and not place.processes()
