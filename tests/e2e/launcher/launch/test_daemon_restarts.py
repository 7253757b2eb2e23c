"""A daemon that dies during a job comes back, after a pause and only so often; shown on stand-ins."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 20.0
ENDS = "{signal.SIGINT, signal.SIGTERM}"
WAIT = (
    sys.executable,
    "-c",
    f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {ENDS}); print('up', flush=True); signal.sigwait({ENDS})",
)
EFFECTS = {
    "coordinator": ("running groups go on, joins wait", "running groups go on, new ones cannot be formed"),
    "worker 0": ("ranks 0, 1 lost their worker; their groups get errors",) * 2,
}


def end_clients(place: Any) -> None:
    for pid in place.clients():
        os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize("name", ["coordinator", "worker 0"])
def test_a_daemon_that_was_killed_comes_back_as_it_was_and_the_job_ends_well(place: Any, name: str) -> None:
    launcher = place.start(*WAIT)
    place.lines_with(launcher, "up", 4)
    pid = place.daemon(name)
    command = place.command_of(pid)
    os.kill(pid, signal.SIGKILL)
    assert re.fullmatch(
        rf"collectived: {name} \(pid {pid}\) died: killed by signal 9 \(SIGKILL\); {EFFECTS[name][0]}; "
        r"starting it again in 0\.[12] s \(1 of 5\)",
        place.error_with(launcher, "died"),
    )
    assert place.command_of(place.successor(name, pid)) == command
    end_clients(place)
    assert launcher.wait(PATIENCE) == 0
    assert launcher.stderr.read() == f"collectived: {name} was started again once: killed by signal 9 (SIGKILL)\n"


def test_the_coordinator_has_a_journal_so_that_its_epoch_grows(place: Any) -> None:
    launcher = place.start(*WAIT)
    place.lines_with(launcher, "up", 4)
    words = place.command_of(place.daemon("coordinator"))
    assert Path(words[words.index(b"--journal") + 1].decode()).parent.parent == place.folder / "collectived"
    end_clients(place)
    assert launcher.wait(PATIENCE) == 0


def test_a_daemon_that_ended_in_order_without_being_told_to_comes_back_too(place: Any) -> None:
    launcher = place.start(*WAIT)
    place.lines_with(launcher, "up", 4)
    pid = place.daemon("worker 1")
    os.kill(pid, signal.SIGTERM)
    place.successor("worker 1", pid)
    end_clients(place)
    assert launcher.wait(PATIENCE) == 0
    assert "worker 1 was started again once: exit status 0" in launcher.stderr.read()


def test_one_log_file_has_what_all_of_its_lives_said(place: Any, tmp_path: Path) -> None:
    launcher = place.start(*WAIT, fault="refuse:worker:again", daemon_restarts=1, grace=0.1, log_dir=str(tmp_path))
    place.lines_with(launcher, "up", 4)
    (tmp_path / "worker-0.log").write_text("before\n")
    os.kill(place.daemon("worker 0"), signal.SIGKILL)
    assert launcher.wait(PATIENCE) == 1
    assert (tmp_path / "worker-0.log").read_text() == "before\nworker: address already in use\n"


@pytest.mark.parametrize("name", ["coordinator", "worker 0"])
def test_a_daemon_that_dies_again_and_again_fails_the_job_with_its_last_words(place: Any, name: str) -> None:
    kind = name.split()[0]
    launcher = place.start(*WAIT, fault=f"refuse:{kind}:again", daemon_restarts=2, grace=0.1)
    place.lines_with(launcher, "up", 4)
    os.kill(place.daemon(name), signal.SIGKILL)
    assert launcher.wait(PATIENCE) == 1
    said = [line for line in launcher.stderr.read().splitlines() if not line.startswith(f"[{name}]")]
    died = [line for line in said if "died" in line]
    assert re.search(
        rf"killed by signal 9 \(SIGKILL\); {EFFECTS[name][0]}; starting it again in .* \(1 of 2\)$", died[0]
    )
    assert re.search(rf"exit status 1; {EFFECTS[name][0]}; starting it again in 0\.[234] s \(2 of 2\)$", died[1])
    assert died[2].endswith(
        f"died: exit status 1; {EFFECTS[name][1]}; it was started again 2 times within 5 min, which is all; "
        "ranks 0, 1, 2, 3 may take 0.1 s to end"
    )
    summary = said[said.index("collectived: some ranks are still running; sending SIGTERM to ranks 0, 1, 2, 3") + 1 :]
    assert re.fullmatch(
        rf"collectived: {name} was started again 2 times: killed by signal 9 \(SIGKILL\) once, exit status 1 once\n"
        rf"collectived: first failure: {name} \(pid \d+\): exit status 1\n"
        rf"    {kind}: address already in use\n    {kind}: address already in use",
        "\n".join(summary),
    )


def test_a_daemon_that_comes_back_and_does_not_serve_is_killed(place: Any) -> None:
    launcher = place.start(*WAIT, fault="mute:worker:again", daemon_restarts=1, grace=0.1, ready_timeout=3)
    place.lines_with(launcher, "up", 4)
    os.kill(place.daemon("worker 0"), signal.SIGKILL)
    place.error_with(launcher, r"worker 0 \(pid \d+\) was not ready within 3 s: killed")
    place.error_with(launcher, r"worker 0 \(pid \d+\) died: killed by signal 9 .*which is all")
    assert launcher.wait(PATIENCE) == 1


@pytest.mark.parametrize("name", ["coordinator", "worker 0"])
def test_without_restarts_a_daemon_that_dies_is_named_and_fails_the_job(place: Any, name: str) -> None:
    launcher = place.start(*WAIT, daemon_restarts=0)
    place.lines_with(launcher, "up", 4)
    os.kill(place.daemon(name), signal.SIGKILL)
    assert re.fullmatch(
        rf"collectived: {name} \(pid \d+\) died: killed by signal 9 \(SIGKILL\); {EFFECTS[name][1]}; "
        "ranks 0, 1, 2, 3 may take 10 s to end",
        place.error_with(launcher, "died"),
    )
    end_clients(place)
    assert launcher.wait(PATIENCE) == 1
    assert f"first failure: {name}" in launcher.stderr.read()


def test_a_client_that_failed_is_started_again_when_its_worker_serves(place: Any) -> None:
    launcher = place.start(*WAIT, fault="refuse:worker:again", daemon_restarts=4, max_restarts=1, grace=0.1)
    place.lines_with(launcher, "up", 4)
    clients = place.clients()
    os.kill(place.daemon("worker 1"), signal.SIGKILL)
    place.error_with(launcher, "2 of 4")
    os.kill(clients[2], signal.SIGKILL)
    place.error_with(launcher, r"rank 2 .*; starting it again \(1 of 1\) as soon as worker 1 serves$")
    assert launcher.wait(PATIENCE) == 1
    assert launcher.stdout.read() == ""  # it was not


def in_a_long_pause(place: Any, name: str) -> Any:
    """A job that will not start this daemon again within the next second and a half."""
    launcher = place.start(*WAIT, fault=f"refuse:{name.split()[0]}:again", daemon_restarts=9)
    place.lines_with(launcher, "up", 4)
    os.kill(place.daemon(name), signal.SIGKILL)
    place.error_with(launcher, r"starting it again in .* \(5 of 9\)")
    return launcher


@pytest.mark.parametrize("name", ["coordinator", "worker 1"])
def test_ctrl_c_during_the_pause_takes_the_rest_down_in_order(place: Any, name: str) -> None:
    launcher = in_a_long_pause(place, name)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE) == 130
    interrupted, summary = launcher.stderr.read().splitlines()[-2:]
    assert interrupted == "collectived: got SIGINT; sending SIGINT to ranks 0, 1, 2, 3"
    assert re.match(
        rf"collectived: {name} was started again \d times: killed by signal 9 \(SIGKILL\) once, exit", summary
    )


def test_nothing_outlives_a_launcher_that_was_killed_during_the_pause(place: Any) -> None:
    launcher = in_a_long_pause(place, "worker 0")
    witnesses = place.processes()
    launcher.kill()
    launcher.wait()
    place.await_end_of(witnesses)
    place.await_end_of(place.processes())


def test_a_daemon_that_is_being_taken_down_is_not_started_again(place: Any) -> None:
    launcher = place.start("true", fault="deaf", ended_within=60)
    for _ in range(2):
        place.error_with(launcher, "worker: did you say something")
    for name in ("worker 0", "worker 1"):
        os.kill(place.daemon(name), signal.SIGKILL)
    place.error_with(launcher, "coordinator: did you say something")
    os.kill(place.daemon("coordinator"), signal.SIGKILL)
    assert launcher.wait(PATIENCE) == 0
    assert launcher.stderr.read() == ""
