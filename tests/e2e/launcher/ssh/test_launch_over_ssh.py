"""`launch` over ssh: OpenSSH's server on two loopback addresses, real daemons, real clients."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Signer, flags
from tests.docs.blocks import Block, claimed, taken_from
from tests.docs.sessions import steps
from tests.e2e.launcher.sshd import Missing, Network

from collectived_launcher.hosts.hostlist import parse_hostfile
from collectived_proto.tls.files import TlsFiles

FIRST, HOSTFILE, *UNUSABLE = claimed(__file__)
PATIENCE = 30.0
pytestmark = pytest.mark.timeout(150)
ENDS = "{signal.SIGINT, signal.SIGTERM}"
WAIT = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {ENDS}); print('up'); signal.sigwait({ENDS})"
MEAN = """
import os, collectived as cd
with cd.connect() as session, session.join() as group:
    mean = group.all_reduce("mean", float(group.rank), options=cd.CommunicationOptions(timeout_seconds=20))
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "COLOUR", "COLLECTIVED_TRACE_ME")
    print(mean, os.environ["HOST_NAME"], *(os.environ.get(name) for name in names), os.getcwd(), session.transport)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        made = Network({"a": "127.0.0.1", "b": "127.0.0.2"})
    except Missing as error:
        pytest.skip(str(error))
    yield made
    made.close()


class Launches:
    """`collectived launch` on the hosts a and b; afterwards nothing of it is left on any."""

    def __init__(self, place: Any, network: Network) -> None:
        self.place, self.network = place, network
        self.environment = {**place.environment, "COLLECTIVED_TRACE_ME": "yes", "COLLECTIVED_SECRET": "never"}

    def command(self, *words: str, hosts: str = "a:2,b:2") -> list[str]:
        start = [sys.executable, "-m", "collectived_launcher", "launch"]
        return [*start, "--ssh", self.network.ssh(), "--hosts", hosts, *words]

    def run(self, *words: str, hosts: str = "a:2,b:2") -> subprocess.CompletedProcess[str]:
        command = self.command(*words, hosts=hosts)
        return subprocess.run(command, env=self.environment, text=True, capture_output=True, timeout=2 * PATIENCE)

    def type(self, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Runs a line of a page in a folder with its program; `ssh` finds our hosts, as by a user's own file."""
        (folder / "mean.py").write_text(taken_from("README.md", "import collectived as cd"))
        ssh = folder / "bin" / "ssh"
        ssh.parent.mkdir(exist_ok=True)
        ssh.write_text(f'#!/bin/sh\nPATH="{os.environ["PATH"]}" exec {self.network.ssh()} "$@"\n')
        ssh.chmod(0o700)
        path = f"{ssh.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**self.place.environment, "PATH": path, "COLUMNS": "250"}
        return subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, text=True, capture_output=True, timeout=2 * PATIENCE
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        started: subprocess.Popen[str] = self.place.run_in_background(self.command(*words))
        return started

    def on(self, host: str) -> list[int]:
        """Processes that were started there."""
        mark = f"XDG_RUNTIME_DIR={self.network.runtime[host]}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def all(self) -> list[int]:
        return [*self.place.processes(), *(pid for host in self.network.runtime for pid in self.on(host))]

    def await_end(self) -> float:
        """Seconds until nothing was left anywhere."""
        begun = time.monotonic()
        while self.all():
            assert time.monotonic() < begun + PATIENCE, f"still there: {[self.place.command_of(p) for p in self.all()]}"
            time.sleep(0.05)
        return time.monotonic() - begun


def told(text: str) -> str:
    """What was said, but for that we wait: how long hosts take is nobody's promise."""
    return "".join(line for line in text.splitlines(keepends=True) if "connecting to the hosts" not in line)


@pytest.fixture
def launches(place: Any, network: Network) -> Iterator[Launches]:
    yield (made := Launches(place, network))
    for process in place.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    made.await_end()
    left = [path for runtime in network.runtime.values() for path in runtime.rglob("*")]
    assert not left, "files were left behind"


def test_a_job_of_two_hosts(launches: Launches, tmp_path: Path) -> None:
    program = ("--env", "COLOUR=blue", "--log-dir", str(tmp_path), "--", "python", "-c", MEAN)
    done = launches.run("--chdir", "/usr", *program)
    assert told(done.stderr) == ""
    opening, *lines = done.stdout.splitlines()
    assert opening.startswith("2 workers × 2 clients = 4 ranks on a, b (")
    assert sorted(lines) == [
        f"[rank {rank}] 1.5 {host} {rank} {rank % 2} {rank // 2} 2 127.0.0.1 blue yes /usr shared memory"
        for rank, host in enumerate(["a", "a", "b", "b"])
    ]
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["coordinator.log", *(f"worker-{n}.log" for n in range(2)), *(f"rank-{n}.log" for n in range(4))]
    )


