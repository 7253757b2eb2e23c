"""`launch` on stand-in daemons: what it shows, what it returns, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import settle

PATIENCE = 20.0
PYTHON = (sys.executable, "-c")
ENDS = "{signal.SIGINT, signal.SIGTERM}"
WAIT = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {ENDS}); print('up'); signal.sigwait({ENDS})"


def test_output_is_shown_line_by_line_with_the_rank(place: Any) -> None:
    done = place.drive("sh", "-c", "echo out $RANK; echo err $RANK >&2")
    first, *lines = done.stdout.splitlines()
    assert first == "2 workers × 2 clients = 4 ranks on localhost (worker = daemon of a host, client = your process)"
    assert sorted(lines) == [f"[rank {rank}] out {rank}" for rank in range(4)]
    assert sorted(done.stderr.splitlines()) == [f"[rank {rank}] err {rank}" for rank in range(4)]
    assert done.returncode == 0


def test_a_python_client_shows_progress_though_its_output_is_a_pipe(place: Any) -> None:
    launcher = place.start(*PYTHON, WAIT, clients=1, workers=1)
    assert place.lines_with(launcher, "up", 1) == ["[rank 0] up"]
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE) == 130


def test_log_dir_has_one_file_per_process(place: Any, tmp_path: Path) -> None:
    place.drive("sh", "-c", "echo out $RANK; echo err >&2", log_dir=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["coordinator.log", *(f"worker-{n}.log" for n in range(2)), *(f"rank-{n}.log" for n in range(4))]
    )
    assert sorted((tmp_path / "rank-3.log").read_text().splitlines()) == ["err", "out 3"]


@pytest.mark.parametrize("is_kept", [False, True], ids=["", "with --log-dir"])
def test_logs_shows_what_the_daemons_of_a_running_job_have_logged(place: Any, tmp_path: Path, is_kept: bool) -> None:
    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        asked = place.run_in_background([sys.executable, "-m", "collectived_launcher", "logs", *words])
        out, err = asked.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(words, asked.returncode, out, err)

    wish = {"log_dir": str(tmp_path)} if is_kept else {}
    launcher = place.start(*PYTHON, WAIT, fault="refuse:worker:again", daemon_restarts=1, grace=600, **wish)
    place.lines_with(launcher, "up", 4)
    os.kill(place.daemon("worker 1"), signal.SIGKILL)
    place.error_with(launcher, "^.worker 1. worker: address already in use")
    assert ask().stdout == "[worker 1] worker: address already in use\n"
    found = json.loads(ask("localhost", "--json").stdout)
    assert found == {"localhost": {"coordinator": [], "worker 0": [], "worker 1": ["worker: address already in use"]}}
    (job,) = [file.removesuffix(".json") for file in place.files() if file.endswith(".json")]
    job = os.path.basename(job)
    assert ask("--job", job, "-n", "1").stdout == "[worker 1] worker: address already in use\n"
    assert f"'b' is no host of job {job}; hosts: localhost" in ask("b").stderr
    wrong = ask("--job", "other")
    assert wrong.returncode == 3 and f"running jobs: {job}" in wrong.stderr
    assert "collectived logs --cluster lab.toml" in ask("lab.toml").stderr
    launcher.send_signal(signal.SIGINT)
    launcher.wait(PATIENCE)
    gone = ask()
    assert gone.returncode == 3 and "you have no cluster or job running on this host" in gone.stderr


def test_the_summary_names_the_first_failure_first(place: Any) -> None:
    script = "test $RANK != 2 || { echo no such data >&2; exit 3; }; sleep 100"
    done = place.drive("sh", "-c", script, grace=0.1)
    assert done.returncode == 1
    summary = done.stderr[done.stderr.index("first failure") :].splitlines()
    assert re.fullmatch(r"first failure: rank 2 \(pid \d+\): exit status 3", summary[0])
    assert summary[1] == "    no such data"
    end = "killed by signal 15 (SIGTERM), after the launcher had sent SIGTERM"
    assert summary[2:] == [f"collectived: failed in consequence: ranks 0, 1, 3: {end}"]


def test_a_killed_client_is_told_by_its_signal(place: Any) -> None:
    done = place.drive("sh", "-c", "test $RANK != 0 || kill -9 $$", workers=1)
    assert re.search(r"first failure: rank 0 \(pid \d+\): killed by signal 9 \(SIGKILL\)", done.stderr)


def test_a_client_that_ignores_sigterm_is_killed(place: Any) -> None:
    done = place.drive("sh", "-c", "test $RANK != 1 || exit 1; trap '' TERM; sleep 100", grace=0.1, kill_after=0.1)
    assert done.returncode == 1
    assert re.search(r"consequence: ranks 0, 2, 3: killed .*, after the launcher had sent SIGKILL$", done.stderr, re.M)


def test_others_that_end_within_the_grace_are_left_alone(place: Any) -> None:
    script = f"import os, sys; os.environ['RANK'] == '1' and sys.exit(7); {WAIT}"
    launcher = place.start(*PYTHON, script, workers=1, clients=2, grace=60)
    place.lines_with(launcher, "up", 1)
    os.kill(place.clients()[0], signal.SIGTERM)
    assert launcher.wait(PATIENCE) == 1
    assert launcher.stderr is not None and "sending" not in launcher.stderr.read()


def test_a_failed_client_is_started_again_with_its_rank(place: Any) -> None:
    script = 'echo rank $RANK restart $COLLECTIVED_RESTART; test "$RANK$COLLECTIVED_RESTART" != 10'
    done = place.drive("sh", "-c", script, workers=1, max_restarts=1)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("[rank 1]")] == [
        "[rank 1] rank 1 restart 0",
        "[rank 1] rank 1 restart 1",
    ]
    assert "exit status 1; starting it again (1 of 1)" in done.stderr


def test_processes_that_a_client_leaves_behind_end_with_it(place: Any) -> None:
    assert place.drive("sh", "-c", "sleep 100 & sleep 100 &").returncode == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("real", [False, True], ids=["standin", "real"])
def test_a_signal_takes_everything_down_in_order(place: Any, signum: int, real: bool) -> None:
    launcher = place.start(*PYTHON, f"{WAIT}; print('told')", real=real)
    place.lines_with(launcher, "up", 4)
    launcher.send_signal(signum)
    assert len(place.lines_with(launcher, "told", 4)) == 4
    assert launcher.wait(PATIENCE) == 130


def test_a_launcher_in_the_background_of_a_script_hears_sigint_too(place: Any) -> None:
    script = f"{shlex.join(place.command(*PYTHON, WAIT))} & echo pid $!; wait $!; echo status $?"
    shell = place.run_in_background(["sh", "-c", script])
    (pid,) = place.lines_with(shell, "pid", 1)
    place.lines_with(shell, "up", 4)
    os.kill(int(pid.split()[1]), signal.SIGINT)
    assert place.lines_with(shell, "status", 1) == ["status 130"]
    assert shell.wait(PATIENCE) == 0


def test_the_second_ctrl_c_kills_clients_that_do_not_listen(place: Any) -> None:
    deaf = (
        "import signal; signal.signal(signal.SIGINT, lambda *_: print('told')); print('up')\nwhile True: signal.pause()"
    )
    launcher = place.start(*PYTHON, deaf)
    place.lines_with(launcher, "up", 4)
    launcher.send_signal(signal.SIGINT)
    place.lines_with(launcher, "told", 4)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE) == 130


def test_ctrl_c_before_the_daemons_are_ready(place: Any) -> None:
    launcher = place.start("true", fault="mute")
    place.lines_with(launcher, "ranks on localhost", 1)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE) == 130


def test_a_reader_that_goes_away_ends_the_job(place: Any) -> None:
    launcher = place.start("sh", "-c", "while :; do echo line; done", clients=1)
    place.lines_with(launcher, "line", 1)
    assert launcher.stdout is not None
    launcher.stdout.close()
    assert launcher.wait(PATIENCE) == 1


@pytest.mark.parametrize("moment", ["opening", "up", "grace"])
@pytest.mark.parametrize("real", [False, True], ids=["standin", "real"])
def test_nothing_outlives_a_launcher_that_was_killed(place: Any, moment: str, real: bool) -> None:
    script = f"import os, subprocess, sys; subprocess.Popen(['sleep', '100']); {WAIT}; signal.pause()"
    launcher = place.start(*PYTHON, script, grace=60, real=real)
    if moment == "opening":  # from then on somebody knows what it has begun
        settle(lambda: place.having(b"collectived_launcher.hosts.reaper"))
    else:
        place.lines_with(launcher, "up", 4)
    if moment == "grace":
        os.kill(place.clients()[0], signal.SIGKILL)
        assert launcher.stderr is not None
        assert "failed: killed by signal 9" in launcher.stderr.readline()
    witnesses = place.processes()
    launcher.kill()
    launcher.wait()
    place.await_end_of(witnesses)
    place.await_end_of(place.processes())  # those that were started while we looked


def test_a_job_goes_on_without_its_keeper(place: Any) -> None:
    launcher = place.start(*PYTHON, WAIT, workers=1, clients=1, max_restarts=1)
    place.lines_with(launcher, "up", 1)
    (keeper,) = settle(lambda: place.having(b"collectived_launcher.hosts.reaper"))  # it may not run its program yet
    os.kill(keeper, signal.SIGKILL)
    place.await_end_of([keeper])
    os.kill(place.clients()[0], signal.SIGKILL)
    place.lines_with(launcher, "up", 1)
    os.kill(place.clients()[0], signal.SIGTERM)
    assert launcher.wait(PATIENCE) == 0


@pytest.mark.parametrize("kind", ["coordinator", "worker"])
def test_a_daemon_that_cannot_start_is_quoted(place: Any, kind: str) -> None:
    done = place.drive("true", fault=f"refuse:{kind}")
    assert done.returncode == 1
    assert re.search(
        rf"collectived: {kind}.* \(pid \d+\) ended before it was ready: exit status 1; "
        rf"its last line: {kind}: address already in use",
        done.stderr,
    )


def test_a_daemon_that_is_never_ready_is_given_up(place: Any) -> None:
    done = place.drive("true", fault="mute:worker", ready_timeout=0.2)
    assert done.returncode == 1
    assert "was not ready within 0.2 s; it said nothing on standard error" in done.stderr


def test_a_daemon_that_does_not_end_in_order_is_killed_and_named(place: Any) -> None:
    done = place.drive("true", fault="deaf:worker", ended_within=0.2)
    assert done.returncode == 0
    assert len(re.findall(r"worker \d \(pid \d+\) did not end in order within 0.2 s: killed", done.stderr)) == 2
