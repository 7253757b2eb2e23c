"""How a daemon starts: what it imports costs it no more than it must, then and later; and that it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOOK = """
import gc, os, sys
from collectived_runtime.__main__ import main

async def look(settings, lifeline):
    print(gc.isenabled(), gc.get_freeze_count() > 10_000, len(os.listdir("/proc/self/task")))
    from collectived_runtime.coordinator import server
    print("prometheus_client" in sys.modules)

place = ["--folder", sys.argv[1], "--coordinator", "unix:/c.sock"]
main(["worker", "--config", "none", "--task", "0", *place], serve_worker=look)
"""


def test_what_it_imports_is_no_more_than_it_needs_not_looked_through_for_garbage_and_has_no_threads(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", LOOK, str(tmp_path)]
    said = subprocess.run(command, env={}, capture_output=True, text=True, timeout=30)
    assert said.stdout.split() == ["True", "True", "1", "False"], said


BUSY = """
import asyncio, sys, threading
from collectived_runtime import __main__ as daemons
from collectived_runtime.worker import server

daemons.END_TIMEOUT = 0.5

def spin():
    while True:
        pass

async def serve(settings, lifeline):
    serving = asyncio.ensure_future(server.serve(settings, lifeline))
    if sys.argv[3] == "event loop":
        await asyncio.sleep(0.2)
        spin()
    threading.Thread(target=spin).start()  # as that of a group loop: the end of the interpreter waits for it
    await serving

place = ["--folder", sys.argv[1], "--coordinator", sys.argv[2]]
daemons.main(["worker", "--config", "none", "--task", "0", "--attached", *place], serve_worker=serve)
"""


@pytest.mark.parametrize("busy", ["event loop", "thread"])
def test_a_worker_whose_parent_is_gone_ends_though_a_loop_of_it_is_kept_busy(tmp_path: Path, busy: str) -> None:
    command = [sys.executable, "-c", BUSY, str(tmp_path), f"unix:{tmp_path}/c.sock", busy]
    with subprocess.Popen(command, env={}, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        try:
            _, said = worker.communicate(f"{'5ec2e7' * 8}\n", timeout=40)  # and the end of its standard input
        finally:
            worker.kill()
    assert worker.returncode == 1 and "standard input has ended, and this daemon did not end within" in said
