"""How a daemon starts: what it imports costs it no more than it must, then and later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOOK = """
import gc, os, sys
from collectived_runtime.__main__ import main

async def look(settings, lifeline):
    print(gc.isenabled(), gc.get_freeze_count() > 10_000, len(os.listdir("/proc/self/task")))

place = ["--folder", sys.argv[1], "--coordinator", "unix:/c.sock"]
main(["worker", "--config", "none", "--task", "0", *place], serve_worker=look)
"""


def test_what_it_imports_is_not_looked_through_for_garbage_and_has_no_threads(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOOK, str(tmp_path)]
    said = subprocess.run(command, env={}, capture_output=True, text=True, timeout=30)
    assert said.stdout.split() == ["True", "True", "1"], said