def test_a_hostfile_and_a_coordinator_here(launches: Launches, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1  # the first\n\nb:2\n")
    command = launches.command("--coordinator", "here", "--", "python", "-c", MEAN)
    command[command.index("--hosts") : command.index("--hosts") + 2] = ["--hostfile", str(tmp_path / "hosts")]
    done = subprocess.run(command, env=launches.environment, text=True, capture_output=True, timeout=2 * PATIENCE)
    assert (done.returncode, told(done.stderr)) == (0, "")
    assert "2 workers with 1 + 2 clients = 3 ranks on a, b" in done.stdout
    assert done.stdout.count(" 1.0 ") == 3


def test_daemons_of_two_hosts_speak_tls_with_certificates_that_both_have(launches: Launches, tmp_path: Path) -> None:
    def words(files: TlsFiles) -> list[str]:
        return [*flags(files), "--", "python", "-c", MEAN]

    signer = Signer(tmp_path)
    done = launches.run(*words(signer.issue("hosts", names=("127.0.0.1", "127.0.0.2"))))
    assert (done.returncode, told(done.stderr)) == (0, "")
    assert done.stdout.count("] 1.5 ") == 4
    wrong = launches.run(*words(signer.issue("others", names=("other.example",))))
    assert wrong.returncode == 1
    assert "certificate is not valid for '127.0.0." in wrong.stderr


def told_at_start(pid: int) -> bytes:
    """The command line and the environment of a process; nothing when it is over."""
    try:
        return b"\0".join((Path(f"/proc/{pid}") / name).read_bytes() for name in ("environ", "cmdline"))
    except OSError:
        return b""


def test_secrets_are_nowhere_status_works_on_each_host_and_ctrl_c_ends_all_in_order(
    launches: Launches, tmp_path: Path
) -> None:
    launcher = launches.start("--log-dir", str(tmp_path), "--", "python", "-c", f"{WAIT}; print('told')")
    launches.place.lines_with(launcher, "up", 4)
    shown = b"\0".join(told_at_start(pid) for pid in launches.all())
    assert b"collectived_runtime" in shown
    assert not re.search(rb"[0-9a-f]{40}", shown)
    status = [sys.executable, "-m", "collectived_launcher", "status", "--json"]
    for runtime in launches.network.runtime.values():
        environment = {**launches.place.environment, "XDG_RUNTIME_DIR": str(runtime)}
        done = subprocess.run(status, env=environment, text=True, capture_output=True, timeout=PATIENCE)
        assert '"host": "a"' in done.stdout and '"host": "b"' in done.stdout, done.stderr
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=PATIENCE)
    assert (launcher.returncode, out.count("told")) == (130, 4)
    assert told(err) == "collectived: got SIGINT; sending SIGINT to ranks 0, 1, 2, 3\n"
    logs = "".join(path.read_text() for path in tmp_path.iterdir())
    assert not re.search(r"[0-9a-f]{40}", out + err + logs)


MOMENTS = int(os.environ.get("COLLECTIVED_TEST_MOMENTS", "3"))
SEED = os.environ.get("COLLECTIVED_TEST_SEED") or str(random.randrange(1 << 32))
UP_WITHIN = 4.0  # seconds; on a machine that does little else all four ranks are up by then


@pytest.mark.parametrize("number", range(MOMENTS))
def test_nothing_outlives_a_launcher_that_was_killed_at_a_random_moment(launches: Launches, number: int) -> None:
    later = random.Random(f"{SEED} {number}").uniform(0.0, UP_WITHIN)
    print(f"COLLECTIVED_TEST_SEED={SEED}")
    script = f"import subprocess; subprocess.Popen(['sleep', '1000']); {WAIT}; signal.pause()"
    launcher = launches.start("--", "python", "-c", script)
    launches.place.lines_with(launcher, "ranks on a", 1)
    time.sleep(later)  # any moment will do
    launcher.kill()
    launcher.wait()
    at = f"killed {later:.2f} s after its first line"
    print(f"{at}: {len(launches.all())} processes then, nothing left after {launches.await_end():.2f} s")


def cut(launches: Launches, host: str) -> None:
    """The connection to a host is lost."""
    for pid in launches.network.connections(host):
        with contextlib.suppress(ProcessLookupError):
            if any(b"sshd" in word for word in launches.place.command_of(pid)[:1]):  # it may be over
                os.kill(pid, signal.SIGKILL)


