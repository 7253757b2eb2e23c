"""What every host promises (`hosts/host.py`), shown for this one and for one behind an agent; and agents alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collectived_launcher.hosts.host import NOT_RUN, Host, ProgramSpec
from collectived_launcher.hosts.local import LocalHost, collect_facts
from collectived_launcher.hosts.loop import Loop
from collectived_launcher.hosts.remote_host import AGENT_MODULE, AgentJob, RemoteCommand, RemoteHost

PATIENCE = 20.0
RELEASE = collect_facts(Path()).release
PIPE = RemoteCommand("pipe", (sys.executable, "-P", "-m", AGENT_MODULE))
SECRET = "5ec2e7" * 8


class Witness:
    """Keeps what it is told of a process."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, bytes]] = []
        self.ends = 0

    def on_output(self, stream: int, line: bytes) -> None:
        assert not self.ends, "heard after its end"
        self.lines.append((stream, line))

    def on_exit(self) -> None:
        self.ends += 1


class Stage:
    """A host that is open, and the launcher's loop."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        self.loop, self.folder = loop, folder
        self.here = LocalHost(loop, folder / "collectived" / "job")
        self.said: list[bytes] = []
        self.others: list[RemoteHost] = []

    def elsewhere(self, carrier: RemoteCommand = PIPE, release: str = RELEASE, silence: float = 30.0) -> RemoteHost:
        job = AgentJob("job-1", release, silence)
        host = RemoteHost(self.loop, "b", carrier, job, self.here.reaper, self.said.append)
        self.others.append(host)
        return host

    def until(self, reached: Callable[[], bool]) -> None:
        assert self.loop.run_until(reached, PATIENCE)

    def opened(self, host: Host) -> Host:
        host.open(lambda: None)
        self.until(lambda: host.facts is not None or bool(host.trouble))
        return host

    def done(self, host: Host, *argv: str, secret: str | None = None, folder: str = "") -> tuple[int, Witness, str]:
        """Runs a program to its end."""
        witness = Witness()
        process = host.start(ProgramSpec(argv, {"COLOUR": "blue"}, folder, secret), witness)
        self.until(lambda: witness.ends > 0)
        assert process.status is not None
        return process.status, witness, process.trouble

    def close(self, host: Host) -> None:
        host.close()
        self.until(lambda: host.closed)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "collectived").mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        with Loop() as loop:
            stage = Stage(loop, folder)
            stage.here.open(lambda: None)
            yield stage
            for host in stage.others:
                stage.close(host)
            stage.here.close()
        await_end_of_all(folder)  # where an agent was killed, its keeper is not waited for by anybody
        assert list(folder.rglob("*")) == [], "files were left behind"


@pytest.fixture(params=["here", "pipe"])
def host(request: pytest.FixtureRequest, stage: Stage) -> Host:
    return stage.here if request.param == "here" else stage.opened(stage.elsewhere())


def living(folder: Path) -> list[int]:
    """Processes with our runtime directory, but for ourselves."""
    mark = f"XDG_RUNTIME_DIR={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def await_end_of_all(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while living(folder):
        assert time.monotonic() < deadline, f"still there: {living(folder)}"
        time.sleep(0.02)


def test_facts(host: Host) -> None:
    assert host.facts is not None
    assert (host.facts.release, host.facts.python) == (RELEASE, sys.executable)
    assert Path(host.facts.folder).stat().st_mode & 0o777 == 0o700
    assert ("lo", "127.0.0.1", 8) in [(one.name, one.address, one.prefix) for one in host.facts.interfaces]


def test_lines_come_before_the_end_and_in_order(stage: Stage, host: Host) -> None:
    status, witness, trouble = stage.done(
        host, "sh", "-c", "for i in 1 2 3; do echo $COLOUR $i; done; echo no >&2; exit 3"
    )
    assert (status, trouble, witness.ends) == (3, "", 1)
    assert [line for line in witness.lines if line[0] == 1] == [(1, b"blue %d" % number) for number in (1, 2, 3)]
    assert (2, b"no") in witness.lines


def test_much_output_arrives_whole(stage: Stage, host: Host) -> None:
    status, witness, _ = stage.done(host, sys.executable, "-c", "for i in range(30000): print(i, 'x' * 100)")
    assert status == 0
    assert [line.split()[0] for _, line in witness.lines] == [b"%d" % number for number in range(30000)]


def test_a_line_that_is_no_text_arrives_as_it_is(stage: Stage, host: Host) -> None:
    assert stage.done(host, "printf", r"\377\001 line\n")[1].lines == [(1, b"\xff\x01 line")]


def test_what_cannot_be_run_ends_too(stage: Stage, host: Host) -> None:
    status, witness, trouble = stage.done(host, "/no/such/program")
    assert (status, witness.lines, witness.ends) == (NOT_RUN, [], 1)
    assert trouble.startswith("'/no/such/program' cannot be run: ")
    assert stage.done(host, "no-such-program")[2] == (
        "'no-such-program' is not in the PATH there; give a path to it, or an interpreter first: -- python train.py"
    )


def test_a_folder_that_is_not_there(stage: Stage, host: Host) -> None:
    assert (
        stage.done(host, "true", folder="/no/such")[2]
        == "folder '/no/such' cannot be entered: No such file or directory; a program runs in the same folder on every "
        "host: make it, or name another with --chdir"
    )


@pytest.mark.parametrize(
    ("argv", "folder", "trouble"),
    [
        (["python", "-u", "-Wignore", "-X", "dev", "train.py", "no.py"], "", ""),
        (["./run.sh"], "", ""),
        (["tool"], "", ""),
        (["python", "-um", "no.such"], "", ""),
        (["python", "-c", "print()"], "", ""),
        (["python", "-"], "", ""),
        (["sh", "no.sh"], "", ""),
        (["python", "--jit", "off", "no.py"], "", ""),
        (
            ["./python3", "train.py"],
            "",
            "no file {}/python3 there; install it there, or name an interpreter that every",
        ),
        (["python", "-uW", "ignore", "no.py"], "", "no file {}/no.py there; copy it to this path on every host, keep"),
        (["python3.11", "/no/such.py"], "", "no file /no/such.py there; copy it to this path on every host, keep it"),
        (["./no.sh"], "", "no file {}/no.sh there; copy it"),
        (["./train.txt"], "", "{}/train.txt is not executable there; chmod +x it, or name its interpreter first"),
        (["no-tool"], "", "'no-tool' is not in the PATH there; give a path to it"),
        (["true"], "/no/such", "no folder /no/such there; a program runs in the same folder on every host: make it"),
    ],
)
def test_files_of_a_program_that_are_missing_are_named(
    stage: Stage, host: Host, tmp_path: Path, argv: list[str], folder: str, trouble: str
) -> None:
    for name in ("train.py", "run.sh", "bin/tool", "bin/python", "bin/python3.11"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(mode=0o700)
    (tmp_path / "train.txt").touch(mode=0o600)
    about = {"argv": argv, "folder": folder or str(tmp_path), "path": f"bin:{os.environ['PATH']}"}
    answers: list[dict[str, object]] = []
    host.run_task("program", about, answers.append)
    stage.until(lambda: bool(answers))
    assert str(answers[0].get("trouble", "")).startswith(trouble.format(tmp_path)) and bool(answers[0]) == bool(trouble)


def test_a_program_runs_where_it_is_told_to(stage: Stage, host: Host) -> None:
    assert stage.done(host, "pwd", folder="/usr")[1].lines == [(1, b"/usr")]


def test_a_signal_goes_to_the_whole_group(stage: Stage, host: Host) -> None:
    witness = Witness()
    process = host.start(ProgramSpec(("sh", "-c", "sleep 100 & echo up; wait")), witness)
    stage.until(lambda: bool(witness.lines))
    assert process.pid > 0 and process.status is None
    process.send(signal.SIGTERM)
    stage.until(lambda: witness.ends == 1)
    assert process.status == -signal.SIGTERM


def test_who_is_stopped_is_woken(stage: Stage, host: Host) -> None:
    witness = Witness()
    process = host.start(ProgramSpec(("sh", "-c", "echo up; kill -STOP $$; echo on")), witness)
    stage.until(lambda: bool(witness.lines))
    process.send(signal.SIGINT)
    stage.until(lambda: witness.ends == 1)


def test_the_secret_is_the_first_line_of_an_input_that_stays_open(stage: Stage, host: Host) -> None:
    witness = Witness()
    read = "import sys; s = sys.stdin.readline().strip(); print(len(s), flush=True); print(repr(sys.stdin.read()))"
    process = host.start(ProgramSpec((sys.executable, "-c", read), secret=SECRET), witness)
    stage.until(lambda: bool(witness.lines))
    shown = [
        (Path(f"/proc/{pid}") / name).read_bytes() for pid in living(stage.folder) for name in ("environ", "cmdline")
    ]
    assert shown and not any(SECRET.encode() in text for text in shown)
    process.close_stdin()
    stage.until(lambda: witness.ends == 1)
    assert (process.status, witness.lines) == (0, [(1, b"48"), (1, b"''")])


def test_without_a_secret_the_input_is_empty(stage: Stage, host: Host) -> None:
    assert stage.done(host, "cat")[0] == 0


def test_what_is_left_ends_when_it_is_closed(stage: Stage, host: Host) -> None:
    witness = Witness()
    host.start(ProgramSpec(("sh", "-c", "trap '' TERM; sleep 100 & echo up; sleep 100")), witness)
    stage.until(lambda: bool(witness.lines))
    stage.close(host)
    assert (witness.ends, host.facts) == (1, None)


def test_errands(stage: Stage, host: Host) -> None:
    def ask(errand: str, **about: object) -> dict[str, object]:
        answers: list[dict[str, object]] = []
        host.run_task(errand, about, answers.append)
        stage.until(lambda: bool(answers))
        return answers[0]

    assert ask("address", interface="lo", towards=[]) == {"address": "127.0.0.1"}
    assert ask("address", interface="127.0.0.0/8", towards=[]) == {"address": "127.0.0.1"}
    assert ask("address", interface="", towards=["no.such.host.invalid", "127.0.0.1"]) == {"address": "127.0.0.1"}
    assert "it has no interface 'eth77'; it has lo (127.0.0.1/8)" in str(ask("address", interface="eth77", towards=[]))
    assert "neither an interface nor a network" in str(ask("address", interface="1.2.3/x", towards=[])["trouble"])
    assert "--interface: lo (127" in str(ask("address", interface="", towards=["no.such.host.invalid"])["trouble"])
    port = ask("listen", address="127.0.0.1")["port"]
    assert ask("dial", targets=[["127.0.0.1", port]]) == {"failures": [""]}
    assert ask("hush") == {}
    assert ask("dial", targets=[["127.0.0.1", port]]) == {"failures": ["Connection refused"]}
    assert ask("dial", targets=[]) == {"failures": []}
    assert "trouble" in ask("sing")


def test_a_target_that_cannot_even_be_dialled_is_a_failure_of_its_own_and_the_task_is_answered_once(
    stage: Stage, host: Host
) -> None:
    answers: list[dict[str, Any]] = []
    host.run_task("listen", {"address": "127.0.0.1"}, answers.append)
    stage.until(lambda: bool(answers))
    port, answers[:] = answers[0]["port"], []
    targets = [["127.0.0.1", port], ["127.0.0.1", 70000], ["no.such.host.invalid", port]]
    host.run_task("dial", {"targets": targets}, answers.append)
    stage.until(lambda: bool(answers))
    host.run_task("hush", {}, answers.append)
    stage.until(lambda: answers[-1] == {})
    assert len(answers) == 2
    first, port_failure, name_failure = answers[0]["failures"]
    assert first == "" and "65535" in port_failure and name_failure


def test_an_agent_that_is_killed_takes_all_with_it(stage: Stage) -> None:
    host, witness = stage.opened(stage.elsewhere()), Witness()
    process = host.start(ProgramSpec(("sh", "-c", "sleep 100 & echo up; sleep 100")), witness)
    stage.until(lambda: bool(witness.lines))
    (agent,) = [pid for pid in living(stage.folder) if AGENT_MODULE.encode() in command(pid)]
    os.kill(agent, signal.SIGKILL)
    stage.until(lambda: witness.ends == 1)
    assert (process.status, process.trouble) == (-9, "its host b is lost (pipe): it ended with exit status -9")
    assert (host.facts, host.trouble, host.closed) == (None, "lost (pipe): it ended with exit status -9", True)
    await_end_of_all_but_keeper(stage)
    status, _, trouble = stage.done(host, "true")
    assert (status, trouble) == (NOT_RUN, "its host b lost (pipe): it ended with exit status -9")


def await_end_of_all_but_keeper(stage: Stage) -> None:
    (keeper,) = [
        pid
        for pid in living(stage.folder)
        if str(stage.folder / "collectived" / "job").encode() + b"\0" in command(pid)
    ]
    deadline = time.monotonic() + PATIENCE
    while living(stage.folder) != [keeper]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def command(pid: int) -> bytes:
    """Its command line; nothing when it is over."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_lost_host_may_be_opened_again(stage: Stage) -> None:
    host = stage.opened(stage.elsewhere())
    (agent,) = [pid for pid in living(stage.folder) if AGENT_MODULE.encode() in command(pid)]
    os.kill(agent, signal.SIGKILL)
    stage.until(lambda: host.closed)
    stage.opened(host)
    assert stage.done(host, "echo", "again")[1].lines == [(1, b"again")]


