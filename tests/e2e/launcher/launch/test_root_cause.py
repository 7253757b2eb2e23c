"""The summary of `launch` begins with the rank that failed by itself, though others end before it."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

PYTHON = (sys.executable, "-c")
BEGIN = """
import atexit, os, sys, time
import numpy as np
import collectived as cd
rank = int(os.environ["RANK"])
wait = lambda: time.sleep(1.5)  # the guilty one takes its time to end
"""
RAISES = """
with cd.connect() as session, session.join() as group:
    for step in range(3):
        group.all_reduce("sum", np.ones(4))
        if rank == 2 and step == 1:
            atexit.register(wait)
            raise ValueError("loss is NaN")
"""
DIFFERS = """
if rank == 2:
    atexit.register(wait)
with cd.connect() as session, session.join() as group:
    group.barrier()
    if rank == 2:
        time.sleep(0.3)  # of the first two that come and differ nobody knows which one does
    group.all_reduce("sum", np.ones(4 + (rank == 2)))
"""
HANGS = """
with cd.connect() as session, session.join() as group:
    if rank == 2:
        time.sleep(100)
    group.all_reduce("sum", np.ones(4), options=cd.CommunicationOptions(timeout_seconds=0.5))
"""


_done: dict[str, subprocess.CompletedProcess[str]] = {}  # two tests look at what some jobs print


def drive(place: Any, script: str) -> subprocess.CompletedProcess[str]:
    """A job whose four ranks run this script; one job for each script."""
    if script not in _done:
        _done[script] = place.drive(*PYTHON, BEGIN + script, real=True, workers=2, clients=2, grace=3)
    return _done[script]


def summary(place: Any, script: str) -> list[str]:
    done = drive(place, script)
    assert done.returncode == 1
    found = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    begin = next(number for number, line in enumerate(found) if "root cause" in line or "first failure" in line)
    return found[begin:]


@pytest.mark.parametrize("shell", [False, True], ids=["python", "shell"])
def test_the_rank_that_raised_is_the_root_cause(place: Any, shell: bool) -> None:
    script = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {BEGIN + RAISES!r}]))"
    said = summary(place, RAISES) if not shell else summary(place, f"\n{script}")
    assert re.fullmatch(
        r"collectived: root cause: rank 2 \(pid \d+\): exit status 1: ValueError: loss is NaN \(<string>:\d+\)", said[0]
    )
    assert said[1] == "    Traceback (most recent call last):" and "    ValueError: loss is NaN" in said
    assert said[-1] == "collectived: failed in consequence: ranks 0, 1, 3: exit status 1"


def test_a_rank_whose_contract_differs_is_the_root_cause(place: Any) -> None:
    said = summary(place, DIFFERS)
    assert re.match(r"collectived: root cause: rank 2 \(pid \d+\): exit status 1: InvalidArgumentError: ", said[0])
    assert said[-1] == "collectived: failed in consequence: ranks 0, 1, 3: exit status 1"


def test_a_rank_that_hangs_is_the_root_cause_though_the_launcher_has_to_end_it(place: Any) -> None:
    said = summary(place, HANGS)
    cause = r"all_reduce\(sum\) #0 of group 'world' did not complete within 0.5 s: rank 2 "
    assert re.match(rf"collectived: root cause: rank 2 \(pid \d+\): {cause}", said[0])
    assert said[0].endswith("; its end: killed by signal 15 (SIGTERM), after the launcher had sent SIGTERM")
    assert said[-1] == "collectived: failed in consequence: ranks 0, 1, 3: exit status 1"


STALLS = """
with cd.connect() as session, session.join() as group:
    group.barrier()
    if rank == 2:
        time.sleep(100)
    group.all_reduce("sum", np.ones(4), timeout=1.5)
"""
DIES = """
with cd.connect() as session, session.join() as group:
    if rank == 2:
        os.kill(os.getpid(), 9)
    group.all_reduce("sum", np.ones(4))
