"""A process that crashes amid the tests costs one of them, and the run still ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICK = "def test_it() -> None: pass\n"
CRASHES = """
import os
import signal
from pathlib import Path

def test_before() -> None: pass

def test_crash() -> None:
    crashed = Path(__file__).with_name("crashed")
    if not crashed.exists():
        crashed.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def test_after() -> None: pass
"""


def test_the_run_ends_though_a_process_crashes_that_has_completed_files(tmp_path: Path) -> None:
    files = 20
    for number in range(files):
        (tmp_path / f"test_{number:02}.py").write_text(CRASHES if number == files - 4 else QUICK)
    options = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--import-mode", "importlib"]
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "tests.file_scheduling", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert f"1 failed, {files + 2} passed" in done.stdout, done.stdout + done.stderr
    assert "crashed while running" in done.stdout
