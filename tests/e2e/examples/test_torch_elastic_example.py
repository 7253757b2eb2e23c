"""`examples/torch_elastic.py` run for real: a rank is killed, the others go on, and it comes back."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[3]
LAUNCH = [sys.executable, "-m", "collectived_launcher", "launch", "--clients", "2", "--max-restarts", "1", "--"]
EXAMPLE = str(ROOT / "examples/torch_elastic.py")
PROGRAM = [sys.executable, EXAMPLE, "1000000000"]
DYING = f"""
import os, runpy, sys
import torch.distributed as dist

init = dist.init_process_group

def die_as_first_rank(*args, rank, world_size, **more):
    if rank == 0 and world_size == 2 and os.environ.get("COLLECTIVED_RESTART", "0") == "0":
        os.kill(os.getpid(), 9)
    init(*args, rank=rank, world_size=world_size, **more)

dist.init_process_group = die_as_first_rank
sys.argv = [{EXAMPLE!r}, "1000000000"]
runpy.run_path({EXAMPLE!r}, run_name="__main__")
"""


@contextlib.contextmanager
def launched(program: list[str]) -> Iterator[subprocess.Popen[str]]:
    with (
        tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder,
        subprocess.Popen(
            [*LAUNCH, *program],
            env={**os.environ, "XDG_RUNTIME_DIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as job,
    ):
        try:
            yield job
        finally:
            job.terminate()


def test_a_rank_that_dies_while_process_groups_are_made_is_let_in_again() -> None:
    """Its store dies with it, of which PyTorch says something else than of a backend."""
    with launched([sys.executable, "-c", DYING]) as job:
        hear(job, r"of 2 from step", 2)
        hear(job, r"after step \d+: ")
        hear(job, r"of 2 from step", 2)
        end_alike(job)


def test_a_killed_rank_is_named_and_let_in_again_and_all_end_alike() -> None:
    with launched(PROGRAM) as job:
        hear(job, r"of 2 from step", 2)
        victim = find_ranks(job.pid)[0]
        os.kill(victim, 9)
        hear(job, rf"after step \d+: .*pid {victim}\b.*is lost")
        steps = {found[1] for found in hear(job, r"of 2 from step (\d+)", 2)}
        assert len(steps) == 1
        end_alike(job)


def hear(job: subprocess.Popen[str], pattern: str, times: int = 1) -> list[re.Match[str]]:
    """Reads until it has said this so often."""
    assert job.stdout is not None
    found: list[re.Match[str]] = []
    said = []
    for line in job.stdout:
        said.append(line)
        if match := re.search(pattern, line):
            found.append(match)
            if len(found) == times:
                return found
    raise AssertionError(f"it said {pattern!r} {len(found)} times: {''.join(said)}")


def end_alike(job: subprocess.Popen[str]) -> None:
    for rank in find_ranks(job.pid):
        os.kill(rank, 15)
    assert len({found[0] for found in hear(job, r"ended after step .*", 2)}) == 1


def find_ranks(launcher: int) -> list[int]:
    """The processes of the program."""
    children: Any = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(one) for one in children if "torch_elastic.py" in Path(f"/proc/{one}/cmdline").read_text()]
