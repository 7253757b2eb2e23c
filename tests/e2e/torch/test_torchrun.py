"""DDP under torchrun beside `collectived up`, under `collectived launch` and `collectived run`: no variable of ours."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.blocks import claimed
from tests.docs.installed import Installation
from tests.docs.stage import plain
from tests.e2e.launcher.conftest import Place
from tests.e2e.launcher.conftest import place as place
from tests.e2e.torch.running import REGISTER, VERSION

pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytestmark = pytest.mark.timeout(240)

INSTALL, SOURCE, OUTPUT, TORCHRUN_LINES = claimed(__file__)
WITHIN = 110.0  # seconds
TRAIN = f"""
import os, signal, sys
import torch
{REGISTER}
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("collectived")
torch.set_num_threads(1)
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step():
    optimizer.zero_grad()
    model(torch.randn(32, 10)).square().mean().backward()
    optimizer.step()

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which torchrun sends at once
for _ in range(4):
    step()
if sys.argv[1:] == ["die"] and dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
try:
    step()
except dist.DistBackendError as error:
    with open(f"{{sys.argv[0]}}.{{dist.get_rank()}}", "w") as file:
        file.write(str(error))
    sys.exit(3)
weights = torch.nn.utils.parameters_to_vector(model.parameters())
print(f"weights of {{dist.get_world_size()}}: {{weights.tolist()}}", flush=True)
dist.destroy_process_group()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3")
COLLECTIVED = (sys.executable, "-m", "collectived_launcher")
LAUNCH = (*COLLECTIVED, "launch", "--clients", "3", "--grace", "2", "--", sys.executable)
RUN = (*COLLECTIVED, "run", "--clients", "3", "--grace", "2", "--", sys.executable)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@contextlib.contextmanager
def daemons(place: Place, folder: Path) -> Iterator[None]:
    """`collectived up`, then `down`."""
    file = folder / "lab.toml"
    file.write_text('hosts = ["localhost"]\n[worker]\nmemory_limit = "256MiB"\ndrain_seconds = "5s"\n')
    subprocess.run((*COLLECTIVED, "up", str(file)), env=place.environment, check=True, timeout=WITHIN)
    try:
        yield
    finally:
        subprocess.run((*COLLECTIVED, "down", str(file)), env=place.environment, check=True, timeout=WITHIN)


def run(place: Place, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=place.environment, text=True, capture_output=True, timeout=WITHIN)


def check_trained(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    weights = re.findall(r"weights of 3: (\[[^]]*\])", done.stdout)
    assert len(weights) == 3 and len(set(weights)) == 1, done.stdout + done.stderr


def check_named(done: subprocess.CompletedProcess[str], program: Path) -> None:
    """The ranks that live have been told who is gone, where it was and what it did last."""
    assert done.returncode != 0
    line = TRAIN.splitlines().index("    model(torch.randn(32, 10)).square().mean().backward()") + 1
    for rank in (0, 2):
        told = Path(f"{program}.{rank}").read_text()
        assert re.match(r"rank 1 \(host \S+, pid \d+\) is lost: ", told), told
        assert re.search(rf"last did all_reduce\(sum\) #\d+ at train\.py:{line}\b", told), told


def test_torchrun_trains_beside_daemons_that_stay(place: Place, program: Path, tmp_path: Path) -> None:
    with daemons(place, tmp_path):
        check_trained(run(place, *TORCHRUN, str(program)))


def test_of_two_jobs_of_torchrun_at_once_each_has_its_own_group(place: Place, program: Path, tmp_path: Path) -> None:
    with daemons(place, tmp_path):
        others = place.run_in_background([*TORCHRUN, "--standalone", str(program)])
        check_trained(run(place, *TORCHRUN, "--standalone", str(program)))
        output, errors = others.communicate(timeout=WITHIN)
        check_trained(subprocess.CompletedProcess((), others.returncode, output, errors))


def test_under_torchrun_a_killed_rank_is_named_to_the_others(place: Place, program: Path, tmp_path: Path) -> None:
    with daemons(place, tmp_path):
        check_named(run(place, *TORCHRUN, str(program), "die"), program)


@pytest.mark.parametrize("launcher", [LAUNCH, RUN], ids=["launch", "run"])
def test_our_launchers_train_and_name_a_killed_rank(
    place: Place, program: Path, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    with daemons(place, tmp_path) if launcher is RUN else contextlib.nullcontext():
        check_trained(run(place, *launcher, str(program)))
        check_named(run(place, *launcher, str(program), "die"), program)


@pytest.mark.skipif(VERSION < (2, 5), reason="PyTorch 2.4 reads no entry points")
def test_the_first_lines_of_the_page_install_and_run_its_program(place: Place, tmp_path: Path) -> None:
    install, launch = INSTALL.text.splitlines()
    installation = Installation(tmp_path)
    installation.run(install)
    (tmp_path / "train.py").write_text(SOURCE.text)
    opening, *lines = installation.run(launch, XDG_RUNTIME_DIR=str(place.folder)).splitlines()
    assert [opening, *map(plain, sorted(lines))] == [
        OUTPUT.text.splitlines()[0],
        *map(plain, OUTPUT.text.splitlines()[1:]),
    ]


@pytest.mark.skipif(VERSION < (2, 5), reason="PyTorch 2.4 reads no entry points")
def test_torchrun_of_the_page_runs_its_program(place: Place, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SOURCE.text)
    (tmp_path / "cluster.toml").write_text('hosts = ["localhost"]\n')
    path = f"PATH={Path(sys.executable).parent}:$PATH"
    try:
        done = run(place, "bash", "-ec", f"cd {tmp_path}; {path}\n{TORCHRUN_LINES.text}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith("localhost: ended\n")
    finally:
        run(place, *COLLECTIVED, "down", f"{tmp_path}/cluster.toml")
