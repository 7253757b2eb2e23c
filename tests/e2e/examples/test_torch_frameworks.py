"""The examples for Lightning and Accelerate, run for real where these are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_it_trains_over_collectived(framework: str) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed: make test-torch")
    program = [sys.executable, str(ROOT / f"examples/train_{framework}.py")]
    command = [sys.executable, "-m", "collectived_launcher", "launch", "--clients", "2", "--", *program]
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("backend collectived, 2 ranks, weight 2.000", done.stdout)) == 2, done.stdout
