"""`launch` in an allocation of Slurm's, under srun, and what is refused there; on a stand-in for srun.

With COLLECTIVED_TEST_SLURM=1 the same on a real Slurm of two nodes, which the tests start on this machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from tests.docs.blocks import claimed, taken_from
from tests.docs.sessions import differs, steps
from tests.docs.stage import plain
from tests.e2e.launcher.slurm.slurm_cluster import Cluster, Missing

from collectived_launcher.hosts import slurm, slurm_rendezvous
from collectived_launcher.hosts.selection import HostOptions, choose_hosts

ROOT = Path(__file__).parents[4]
BATCH, ALLOCATION, SEVERAL_TASKS = (block.text for block in claimed(__file__, "docs/operate/slurm.md"))
(RANKS_OF_SRUN,) = (block.text for block in claimed(__file__, "docs/start/pytorch.md"))
PATIENCE = 60.0
pytestmark = pytest.mark.timeout(150)
LAUNCH = (sys.executable, "-m", "collectived_launcher", "launch")
PLACE = "import os; print(*(os.environ[n] for n in ('RANK', 'GROUP_RANK', 'LOCAL_RANK', 'SLURMD_NODENAME')))"
MEAN = f"""
import os, collectived as cd
with cd.connect() as session, session.join() as group:
    assert group.all_reduce("sum", 1.0, options=cd.CommunicationOptions(timeout_seconds=30)) == 4
{PLACE}
"""
LINES = ["[rank 0] 0 0 0 n1", "[rank 1] 1 0 1 n1", "[rank 2] 2 1 0 n2", "[rank 3] 3 1 1 n2"]
OPENING = "2 workers × 2 clients = 4 ranks on n1, n2 (worker = daemon of a host, client = your process)"


def test_an_allocation_is_where_slurm_gave_nodes_and_srun_did_not_start_us() -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert slurm.find_allocation(given) == slurm.SlurmAllocation("7", "n[1-2]", ())
    for interactive in ("4294967290", "4294967291"):  # a shell of salloc, a batch script
        assert slurm.find_allocation({**given, "SLURM_STEP_ID": interactive}) is not None
    assert slurm.find_allocation({**given, "SLURM_STEP_ID": "0"}) is None
    assert slurm.find_allocation({}) is None
    assert slurm.find_step({}, ()) is None


@pytest.mark.parametrize(
    ("said", "tasks"),
    [
        ({"SLURM_NTASKS_PER_NODE": "4"}, (4,)),
        ({"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}, (2, 2)),
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_NTASKS_PER_NODE": "2"}, (2, 1)),
        ({"SLURM_TASKS_PER_NODE": "16(x2)"}, ()),  # nobody asked: those are processors
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "16(x2)"}, ()),
    ],
)
def test_tasks_that_were_asked_for_are_clients(said: dict[str, str], tasks: tuple[int, ...]) -> None:
    found = slurm.find_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", **said})
    assert found is not None and found.tasks == tasks
    places = choose_hosts(HostOptions(), {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", **said}, ("true",))
    assert (places.clients, places.hosts) == ((tasks or (1,))[:1], ("n1",))


def test_several_tasks_on_a_node_are_an_error_that_shows_the_line_that_was_meant() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_STEP_NUM_NODES": "3"}
    line = "srun --nodes=3 --ntasks-per-node=1 collectived launch --clients 4 -- python 'my train.py'"
    with pytest.raises(click.UsageError, match=re.escape(line)):
        slurm.find_step({**step, "SLURM_PROCID": "0"}, ("python", "my train.py"))
    with pytest.raises(SystemExit, match="2"):  # the others need not say it too
        slurm.find_step({**step, "SLURM_PROCID": "1"}, ("python", "my train.py"))


def test_a_step_of_one_task_per_node() -> None:
    step = {"SLURM_STEP_ID": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    found = slurm.find_step({**step, "SLURM_STEP_NUM_TASKS": "2", "XDG_STATE_HOME": "/s"}, ("true",))
    assert found is not None
    assert (found.is_leader, found.tasks, found.folder) == (False, 2, Path("/s/collectived/slurm-7.3.0"))


def test_tasks_meet_by_an_offer_that_nobody_else_can_take(tmp_path: Path) -> None:
    offer = tmp_path / "meet" / "1"
    taken: list[bytes] = []

    def task() -> None:
        with slurm_rendezvous.offer_agent(offer, PATIENCE) as connection:
            taken.append(connection.recv(100))
            connection.sendall(b"heard")

    thread = threading.Thread(target=task)
    thread.start()
    (path,) = slurm_rendezvous.await_offers(tmp_path / "meet", [1], PATIENCE)
    assert (offer.stat().st_mode & 0o777, offer.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    wrong = tmp_path / "wrong"
    wrong.write_text(json.dumps({**json.loads(path.read_text()), "key": "00" * 32}))
    command = slurm_rendezvous.make_remote_command(path).command
    stranger = subprocess.run([*command[:-1], str(wrong)], input=b"evil", capture_output=True, timeout=PATIENCE)
    friend = subprocess.run(command, input=b"good", capture_output=True, timeout=PATIENCE)
    thread.join(PATIENCE)
    assert stranger.returncode == 1 and b"cannot be reached" in stranger.stderr
    assert (friend.returncode, friend.stdout, taken) == (0, b"heard", [b"good"])
    assert not offer.parent.exists()


def test_tasks_that_do_not_meet_say_where_they_looked(tmp_path: Path) -> None:
    with pytest.raises(
        slurm_rendezvous.RendezvousTimeout, match=rf"tasks 1, 2 of this step made no offer in {tmp_path} within 0.1 s"
    ):
        slurm_rendezvous.await_offers(tmp_path, [1, 2], 0.1)
    with pytest.raises(slurm_rendezvous.RendezvousTimeout, match="the first task of this step did not come"):
        slurm_rendezvous.offer_agent(tmp_path / "meet" / "1", 0.1)
    assert not (tmp_path / "meet").exists()


class Fake:
    """An allocation of two nodes n1 and n2, on a stand-in for srun."""

    def __init__(self, place: Any, folder: Path) -> None:
        stand_in = Path(__file__).parents[3] / "fakes" / "srun.py"
        for name, line in {
            "srun": f'exec {sys.executable} {stand_in} "$@"',
            "scontrol": "echo n1; echo n2",
            "python": f'exec {sys.executable} "$@"',
            "collectived": f'exec {sys.executable} -m collectived_launcher "$@"',
            "salloc": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        }.items():
            (folder / name).write_text(f"#!/bin/sh\n{line}\n")
            (folder / name).chmod(0o700)
        (folder / "state").mkdir()
        self.folder = folder
        self.environment = {
            **place.environment,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(folder / "state"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1,n2",
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env=self.environment, text=True, capture_output=True, timeout=PATIENCE)

    def type(self, commands: str, program: str) -> subprocess.CompletedProcess[str]:
        """The same with lines of a page, in a folder with a program for them."""
        for name in ("mean.py", "train.py"):
            (self.folder / name).write_text(program)
        return self.run("bash", "-ec", f"cd {self.folder}; {commands}")


@pytest.fixture
def fake(place: Any, tmp_path: Path) -> Fake:
    return Fake(place, tmp_path)


def test_launch_alone_in_an_allocation_does_what_the_page_shows(fake: Fake) -> None:
    ((command, shown),) = steps(ALLOCATION)
    done = fake.type(command, taken_from("README.md", "import collectived as cd"))
    assert (sorted(done.stdout.splitlines()), done.returncode) == (sorted(shown), 0), done.stderr


def test_srun_gives_ranks_of_its_own_what_pytorch_needs(fake: Fake) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    done = fake.type(RANKS_OF_SRUN, f"import os; print(*(os.environ[name] for name in {names}))")
    assert sorted(done.stdout.splitlines()) == ["0 2 0 n1 29500", "1 2 0 n1 29500"], done.stderr


def test_launch_as_every_task_of_a_step(fake: Fake, tmp_path: Path) -> None:
    done = fake.run(
        "srun", "--nodes=2", "--ntasks-per-node=1", *LAUNCH, "--clients", "2", "--", sys.executable, "-c", PLACE
    )
    opening, *lines = done.stdout.splitlines()
    assert (opening, sorted(lines), done.returncode) == (OPENING, LINES, 0), done.stderr
    assert list((tmp_path / "state").rglob("slurm*")) == []


def test_several_tasks_per_node_fail_before_anything_is_started(fake: Fake) -> None:
    ((command, shown),) = steps(SEVERAL_TASKS)
    done = fake.type(command, "")
    assert (done.returncode, done.stdout) == (2, "")
    assert not differs(shown, done.stderr.splitlines())


# The real one


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if os.environ.get("COLLECTIVED_TEST_SLURM") != "1":
        pytest.skip("a real Slurm is started only with COLLECTIVED_TEST_SLURM=1 (make test-slurm)")
    try:
        made = Cluster()
    except Missing as error:
        pytest.skip(str(error))
    yield made
    made.close()


class Real:
    """Commands of a user of that Slurm."""

    def __init__(self, cluster: Cluster, place: Any) -> None:
        path = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
        self.cluster, self.place = cluster, place
        runtime = {"XDG_RUNTIME_DIR": place.environment["XDG_RUNTIME_DIR"]}
        self.environment: Mapping[str, str] = {**cluster.environment, **runtime, "PATH": path}

    def run(self, *words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env=self.environment, cwd=folder, text=True, capture_output=True, timeout=2 * PATIENCE
        )


@pytest.fixture
def real(cluster: Cluster, place: Any) -> Iterator[Real]:
    yield Real(cluster, place)
    deadline = time.monotonic() + PATIENCE
    while place.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    shutil.rmtree(place.folder / "collectived", ignore_errors=True)  # Slurm kills those too who would clean up


@pytest.mark.timeout(200)
def test_the_batch_script(real: Real, tmp_path: Path) -> None:
    (submits, _), (reads, shown) = steps(BATCH)
    done = real.run("bash", "-ec", submits.replace("--wait", f"--wait --output={tmp_path}/train-%j.log"))
    (log,) = tmp_path.glob("train-*.log")
    assert done.returncode == 0, (done.stderr, log.read_text())
    assert reads == "head -4 train-9.log"
    assert list(map(plain, log.read_text().splitlines()[:4])) == list(map(plain, shown))
    assert re.search(r"same bits on 4 of 4 ranks", log.read_text())


@pytest.mark.timeout(200)
@pytest.mark.parametrize("words", [("salloc", "--quiet", "--nodes=2"), ("srun", "--nodes=2", "--ntasks-per-node=1")])
def test_launch_in_a_real_allocation_and_under_a_real_srun(real: Real, words: tuple[str, ...]) -> None:
    done = real.run(*words, "collectived", "launch", "--clients", "2", "--", sys.executable, "-c", MEAN)
    opening, *lines = done.stdout.splitlines()
    assert (opening, sorted(lines), done.returncode) == (OPENING, LINES, 0), done.stderr


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["scancel", "kill"])
def test_nothing_is_left_of_a_job_that_was_cancelled_or_whose_launcher_was_killed(real: Real, how: str) -> None:
    sleep = shlex.join([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"])
    command = ["salloc", "--quiet", "--nodes=2", "sh", "-c", f"echo $SLURM_JOB_ID; collectived launch -- {sleep}"]
    with subprocess.Popen(command, env=real.environment, text=True, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        number = job.stdout.readline().strip()
        up = 0
        while up < 2:
            line = job.stdout.readline()
            assert line, "the launcher ended"
            up += "up" in line
        if how == "scancel":
            real.run("scancel", number)
        else:
            (launcher,) = [pid for pid in real.place.having(b"launch") if b"-c" not in real.place.command_of(pid)[:3]]
            os.kill(launcher, signal.SIGKILL)
        job.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while real.place.processes():
        assert time.monotonic() < deadline, [real.place.command_of(pid) for pid in real.place.processes()]
        time.sleep(0.1)
