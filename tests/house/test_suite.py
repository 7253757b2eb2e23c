"""How the tests are run: what failed in company is asked once more alone, and nothing else is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests import suite

FELT = (signal.SIGINT, signal.SIGHUP)
# What runs Python as `nohup make test &` does: it ignores these, and so does all that it starts.
IN_THE_BACKGROUND = f"""
import os, signal, sys
for signum in {[*map(int, FELT)]}:
    signal.signal(signum, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
ROOT = Path(__file__).parents[2]
ENDED_BY_SIGNALS = "test_a_signal_takes_everything_down_in_order[standin-"


def test_nothing_is_asked_again_when_all_passed() -> None:
    assert suite.again(0, ["tests/a.py::test_b"]) == ()


def test_a_few_that_failed_are_asked_again() -> None:
    assert suite.again(suite.FAILED, ["tests/a.py::test_b"]) == ["tests/a.py::test_b"]


def test_many_failures_are_not_asked_again() -> None:
    assert suite.again(suite.FAILED, [f"tests/a.py::test_{n}" for n in range(suite.FEW + 1)]) == ()


def test_an_interrupted_run_or_one_that_could_not_collect_is_not_asked_again() -> None:
    for status in (2, 3, 4, 5):
        assert suite.again(status, ["tests/a.py::test_b"]) == ()


def test_the_last_word_names_the_tests_and_says_how_they_ended() -> None:
    assert suite.verdict(["tests/a.py::test_b"], 0).startswith("passed alone")
    assert "tests/a.py::test_b" in suite.verdict(["tests/a.py::test_b"], 1)
    assert suite.verdict(["tests/a.py::test_b"], 1).startswith("failed")


def test_more_than_two_that_had_to_be_asked_again_fail_the_run_though_they_pass_alone() -> None:
    names = [f"tests/a.py::test_{number}" for number in range(3)]
    assert suite.final_status(names[:2], 0) == 0 and suite.final_status(names, 0) == suite.FAILED
    assert suite.final_status(names[:1], 1) == 1
    assert "more than 2 fail the run" in suite.verdict(names, 0)


@pytest.mark.parametrize(("failed", "runs"), [((), 1), (("one", "two"), 2), (tuple("abcde"), 1)])
def test_the_closing_line_counts_what_was_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failed: tuple[str, ...], runs: int
) -> None:
    statuses = iter([suite.FAILED if failed else 0, 0])
    monkeypatch.setattr(suite, "_pytest", lambda *options: next(statuses))
    monkeypatch.setattr(suite, "_failed", lambda: failed)
    status = suite.main([])
    assert len(list(statuses)) == 2 - runs
    count = len(failed) if runs == 2 else 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"tests that were asked again alone: {count} ")
    assert status == (suite.FAILED if len(failed) > suite.FEW else 0)


def test_python_keeps_what_it_has_compiled() -> None:
    kept = suite.surroundings({"PYTHONDONTWRITEBYTECODE": "1", "PATH": "/bin"})
    assert kept.items() >= {"PATH": "/bin"}.items() and "PYTHONDONTWRITEBYTECODE" not in kept


def test_matrices_have_one_thread_unless_the_shell_says_otherwise() -> None:
    assert suite.surroundings({})["OPENBLAS_NUM_THREADS"] == "1"
    assert suite.surroundings({"OPENBLAS_NUM_THREADS": "4"})["OPENBLAS_NUM_THREADS"] == "4"


def test_a_process_that_a_test_starts_ends_by_a_signal() -> None:
    """However this run was started; see below."""
    for signum in FELT:
        process = subprocess.Popen(["sleep", "60"])
        process.send_signal(signum)
        with process:
            assert process.wait(20) == -signum


@pytest.mark.parametrize("workers", [0, 1])
def test_tests_that_send_signals_pass_in_a_run_that_ignores_them(workers: int) -> None:
    launches = "tests/e2e/launcher/launch/test_launch_command.py"
    chosen = [f"{launches}::{ENDED_BY_SIGNALS}{int(signum)}]" for signum in FELT]
    itself = f"{Path(__file__).relative_to(ROOT)}::{test_a_process_that_a_test_starts_ends_by_a_signal.__name__}"
    options = ["-n", str(workers), "-p", "no:cacheprovider", "-o", "timeout=60"]
    command = [sys.executable, "-c", IN_THE_BACKGROUND, "-m", "pytest", *options, itself, *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and f"{1 + len(FELT)} passed" in done.stdout, done.stdout + done.stderr
