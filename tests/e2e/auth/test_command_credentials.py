"""`status`, `top`, `trace` and `drain` show a credential where one is needed, and take none from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import pytest

from collectived.testing.daemon import Daemon
from collectived_launcher.credential import find_credential
from collectived_proto.viewing_token import viewing_token

SECRET = "the-secret-of-these-tests"
Command = Callable[..., "subprocess.CompletedProcess[str]"]
TCP, LOCAL = "h:7451", "unix:/run/w"


@pytest.fixture
def worker() -> Iterator[str]:
    """A worker's address over TCP."""
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder, ExitStack() as running:
        coordinator = Daemon(["coordinator", "--listen", f"unix:{folder}/c", "--job", "t"], SECRET)
        running.callback(coordinator.close)
        there = str(coordinator.wait_ready(30)["address"])
        words = ("--task", "0", "--folder", folder, "--coordinator", there, "--listen", "127.0.0.1:0", "--job", "t")
        daemon = Daemon(["worker", *words], SECRET)
        running.callback(daemon.close)
        yield str(daemon.wait_ready(30)["addresses"][-1])


def collectived(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("COLLECTIVED")}
    return subprocess.run(
        [sys.executable, "-m", "collectived_launcher", *words],
        env={**ours, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def written(path: Path, text: str) -> str:
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.timeout(150)
def test_over_tcp_looking_needs_a_credential_and_draining_the_secret(worker: str, tmp_path: Path) -> None:
    token, secret = written(tmp_path / "token", viewing_token(SECRET)), written(tmp_path / "secret", SECRET)
    for words in (("status",), ("trace", "--output", str(tmp_path / "t.json"))):
        refused = collectived(*words, "--worker", worker)
        assert refused.returncode and "COLLECTIVED_SECRET_FILE, or COLLECTIVED_VIEWING_TOKEN_FILE to" in refused.stderr
        looked = collectived(*words, "--worker", worker, COLLECTIVED_VIEWING_TOKEN_FILE=token)
        assert not looked.returncode, looked.stderr
        shown = collectived(*words, "--worker", worker, COLLECTIVED_SECRET_FILE=secret)
        assert not shown.returncode and SECRET not in shown.stdout + shown.stderr
    for variables, says in (({}, "needs the job's secret"), ({"COLLECTIVED_SECRET": viewing_token(SECRET)}, "looking")):
        refused = collectived("drain", "--worker", worker, **variables)
        assert refused.returncode and says in refused.stderr and "set COLLECTIVED_SECRET_FILE" in refused.stderr
    drained = collectived("drain", "--worker", worker, COLLECTIVED_SECRET=SECRET)
    assert not drained.returncode, drained.stderr


def test_the_secret_goes_over_the_viewing_token_and_a_file_over_a_variable(tmp_path: Path) -> None:
    environment = {"COLLECTIVED_VIEWING_TOKEN_FILE": written(tmp_path / "v", "v-token")}
    assert find_credential(environment, TCP) == find_credential(environment, LOCAL) == "v-token"
    environment["COLLECTIVED_SECRET"] = "the-variable"
    assert find_credential(environment, TCP) == "the-variable"
    environment["COLLECTIVED_SECRET_FILE"] = written(tmp_path / "s", "the-file")
    assert find_credential(environment, TCP) == "the-file"
    assert find_credential({}, TCP) == find_credential({"COLLECTIVED_SECRET": ""}, LOCAL) == ""


@pytest.mark.parametrize("text", [None, "", "two\nlines", "Ж"])
def test_a_file_that_cannot_be_used_is_an_error_where_a_credential_is_needed(tmp_path: Path, text: str | None) -> None:
    path = str(tmp_path / "s") if text is None else written(tmp_path / "s", text)
    for variable in ("COLLECTIVED_SECRET_FILE", "COLLECTIVED_VIEWING_TOKEN_FILE"):
        with pytest.raises(click.UsageError, match=f"{variable}='{path}' ") as refused:
            find_credential({variable: path}, TCP)
        assert not text or text not in refused.value.message
        if text is None:
            assert find_credential({variable: path}, LOCAL) == "", "most need none there"
        else:
            with pytest.raises(click.UsageError, match="holds no secret or token"):
                find_credential({variable: path}, LOCAL)


def test_a_file_that_everybody_may_read_is_an_error_everywhere(tmp_path: Path) -> None:
    path = Path(written(tmp_path / "s", SECRET))
    path.chmod(0o644)
    for variable in ("COLLECTIVED_SECRET_FILE", "COLLECTIVED_VIEWING_TOKEN_FILE"):
        for address in (TCP, LOCAL):
            with pytest.raises(click.UsageError, match=f"{variable}='{path}' has mode 0644, .* chmod 600"):
                find_credential({variable: str(path)}, address)
    path.chmod(0o640)
    assert find_credential({"COLLECTIVED_SECRET_FILE": str(path)}, TCP) == SECRET


def test_no_command_takes_a_secret_or_a_token_as_an_argument() -> None:
    from collectived_launcher.__main__ import collectived as command
    from collectived_proto.config.daemons import DAEMONS
    from collectived_proto.config.settings import list_settings

    options = {
        option
        for verb in command.commands.values()
        for parameter in verb.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    } | {flag for settings in DAEMONS.values() for key in list_settings(settings) for flag in key.flags}
    named = {option for option in options if "secret" in option or "token" in option}
    assert {option for option in named if not option.endswith("-file")} == set()