"""
KILLS_ITS_WORKER = """
import socket, struct
with cd.connect() as session, session.join() as group:
    group.barrier()
    if rank == 2:
        told = session._transport.socket.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        os.kill(struct.unpack("3i", told)[0], 9)
    group.all_reduce("sum", np.ones(4))
    group.all_reduce("sum", np.ones(4))
"""
KILLS_THE_COORDINATOR = """
def is_coordinator(pid):
    try:
        parent = open(f"/proc/{pid}/stat").read().rpartition(") ")[2].split()[1]
        return int(parent) == os.getppid() and "coordinator" in open(f"/proc/{pid}/cmdline").read().split("\\0")
    except OSError:
        return False
with cd.connect() as session, session.join() as group:
    group.barrier()
    if rank == 2:
        (found,) = filter(is_coordinator, filter(str.isdigit, os.listdir("/proc")))
        os.kill(int(found), 9)
    group.rejoin()
    assert group.all_reduce("sum", np.ones(4))[0] == 4
"""
JOINS_LATER = """
with cd.connect() as session:
    with session.join() as group:
        group.barrier()
    if rank == 2:
        time.sleep(1)
"""
JOINS_ANOTHER_SIZE = f"""{JOINS_LATER}
    if rank < 3:
        session.join("g", 4 if rank == 2 else 3, rank=rank, timeout=3)
"""
JOINS_AS_ANOTHER = f"""{JOINS_LATER}
    if rank < 3:
        session.join("g", 3, rank=rank % 2, timeout=3)
"""
JOINS_IN_VAIN = """
with cd.connect() as session:
    if rank < 3:
        session.join("g", 4, rank=rank, timeout=1)
"""
BY_ALL = ["root cause", "rank 0", "rank 1", "rank 2", "rank 3"]
# Keys and generations, devices in full, ends of lines that are none; words of the inside, and of gRPC's.
INNER = r"\d{19}|/job:|device:|\\n|doorbell|\blanes?\b|incarnation|recvmsg|Stream removed|last error"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            STALLS,
            {
                "rank 2 (host": ["coordinator", "root cause", "rank 0", "rank 1", "rank 3"],  # it waits, after 1 s
                "did not complete within": ["root cause", "rank 0", "rank 1", "rank 3"],
            },
        ),
        (DIES, {"is lost: ": ["root cause", "rank 0", "rank 1", "rank 3"]}),
        (RAISES, {"ValueError: loss is NaN": [*BY_ALL, ""]}),
        (DIFFERS, {"rank 2 differs: ": [*BY_ALL, ""]}),
        (
            KILLS_ITS_WORKER,
            {
                "died: killed by signal 9": [""],  # by the launcher
                "worker 1 (at unix:": ["root cause", "rank 2", "rank 3", ""],
                "), rank 3 (host": ["rank 0", "rank 1"],
            },
        ),
        (KILLS_THE_COORDINATOR, {"died: killed by signal 9": [""]}),  # whose workers have nothing to add
        (
            JOINS_ANOTHER_SIZE,
            {
                "size 4 was asked for, but size 3 by": ["root cause", "rank 2", ""],
                ": it asked for size 4": ["rank 0", "rank 1"],
            },
        ),
        (
            JOINS_AS_ANOTHER,
            {
                "rank 0 of group 'g' is taken by host": ["root cause", "rank 2", ""],
                ": it asked for rank 0, which is taken": ["rank 0", "rank 1"],
            },
        ),
        (JOINS_IN_VAIN, {"was not complete within 1 s": ["root cause", "rank 0", "rank 1", "rank 2", ""]}),
    ],
)
def test_a_failure_is_told_once_by_each_rank_and_once_at_the_end(
    place: Any, script: str, told: dict[str, list[str]]
) -> None:
    """And once more, by nobody, in the traceback that stands below the root cause."""
    done = drive(place, script)
    said = done.stdout + done.stderr
    for text, told_by in told.items():
        voices = [
            re.match(r"\[(\w+(?: \d)?)\]|collectived: (root cause)|", line).expand(r"\1\2")  # type: ignore[union-attr]
            for line in said.splitlines()
            if text in line
        ]
        assert sorted(voices) == sorted(told_by), said
    assert not re.search(INNER, said), said
    assert "[worker" not in said
