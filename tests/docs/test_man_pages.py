"""There is a man page for each command, made of its help, and `man` shows it without a warning."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from tests.docs.man_pages import FOLDER, RELATED, escape, fresh

from collectived_launcher.__main__ import collectived as command

PAGES = fresh()


def test_the_pages_are_those_of_the_commands() -> None:
    kept = {path.name: path.read_text() for path in FOLDER.glob("*")}
    assert kept == PAGES, "run `make docs` and commit the result"
    assert set(PAGES) == {"collectived.1", *(f"collectived-{verb}.1" for verb in command.commands)}


@pytest.mark.parametrize("name", PAGES)
def test_man_shows_it_without_a_warning(name: str) -> None:
    if shutil.which("man") is None or shutil.which("groff") is None:
        pytest.skip("man and groff are not installed (apt-get install man-db groff)")
    shown = subprocess.run(
        ["man", "--warnings", "--local-file", str(FOLDER / name)],
        capture_output=True,
        text=True,
        env={"MANWIDTH": "100", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
    )
    assert shown.returncode == 0 and not shown.stderr, shown.stderr
    assert "SYNOPSIS" in shown.stdout and "DESCRIPTION" in shown.stdout


@pytest.mark.parametrize("name", PAGES)
def test_it_names_other_pages_and_no_file_of_the_repository(name: str) -> None:
    seen = re.findall(r"^\.BR (\S+) \(1\)", PAGES[name].partition(".SH SEE ALSO")[2], re.MULTILINE)
    others = [other.replace("\\-", "-") + ".1" for other in seen]
    assert others and name not in others and set(others) <= set(PAGES)
    assert not re.search(r"docs/|\.md\b", PAGES[name])


def test_every_command_has_its_relations() -> None:
    assert set(RELATED) == set(command.commands)


def test_no_text_begins_a_request() -> None:
    assert escape(".x") == "\\&.x" and escape("'--a\\") == "\\(aq\\-\\-a\\e"