def test_an_agent_that_is_stopped_is_given_up_and_ends_when_it_wakes(stage: Stage) -> None:
    host, witness = stage.opened(stage.elsewhere(silence=3.0)), Witness()
    process = host.start(ProgramSpec(("sleep", "100")), witness)
    stage.until(lambda: process.pid > 0)
    (agent,) = [pid for pid in living(stage.folder) if AGENT_MODULE.encode() in command(pid)]
    os.kill(agent, signal.SIGSTOP)
    stage.until(lambda: witness.ends == 1)
    assert process.trouble == "its host b is lost (pipe): no message came from it for 3 s"
    await_end_of_all_but_keeper(stage)


def test_an_agent_whose_launcher_says_nothing_ends_all(stage: Stage) -> None:
    """As when the network between them is cut, and no end of input comes."""
    host, witness = stage.opened(stage.elsewhere(silence=3.0)), Witness()
    host.start(ProgramSpec(("sh", "-c", "trap '' TERM; echo up; sleep 100")), witness)
    stage.until(lambda: bool(witness.lines))
    await_end_of_all_but_keeper(stage)  # the loop does not turn: nothing is said


@pytest.mark.parametrize(
    ("carrier", "trouble"),
    [
        (
            ("sh", "-c", "echo 'Permission denied (publickey).' >&2; exit 255"),
            "Permission denied (publickey).; make 'ssh HOST true' work",
        ),
        (("sh", "-c", "exec /no/such/python"), "/no/such/python: not found"),
        (("sh", "-c", "echo This account is not available; exit 1"), "This account is not available"),
        (("sh", "-c", "exit 4"), "it ended with exit status 4"),
        ((sys.executable, "-c", "print('x' * 100000); input(); input()"), "its agent does not greet as an agent does"),
        ((sys.executable, "-P", "-m", "no_such_module"), "No module named no_such_module"),
    ],
)
def test_a_carrier_that_brings_us_nowhere_is_quoted(stage: Stage, carrier: tuple[str, ...], trouble: str) -> None:
    host = stage.opened(stage.elsewhere(RemoteCommand("ssh", carrier)))
    assert host.trouble.startswith("cannot be used (ssh): ")
    assert trouble in host.trouble


