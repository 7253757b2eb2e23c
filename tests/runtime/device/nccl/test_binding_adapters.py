"""The three bindings of NCCL, each through its adapter, over a libnccl of our own that answers as it is told to."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.libnccl import build, compiler
from tests.runtime.device.nccl.adapter_conformance import FACTS

from collectived_runtime.device.nccl.binding import BINDINGS

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("no C compiler here, and the libnccl of these tests is built by one")
    return build(tmp_path_factory.mktemp("nccl"))


@functools.cache
def tried(name: str, library: Path) -> dict[str, str]:
    """What came of every fact on this binding."""
    command = [sys.executable, "-m", "tests.runtime.device.nccl.run_adapter_conformance", name, str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("title", FACTS)
@pytest.mark.parametrize("name", BINDINGS)
def test_a_binding_behind_its_adapter(name: str, title: str, library: Path) -> None:
    found = tried(name, library)
    if "missing" in found:
        pytest.skip(f"{found['missing']}; `make test-nccl` installs it")
    assert not found[title], found[title]
