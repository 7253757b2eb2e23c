"""`collectived doctor` as its user has it: lines, exit status, JSON, and what `launch` says in its words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tests.docs.blocks import claimed
from tests.docs.stage import plain
from tests.e2e.launcher.conftest import Place
from tests.forked_launch import run_launcher

from collectived_launcher.__main__ import run
from collectived_launcher.doctor import report
from collectived_launcher.doctor.checks import CHECKS, PAIRWISE_CHECKS
from collectived_launcher.doctor.finding import Finding, Grade, failure, ok, warning
from collectived_launcher.doctor.startup import report_failures

ROOT = Path(__file__).parents[4]
COMMAND = [sys.executable, "-m", "collectived_launcher"]
PATIENCE = 60.0


def doctor(place: Place, *options: str, said: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    line = [*COMMAND, "doctor", *options]
    environment = {**place.environment, **variables}
    return run_launcher(line, environment, timeout=PATIENCE, said=said, fresh_programs=True)


def test_every_check_has_a_line_with_its_grade(place: Place) -> None:
    done = doctor(place)
    assert done.returncode == 0, done.stdout
    shown = [match[2].strip() for line in done.stdout.splitlines() if (match := re.match(r"(\w+) +(.{13})  ", line))]
    assert list(dict.fromkeys(shown)) == [check.name for check in CHECKS]
    assert re.fullmatch(r"\d+ OK, \S+ warnings?, no failure", done.stdout.splitlines()[-1])
    assert not list(place.folder.iterdir()), "doctor has changed something"


def test_a_failure_is_exit_status_1_and_says_what_to_do(place: Place) -> None:
    (place.folder / "collectived").mkdir(mode=0o755)
    (place.folder / "collectived").chmod(0o755)
    try:
        done = doctor(place)
    finally:
        (place.folder / "collectived").rmdir()
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    (number,) = [number for number, line in enumerate(lines) if line.startswith("FAILURE  socket folder")]
    assert "mode 0755" in lines[number] and lines[number + 1].strip() == f"→ chmod 700 {place.folder}/collectived"


def test_json_has_findings_and_facts(place: Place) -> None:
    done = doctor(place, "--json", COLLECTIVED_TIMEOUT="soon")
    said = json.loads(done.stdout)
    assert done.returncode == 1 and said["worst"] == "FAILURE"
    (bad,) = [finding for finding in said["findings"] if finding["grade"] == "FAILURE"]
    assert bad["check"] == "environment" and set(bad) == {"check", "grade", "text", "remedy", "host"}
    assert said["facts"]["kernel"]["system"] == "Linux"
    assert {library["name"] for library in said["facts"]["software"]["libraries"]} >= {"grpcio", "numpy"}
    assert report.parse_document(said, "")[0].check == "python"


def test_a_running_job_answers(place: Place) -> None:
    launcher = place.start(sys.executable, "-c", "print('up'); import time; time.sleep(60)", real=True, workers=1)
    place.lines_with(launcher, "up", 2)
    done = doctor(place)
    launcher.terminate()
    launcher.communicate(timeout=PATIENCE)
    (line,) = [line for line in done.stdout.splitlines() if " running job " in line]
    assert re.search(r"OK +running job +\S+ answers; all of it runs collectived \d", line)
    # Either is true of a machine: what is not is that nothing is said.
    assert re.search(r"OK +clock skew +(\S+ clock is \d+\.\d ms|not measured: \S+ took \d+\.\d ms)", done.stdout)


def test_wrong_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in [
        (["--serve", "--to", "a:1"], "exclude each other"),
        (["--hosts", "a", "--to", "a:1"], "exclude each other"),
        (["--to", "a"], "--to 'a' is no address: expected host:port"),
        (["--to", "a:70000"], "is no address"),
        (["--serve", "here"], "--serve 'here' is no address"),
        (["--hosts", "a,,b"], "'' is no host"),
        (["--hosts", "a,-oProxyCommand=x"], "'-oProxyCommand=x' is no host"),
        (["--within", "-1"], "is not a time"),
    ]:
        assert run(["doctor", *arguments]) == 2, arguments
        assert message in capsys.readouterr().err


def test_two_ends_measure(place: Place) -> None:
    _, block, shown = claimed(__file__)
    assert block.text == "collectived doctor --serve 10.0.0.2:7459\ncollectived doctor --to 10.0.0.2:7459\n"
    server = place.run_in_background([*COMMAND, "doctor", "--serve", "127.0.0.1:0", "--within", "60"])
    assert server.stdout is not None
    said = [server.stdout.readline() for _ in range(3)]
    address = said[1].split()[-1]
    token = said[2].split()[-1]
    assert said[1].startswith("    collectived doctor --to 127.0.0.1:")
    wrong = doctor(place, "--to", address, said="no such token\n")
    assert wrong.returncode == 1 and "another token" in wrong.stdout
    done = doctor(place, "--to", address, said=f"{token}\n")
    assert done.returncode == 0, done.stdout + done.stderr
    for check in PAIRWISE_CHECKS:
        assert re.search(rf"^(OK|WARNING) +{check}  ", done.stdout, re.MULTILINE), done.stdout
    found = done.stdout.replace(os.uname().nodename, "vm").replace(" ahead of that of", " behind that of").splitlines()
    for line, real in zip(shown.text.splitlines(), found, strict=False):
        assert shape(line) == shape(real) or real.startswith("WARNING"), real
    rest, errors = server.communicate(timeout=PATIENCE)
    assert server.returncode == 0 and "measured with" in rest and errors == ""
    gone = doctor(place, "--to", address, said=f"{token}\n")
    assert gone.returncode == 1 and "Connection refused" in gone.stdout


def shape(line: str) -> str:
    """Without figures, and the words that depend on them."""
    return plain(re.sub(r"[KMG]B/s|(behind|ahead of) ours", "…", line))


def test_a_token_must_be_given(place: Place) -> None:
    done = doctor(place, "--to", "127.0.0.1:1")
    assert done.returncode == 2 and "COLLECTIVED_DOCTOR_TOKEN" in done.stderr


def test_nobody_comes_to_a_server(place: Place) -> None:
    done = doctor(place, "--serve", "--within", "0.1")
    assert done.returncode == 1 and "no caller with the token came" in done.stderr


def test_an_address_that_is_not_ours(place: Place) -> None:
    done = doctor(place, "--serve", "192.0.2.250:0")
    assert done.returncode == 1 and "cannot listen at 192.0.2.250:0" in done.stderr


class TestLines:
    FINDINGS = (
        ok("python", "3.12"),
        warning("memory", "little", "end something"),
        failure("kernel", "old", "renew it"),
    )

    def test_of_one_host(self) -> None:
        assert list(report.format_lines(self.FINDINGS))[1:] == [
            "\x1b[33mWARNING\x1b[0m  memory         little",
            "                        → end something",
            "\x1b[31mFAILURE\x1b[0m  kernel         old",
            "                        → renew it",
        ]
        assert report.summary(self.FINDINGS) == "1 OK, 1 warning, 1 failure"

    def test_what_is_well_on_another_host_is_one_line(self) -> None:
        other = [Finding(check, Grade.OK, "fine", host="b") for check in ("python", "memory", "reach")]
        shown = list(report.format_lines([*self.FINDINGS[:1], *other], several=True))
        assert [click.unstyle(line)[7:].split() for line in shown] == [
            ["python", "this", "host:", "3.12"],
            ["2", "checks", "b:", "well"],
            ["reach", "b:", "fine"],
        ]


class TestLaunch:
    def test_says_what_is_broken_when_a_daemon_does_not_come_up(self, place: Place) -> None:
        """After its last words. With so few descriptors it cannot."""
        line = ["bash", "-c", 'ulimit -n 16; exec "$@"', "-", *COMMAND, "launch", "--", "true"]
        done = subprocess.run(line, env=place.environment, text=True, capture_output=True, timeout=45)
        assert done.returncode == 1
        told = [line for line in done.stderr.splitlines() if "can serve, " not in line]  # of a busy machine
        why, found, finding, remedy = told
        assert "Too many open files" in why
        assert found == "collectived: `collectived doctor` finds on this host:"
        assert finding.startswith("FAILURE  descriptors    only 16 files") and "nofile" in remedy

    def test_says_nothing_more_where_nothing_is_broken(self, place: Place) -> None:
        done = place.drive("true", fault="refuse")
        assert done.returncode == 1 and "ended before it was ready" in done.stderr
        assert "doctor" not in done.stderr

    def test_goes_on_where_doctor_himself_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from collectived_launcher.doctor import collect

        def broken() -> list[Finding]:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(collect, "find_startup_failures", broken)
        said: list[str] = []
        report_failures(said.append)
        assert said == ["collectived: doctor could not look at this host: [Errno 24] Too many open files"]


class TestPage:
    PAGE = ROOT / "docs" / "operate" / "doctor.md"

    def test_lists_every_check_in_their_order_and_no_other(self) -> None:
        rows = re.findall(r"^\| `([a-z ]+)` \|", self.PAGE.read_text(), re.MULTILINE)
        assert rows == [check.name for check in CHECKS] + list(PAIRWISE_CHECKS)

    def test_names_the_figures_that_are_judged_by(self) -> None:
        from collectived_launcher.doctor.rules import network, system

        text = self.PAGE.read_text()
        for figure in (
            f"{system.FEW_DESCRIPTORS} or more",
            f"fewer than {system.TOO_FEW_DESCRIPTORS}",
            f"{system.FEW_TASKS} or more",
            f"fewer than {system.TOO_FEW_TASKS}",
            f"{system.LITTLE_MEMORY >> 30} GiB",
            f"{system.TOO_LITTLE_MEMORY >> 20} MiB",
            f"{network.SLOW_LINK / 1e6:.0f} MB/s",
            f"{network.SLOW_ROUND_TRIP * 1e3:.0f} ms",
            f"{network.MAX_SKEW_SECONDS * 1e3:.0f} ms",
        ):
            assert figure in text, figure

    def test_shows_lines_as_they_are_printed(self) -> None:
        block, _, _ = claimed(__file__)
        shown = [line[9:22].strip() for line in block.text.splitlines() if re.match(r"OK|WARNING|FAILURE", line)]
        assert shown == [check.name for check in CHECKS]


def test_the_variables_of_this_test_run_are_not_in_the_way(place: Place) -> None:
    assert "COLLECTIVED_WORKER" not in place.environment and os.environ is not place.environment
