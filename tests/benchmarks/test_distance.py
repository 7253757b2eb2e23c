"""Whether two processors are near each other is measured by two processes that end with the one that asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.distance import Distance

ROOT = Path(__file__).parents[2]
TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="of more processors, or one, nothing is measured")

ASKS_AND_SLEEPS = """
import time
from benchmarks.distance import Distance
distance = Distance()
distance.measure()
print(*[process.pid for process in distance._processes], flush=True)
time.sleep(60)
"""


@TWO
@pytest.mark.timeout(60)
def test_a_value_is_handed_over() -> None:
    with Distance() as distance:
        assert distance.is_measured
        assert 0 < distance.least <= 1
        assert 0 < distance.measure() < 1


@TWO
@pytest.mark.timeout(60)
def test_a_wait_says_whether_the_processors_are_near_each_other() -> None:
    with Distance() as distance:
        distance.least = 60.0
        assert distance.wait()
        distance.least = 0.0
        assert not distance.wait()


@TWO
@pytest.mark.timeout(60)
def test_a_process_that_is_gone_is_an_error() -> None:
    with Distance() as distance:
        for process in distance._processes:
            process.kill()
            process.join()
        with pytest.raises((RuntimeError, OSError, EOFError)):
            distance.measure()


@TWO
@pytest.mark.timeout(60)
def test_the_processes_end_with_the_one_that_asks() -> None:
    command = [sys.executable, "-c", ASKS_AND_SLEEPS]
    asking = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    processes = [int(word) for word in asking.stdout.readline().split()]
    assert len(processes) == 2
    asking.send_signal(signal.SIGKILL)
    asking.wait()
    asking.stdout.close()
    while any(is_running(process) for process in processes):
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.timeout(60)
def test_of_other_numbers_of_processors_nothing_is_measured() -> None:
    with Distance(processors=[0]) as distance:
        assert not distance.is_measured
        assert distance.measure() == 0.0
        assert distance.wait() and distance.is_near()