def test_a_lost_connection_is_named_and_ends_everything(launches: Launches) -> None:
    launcher = launches.start("--grace", "1", "--", "python", "-c", WAIT)
    launches.place.lines_with(launcher, "up", 4)
    cut(launches, "b")
    _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1
    first = re.search(r"first failure: (.*)", err)
    assert first and re.fullmatch(r"rank 2 on b \(pid \d+\): its host b is lost \(ssh\): .*", first[1]), err
    assert re.search(r"worker 1 on b \(pid \d+\) died: its host b is lost \(ssh\): .*", err)
    assert re.search(r"then: rank 3 on b \(pid \d+\): its host b is lost \(ssh\): ", err)
    assert "sending SIGTERM to ranks 0, 1" in err


def test_a_host_that_comes_back_is_used_again(launches: Launches) -> None:
    again = f"import os\nif os.environ['COLLECTIVED_RESTART'] == '0':\n    {WAIT}\nelse: print('again')"
    launcher = launches.start("--max-restarts", "1", "--", "python", "-c", again)
    launches.place.lines_with(launcher, "up", 4)
    cut(launches, "b")
    assert sorted(launches.place.lines_with(launcher, "again", 2)) == ["[rank 2] again", "[rank 3] again"]
    for pid in [pid for pid in launches.on("a") if b"-c" in launches.place.command_of(pid)]:
        os.kill(pid, signal.SIGTERM)
    _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, err
    assert "worker 1 was started again once: its host b is lost (ssh)" in err


def test_the_first_run_of_the_page(launches: Launches, tmp_path: Path) -> None:
    ((command, shown),) = steps(FIRST.text)
    done = launches.type(command, tmp_path)
    assert (sorted(done.stdout.splitlines()), told(done.stderr), done.returncode) == (sorted(shown), "", 0)


def test_the_forms_of_a_hostfile_on_the_page() -> None:
    assert parse_hostfile(HOSTFILE.text, "hosts", 3) == {"a": 2, "b": 2, "me@c": 3}


@pytest.mark.parametrize("block", UNUSABLE, ids=lambda block: str(block.place))
def test_a_host_that_is_not_to_be_had_is_named_as_on_the_page(launches: Launches, block: Block, tmp_path: Path) -> None:
    ((command, shown),) = steps(block.text)
    done = launches.type(command, tmp_path)
    assert done.returncode == 3
    assert [without_addresses(line) for line in (done.stdout + told(done.stderr)).splitlines()] == [
        without_addresses(line) for line in shown
    ]


def without_addresses(line: str) -> str:
    """Which interfaces there are differs from host to host; the loopback is one of them."""
    assert "it has no interface" not in line or "it has lo (127.0.0.1/8)" in line
    return line.partition("; it has lo (127.0.0.1/8)")[0]


def test_a_program_that_is_no_interpreter_is_told(launches: Launches) -> None:
    done = launches.run("--python", "/usr/bin/env", "--", "true", hosts="a")
    assert done.returncode == 3
    assert re.search(r"^collectived: a cannot be used \(ssh\): ", told(done.stderr)), done.stderr


def test_a_key_that_is_refused_is_told_in_the_words_of_ssh(launches: Launches, tmp_path: Path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")]
    subprocess.run(words, check=True, timeout=PATIENCE)
    command = launches.command("--", "true")
    config = launches.network.config.read_text().replace(f"{launches.network.folder}/key\n", f"{tmp_path}/other\n")
    (tmp_path / "config").write_text(config)
    command[command.index("--ssh") + 1] = f"ssh -F {tmp_path}/config"
    done = subprocess.run(command, env=launches.environment, text=True, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 3
    assert re.search(r"(a|b) cannot be used \(ssh\): .*Permission denied \(publickey\)", done.stderr)


def test_a_program_that_a_host_lacks_is_named_before_anything_starts(launches: Launches, tmp_path: Path) -> None:
    done = launches.run("--chdir", str(tmp_path), "--", "python", "mean.py")
    what = f"collectived: a, b: no file {tmp_path}/mean.py there; copy it to this path on every host, "
    assert [line.partition("keep it")[0] for line in told(done.stderr).splitlines()] == [what]
    assert done.returncode == 3 and len(done.stdout.splitlines()) == 1


def test_a_slow_host_is_waited_for_aloud(launches: Launches, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow = tmp_path / "slow-ssh"
    slow.write_text(f'#!/bin/sh\ncase "$*" in *" -G "*) ;; *" b exec "*) read line < {gate};; esac\nexec ssh "$@"\n')
    slow.chmod(0o700)
    command = launches.command("--", "true")
    command[command.index("--ssh") + 1] = f"{slow} -F {launches.network.config}"
    launcher = launches.place.run_in_background(command)
    so_far = r"^collectived: connecting to the hosts, \d+ s so far: [01] of 2 ready"
    launches.place.error_with(launcher, rf"{so_far}, still to come: (a \(ssh\), )?b \(ssh\)$")
    gate.write_text("open\n")
    assert launcher.wait(PATIENCE) == 0