def test_a_host_that_was_there_is_lost_without_advice_about_ssh(stage: Stage) -> None:
    carrier = RemoteCommand("ssh", ("sh", "-c", '"$@"; exit 255', "sh", *PIPE.command))
    host = stage.opened(stage.elsewhere(carrier))
    assert host.facts is not None
    status, _, trouble = stage.done(host, "sh", "-c", "kill -9 $PPID; sleep 100")
    assert status == -9
    assert trouble == "its host b is lost (ssh): Killed"  # in the words of the shell


def test_what_a_login_shell_prints_is_passed_over(stage: Stage) -> None:
    noisy = ("sh", "-c", 'echo welcome; echo; exec "$@"', "sh", *PIPE.command)
    host = stage.opened(stage.elsewhere(RemoteCommand("ssh", noisy)))
    assert stage.done(host, "echo", "hello")[1].lines == [(1, b"hello")]


def test_another_release_is_refused(stage: Stage) -> None:
    host = stage.opened(stage.elsewhere(release="0.0.1"))
    assert f"it has collectived {RELEASE} ({sys.executable}), this host has 0.0.1: install the same" in host.trouble


def test_an_agent_that_hears_nonsense_ends(stage: Stage) -> None:
    for nonsense in (
        b"\0\0\0\2\0\0\0\0[]",
        b"\xff" * 100,
        b"\0\0\0\x14\0\0\0\0" + b'{"kind":"KeepAlive"}' + b"\0\0\0\x11\0\0\0\0x",
    ):
        done = subprocess.run(PIPE.command, input=nonsense, capture_output=True, timeout=PATIENCE)
        assert done.returncode == 0


@pytest.mark.parametrize("module", [AGENT_MODULE, "collectived_launcher.__main__"])
def test_what_has_to_start_fast_imports_nothing_heavy(module: str) -> None:
    heavy = "{'grpc', 'rich', 'numpy', 'google.protobuf', 'asyncio'}"
    code = f"import sys, {module}; sys.exit(' '.join(sorted({heavy} & sys.modules.keys())) or 0)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
