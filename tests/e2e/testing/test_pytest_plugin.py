"""The pytest plugin, in a pytest of its own as users run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.blocks import claimed

USERS_TEST = """
import sys
def test_light():
    assert "grpc" not in sys.modules and "numpy" not in sys.modules

def test_sum(collectived_job):
    assert len(collectived_job.workers) == {workers}
    assert collectived_job.run(lambda group: group.all_reduce("sum", 1), ranks=3) == [3, 3, 3]
"""


TRAIN = """
import numpy as np

def train(group):
    return group.all_reduce("mean", np.arange(3.0) * group.rank)
"""
TRAINS_ALONE = """
import sys
import collectived as cd
assert sys.argv[1:] == ["--epochs", "1"]
with cd.connect() as session, session.join() as group:
    assert group.all_reduce("sum", 1) == 2
"""


def pytest_of(folder: Path, *options: str, within: float = 50) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=within, check=False)


def test_the_fixture_is_there_without_a_word_in_conftest(tmp_path: Path) -> None:
    (tmp_path / "test_users.py").write_text(USERS_TEST.format(workers=2))
    ended = pytest_of(tmp_path)
    assert "2 passed" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.timeout(180)
def test_the_tests_of_the_page_pass(tmp_path: Path) -> None:
    blocks = [block.text for block in claimed(__file__)]
    (tmp_path / "test_page.py").write_text(f"import sys\n{TRAIN}\n" + "\n".join(blocks))
    (tmp_path / "pytest.ini").write_text("[pytest]\ncollectived_workers = 1\n")  # fewer are sooner there
    (tmp_path / "train.py").write_text(TRAINS_ALONE)
    ended = pytest_of(tmp_path, within=150)
    assert f"{len(blocks)} passed" in ended.stdout, ended.stdout + ended.stderr


def test_the_number_of_workers_is_configured(tmp_path: Path) -> None:
    (tmp_path / "test_users.py").write_text(USERS_TEST.format(workers=1))
    (tmp_path / "pytest.ini").write_text("[pytest]\ncollectived_workers = 1\n")
    assert "2 passed" in pytest_of(tmp_path).stdout
    (tmp_path / "pytest.ini").write_text("[pytest]\ncollectived_workers = two\n")
    assert "collectived_workers must be a whole number from 1 to 64, it is 'two'" in pytest_of(tmp_path).stdout
