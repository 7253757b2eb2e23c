"""Deaths at random moments, in a short form; `make drills` has the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_survivors_of_kills_stops_and_aborts_agree() -> None:
    """In a process of its own, which forks ranks and has no other threads."""
    drill = subprocess.run(
        [sys.executable, "-m", "tests.native.kill_drill", "--rounds", "16", "--seed", "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=58,
    )
    assert drill.returncode == 0, drill.stdout + drill.stderr
    assert ": 0 bad;" in drill.stdout
