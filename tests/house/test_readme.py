"""What README.md promises a new user, done for real: these tests start daemons."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.blocks import claimed, of_language

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    """The README's only block in this language."""
    (found,) = of_language(claimed(__file__, "README.md"), language)
    return found


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """A user's environment: our commands on the path, a runtime directory of their own, which is empty afterwards."""
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        yield {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": folder, "COLUMNS": "160"}
        assert os.listdir(folder) == []


def test_the_program_prints_what_is_printed_there(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "mean.py").write_text(block("python"))
    line = block("sh")
    done = subprocess.run(
        line.split(), cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    opening, *ranks = done.stdout.splitlines()
    assert [opening, *sorted(ranks)] == block("text").splitlines()
    assert not unexpected(done.stderr)


def test_it_fits_on_few_screens() -> None:
    assert len(README.splitlines()) <= 120


def test_it_has_the_commands_that_a_newcomer_types_first() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for verb in ("demo", "test"):
        assert f"`make {verb}`" in README and re.search(rf"^{verb}:", makefile, re.MULTILINE)


def test_pytorch_programs_change_the_word_that_the_torch_tests_use() -> None:
    (line,) = re.findall(r"`torch\.distributed\.(init_process_group\([^`]*\))`", README)
    programs = "".join(path.read_text() for path in (ROOT / "tests/e2e/torch").glob("*.py"))
    assert line in programs


def unexpected(said: str) -> list[str]:
    """What is on standard error beyond what a slow machine adds: a rank was late for a second, a daemon for ten."""
    slow = re.compile(r"has (been waiting|waited) for \d|^collectived: waiting until .* can serve, \d+ of \d+ s$")
    return [line for line in said.splitlines() if not slow.search(line)]


@pytest.mark.timeout(300)
def test_the_demo(environment: dict[str, str]) -> None:
    (line,) = re.findall(r"collectived launch .*train_digits\.py", (ROOT / "Makefile").read_text())
    done = subprocess.run(
        line.split(), cwd=ROOT, env=environment, text=True, capture_output=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    for fact in (
        r"test accuracy 0\.9[3-9]",
        "same bits on 4 of 4 ranks",
        "after 100 steps",
        r"#200 +all_reduce\(mean\)",
    ):
        assert re.search(fact, done.stdout), (fact, done.stdout)
    assert not unexpected(done.stderr)
