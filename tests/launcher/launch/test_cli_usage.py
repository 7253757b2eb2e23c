"""Wrong use is exit status 2, before anything is started, with what was wrong and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectived_launcher.__main__ import run
from collectived_launcher.launch.cli import deal_ranks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch"], "PROGRAM"),
        (["launch", "--", "no-such-program"], "program 'no-such-program' does not exist (not found in PATH)"),
        (["launch", "--", "./no/such"], "program './no/such' does not exist (no such file)"),
        (["launch", "--", "/etc/passwd"], "program '/etc/passwd' cannot be run: expected an executable file"),
        (["launch", "--workers", "0", "--", "true"], "0 is not in the range"),
        (["launch", "--clients", "-1", "--", "true"], "-1 is not in the range"),
        (["launch", "--nproc-per-node", "two", "--", "true"], "'two' is not a valid integer"),
        (["launch", "--nproc_per_node", "0", "--", "true"], "0 is not in the range"),
        (["launch", "-n", "0", "--", "true"], "0 is not in the range"),
        (["launch", "-n", "5", "--workers", "2", "--", "true"], "with --clients 3 instead of -n 5"),
        (["launch", "-np", "5", "--clients", "2", "--", "true"], "with --clients 5 instead of -n 5"),
        (["launch", "-n", "2", "--hosts", "a:2,b:2", "--ssh", "true", "--", "true"], "4 are asked for otherwise on 2"),
        (["run", "--nproc_per_node", "x", "--", "true"], "'x' is not a valid integer"),
        (["run", "-n", "x", "--", "true"], "'x' is not a valid integer"),
        (
            ["launch", "--timeout", "-1", "--", "true"],
            "'-1' is not a time: expected a number of seconds that is not negative",
        ),
        (["launch", "--timeout", "nan", "--", "true"], "'nan' is not a time"),
        (["launch", "--grace", "inf", "--", "true"], "'inf' is not a time"),
        (["launch", "--max-restarts", "-1", "--", "true"], "-1 is not in the range"),
        (["launch", "--daemon-restarts", "-1", "--", "true"], "-1 is not in the range"),
        (["launch", "--log-dir", "/proc/logs", "--", "true"], "--log-dir '/proc/logs' cannot be made"),
        (["launch", "--hosts", "a,a", "--", "true"], "host 'a' is named twice"),
        (["launch", "--hosts", "a", "b", "--", "python", "x y.py"], "\n    --hosts a,b -- python 'x y.py'\n"),
        (["launch", "--hosts", "a:2,", "b:2", "--clients", "2", "--", "true"], "--hosts a:2,b:2 --clients 2 -- true\n"),
        (
            ["launch", "--hosts", "a", ",", "b", "--", "true"],
            "--hosts a is followed by , b: hosts are separated by com",
        ),
        (["run", "--hosts", "a", "b", "c", "--", "true"], "\n    --hosts a,b,c -- true\nor, if 'b' is the program, --"),
        (["launch", "--ssh", "/no/ssh", "--hosts", "a", "--", "b", "--", "true"], "--ssh '/no/ssh': no such program"),
        (["launch", "--ssh", "/no/ssh", "--hosts", "a", "env", "--", "true"], "--ssh '/no/ssh': no such program"),
        (["launch", "--hosts", "a", "--hostfile", "f", "--", "true"], "--hosts and --hostfile both name the hosts"),
        (["launch", "--hosts", "a", "--workers", "2", "--", "true"], "--workers starts workers on this host alone"),
        (["launch", "--hostfile", "/no/such", "--", "true"], "No such file or directory: '/no/such'"),
        (["launch", "--hosts", "a", "--ssh", "/no/ssh", "--", "true"], "--ssh '/no/ssh': no such program"),
        (["launch", "--hosts", "a", "--ssh", "'", "--", "true"], "is no command"),
        (["launch", "--env", "NO_SUCH_VARIABLE", "--", "true"], "--env 'NO_SUCH_VARIABLE': expected NAME=VALUE"),
        *(
            (["launch", option, value, "--", "true"], f"{option} is for other hosts: name them with --hosts")
            for option, value in [
                ("--interface", "eth0"),
                ("--coordinator", "here"),
                ("--python", "python"),
                ("--ssh", "ssh"),
                ("--host-timeout", "30"),
            ]
        ),
        (["launch", "--host-timeout", "0.5", "--", "true"], "'0.5' is too short: expected 1s or more"),
        (["launch", "--no-such-option", "--", "true"], "--no-such-option"),
        (["no-such-command"], "no-such-command"),
        (["status", "--watch", "-1"], "'-1' is not a time"),
        (["status", "--watch", "0"], "'0' is too short: expected 200ms or more"),
        (["top", "--interval", "100ms"], "'100ms' is too short: expected 200ms or more"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "clients", "default", "dealt"),
    [
        (None, None, (2, 1), (2, 1)),
        (4, None, (1,), (4,)),
        (4, None, (1, 1), (2, 2)),
        (4, 2, (2, 2), (2, 2)),
        (3, None, (2, 1), (2, 1)),
    ],
)
def test_ranks_in_all_are_dealt_evenly(
    ranks: int | None, clients: int | None, default: tuple[int, ...], dealt: tuple[int, ...]
) -> None:
    assert deal_ranks(ranks, clients, default) == dealt


def test_a_runtime_directory_that_is_too_long_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert run(["launch", "--", "true"]) == 1
    assert "choose a shorter folder (XDG_RUNTIME_DIR)" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert run(["launch", "--help"]) == 0
    assert run(["--version"]) == 0
    said = capsys.readouterr().out
    assert "--max-restarts" in said and "--daemon-restarts" in said
