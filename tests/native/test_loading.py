"""Which core is loaded, and what is said where none can be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import collectived_native
from collectived_native import core
from collectived_native.loading import BESIDE, NAME, load_core
from collectived_native.sources import digest_sources

PACKAGE = Path(collectived_native.__file__).parent
LOADED = Path(os.environ.get("COLLECTIVED_NATIVE") or BESIDE)


def import_copy(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Import the copy of the package that lies in `folder`, in a process of its own."""
    program = "import collectived_native as n; print(n.core.__file__, n.core.source_digest)"
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(folder), "COLLECTIVED_NATIVE": ""} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(PACKAGE, tmp_path / "collectived_native", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy2(LOADED, tmp_path / "collectived_native" / BESIDE.name)
    return tmp_path


def test_a_core_says_of_which_sources_it_was_built() -> None:
    assert core.source_digest == digest_sources()


def test_the_core_beside_the_package_is_loaded(copy: Path) -> None:
    ended = import_copy(copy)
    assert ended.stdout.split() == [str(copy / "collectived_native" / BESIDE.name), core.source_digest]


@pytest.mark.parametrize("file", ["arithmetic.c", "stable_abi.h"])
def test_a_core_that_is_older_than_its_sources_is_refused(copy: Path, file: str) -> None:
    with (copy / "collectived_native" / "src" / file).open("a") as source:
        source.write("/* changed */\n")
    ended = import_copy(copy)
    assert ended.returncode == 1
    assert "ImportError" in ended.stderr and "run `make native`" in ended.stderr.splitlines()[-1]


def test_in_a_wheel_there_are_no_sources_to_compare_with(copy: Path) -> None:
    shutil.rmtree(copy / "collectived_native" / "src")
    assert import_copy(copy).stdout.split()[1] == core.source_digest


def test_where_there_is_no_core_it_is_said_what_to_do(copy: Path) -> None:
    (copy / "collectived_native" / BESIDE.name).unlink()
    assert "run `make native`" in import_copy(copy).stderr.splitlines()[-1]
    shutil.rmtree(copy / "collectived_native" / "src")
    assert "install collectived again" in import_copy(copy).stderr.splitlines()[-1]


def test_another_core_can_be_named(copy: Path) -> None:
    elsewhere = copy / "elsewhere.so"
    (copy / "collectived_native" / BESIDE.name).rename(elsewhere)
    assert import_copy(copy, COLLECTIVED_NATIVE=str(elsewhere)).stdout.split()[0] == str(elsewhere)
    missing = import_copy(copy, COLLECTIVED_NATIVE="/nowhere/core.so")
    assert "is not at /nowhere/core.so" in missing.stderr.splitlines()[-1]


def test_a_core_that_cannot_be_looked_at_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVED_NATIVE", "/" + 5000 * "x")  # as a folder that this user may not enter
    assert load_core() is core, "one that is loaded stays"
    monkeypatch.delitem(sys.modules, NAME)
    with pytest.raises(ImportError, match="the native core of collectived cannot be read"):
        load_core()


def test_elsewhere_than_on_linux_it_is_said_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ImportError, match="needs Linux, not darwin: use a session over gRPC"):
        load_core()


def test_a_free_threaded_python_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    with pytest.raises(ImportError, match="does not support free-threaded builds of Python"):
        load_core()
