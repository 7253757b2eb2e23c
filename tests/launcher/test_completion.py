"""What `collectived completion` prints and writes, and what the script completes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from collectived_launcher.__main__ import collectived
from collectived_launcher.completion import SHELLS, find_file, find_shell

COMMANDS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def ask(words: str, current: str) -> set[str]:
    """What bash is told to offer behind some words."""
    typed = {"_COLLECTIVED_COMPLETE": "bash_complete", "COMP_WORDS": f"{words} {current}".strip()}
    typed["COMP_CWORD"] = str(len(words.split()))
    done = subprocess.run(
        ["collectived"], env=os.environ | typed | {"PATH": COMMANDS}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return {line.partition(",")[2] for line in done.stdout.splitlines()}


def test_commands_are_completed() -> None:
    assert ask("collectived", "st") == {"status"}
    assert {"launch", "worker", "completion"} <= ask("collectived", "")


@pytest.mark.parametrize(
    ("words", "current", "offered"),
    [
        ("collectived launch", "--work", "--workers"),
        ("collectived launch --hosts a", "--work", "--workers"),
        ("collectived worker", "--link-l", "--link-listen"),
        ("collectived coordinator", "--jour", "--journal"),
        ("collectived completion", "z", "zsh"),
    ],
)
def test_options_are_completed_also_of_daemons(words: str, current: str, offered: str) -> None:
    assert offered in ask(words, current)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_written_where_the_shell_looks(shell: str, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": ""}
    done = CliRunner().invoke(collectived, ["completion", shell, "--install"], env=environment)
    assert done.exit_code == 0, done.output
    path = find_file(shell, environment)
    assert str(path) in done.output and path.is_relative_to(tmp_path)
    assert path.read_text() == CliRunner().invoke(collectived, ["completion", shell]).output.removesuffix("\n")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_the_script(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(CliRunner().invoke(collectived, ["completion", shell]).output)
    check = [program, "--no-execute" if shell == "fish" else "-n", str(script)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bash_offers_commands_once_it_has_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(CliRunner().invoke(collectived, ["completion", "bash"]).output)
    function = "$(complete -p collectived | sed 's/.*-F //; s/ .*//')"
    typed = f"source {script}; COMP_WORDS=(collectived st); COMP_CWORD=1; {function} collectived; "
    done = subprocess.run(
        ["bash", "-c", typed + 'echo "${COMPREPLY[@]}"'],
        env=os.environ | {"PATH": COMMANDS},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "status", done.stderr


def test_without_a_known_shell_it_says_what_to_type() -> None:
    assert find_shell({"SHELL": "/usr/bin/zsh"}) == "zsh"
    with pytest.raises(click.UsageError, match=r"SHELL is '/bin/tcsh'; name one of bash, zsh, fish"):
        find_shell({"SHELL": "/bin/tcsh"})
    with pytest.raises(click.UsageError, match="SHELL is not set"):
        find_shell({})
