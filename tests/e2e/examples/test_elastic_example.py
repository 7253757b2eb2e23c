"""`examples/elastic.py` run for real, with kills of ranks and a worker; so is the loop in docs/guide/recovery.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docs.blocks import claimed, of_language
from tests.forked_launch import start_launcher
from tests.forked_process import ForkedProcess
from tests.waiting import settle

from collectived_launcher.status.discovery import find_target, request_status
from collectived_proto.v1.status_pb2 import StatusReply

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/elastic.py"
FOR_EVER = "1000000000"  # steps: it ends when it is told to
PATIENCE = 30.0  # seconds

pytestmark = pytest.mark.timeout(90)


class Process:
    """Something that is started and listened to."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.process: subprocess.Popen[str] | ForkedProcess
        surroundings, pipe = {**os.environ, **environment}, subprocess.PIPE
        if command[0] == "-m":
            self.process = start_launcher([sys.executable, *command], surroundings)
            self.process.stdin.close()  # nobody types anything
        else:
            line = [sys.executable, "-u", *command]
            self.process = subprocess.Popen(line, env=surroundings, stdout=pipe, stderr=pipe, text=True)
        self.said: list[str] = []

    def hear(self, pattern: str) -> re.Match[str]:
        """Reads until it says this."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"it never said {pattern!r}, but {self.said} and {self.process.communicate()[1]}")

    def ended(self) -> list[str]:
        """All that it said, once it has ended."""
        out, err = self.process.communicate(timeout=PATIENCE)
        assert "Traceback" not in err, err
        self.said += out.splitlines()
        return self.said


def find_training(status: StatusReply) -> StatusReply | None:
    """The same, once the ranks have done more than to agree on where they go on."""
    return status if any(group.collectives_done > 20 for group in status.groups) else None


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts processes, of which none outlives the test."""
    started: list[Process] = []

    def one_more(*command: str, **environment: str) -> Process:
        started.append(Process(*command, **environment))
        return started[-1]

    yield one_more
    for one in started:
        with one.process:
            one.process.kill()


@pytest.fixture
def launch(start: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts `collectived launch` in a runtime directory of its own."""
    folder = tempfile.mkdtemp(prefix="cd-", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    for name in ("COLLECTIVED_WORKER", "COLLECTIVED_JOB", "COLLECTIVED_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    jobs: list[Process] = []

    def job(*arguments: str) -> Process:
        jobs.append(start("-m", "collectived_launcher", "launch", *arguments))
        return jobs[-1]

    yield job
    for one in jobs:
        one.process.kill()
        one.process.wait()
    shutil.rmtree(folder, ignore_errors=True)  # where a test failed, daemons may be taking their sockets away


def test_it_goes_on_without_a_killed_rank_lets_newcomers_in_and_all_end_with_the_same_weights(
    start: Any, two_workers: Any
) -> None:
    def rank(number: int) -> Any:
        return start(str(EXAMPLE), FOR_EVER, COLLECTIVED_WORKER=two_workers.addresses[number % 2])

    first, second = rank(0), rank(1)
    for one in (first, second):
        one.hear("of 2 from step")
    third = rank(2)
    for one in (first, second, third):
        one.hear("of 3 from step")

    second.process.kill()
    first.hear("is lost")
    without = {int(one.hear(r"of 2 from step (\d+)")[1]) for one in (first, third)}
    fourth = rank(3)
    with_it = {int(one.hear(r"of 3 from step (\d+)")[1]) for one in (first, third, fourth)}
    assert len(without) == len(with_it) == 1 and 0 < without.pop() < with_it.pop()

    third.process.terminate()
    endings = {one.ended()[-1] for one in (first, third, fourth)}
    assert [one.process.returncode for one in (first, third, fourth)] == [0, 0, 0]
    assert len(endings) == 1
    assert re.fullmatch(r"ended after step \d+: loss [\d.]+, weights [0-9a-f]{16}", *endings)
    losses = [float(loss) for line in first.said for loss in re.findall(r"loss ([\d.]+)", line)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]


def test_a_rank_whose_worker_died_connects_to_the_next_one_and_takes_part_again(launch: Any) -> None:
    job = launch("--workers", "2", "--clients", "1", "--", sys.executable, str(EXAMPLE), FOR_EVER)
    for _ in range(2):
        job.hear("of 2 from step")
    status = settle(lambda: find_training(request_status(find_target(None, None, {}))))
    os.kill(status.workers[1].pid, 9)
    job.hear(r"^\[rank 1\] after step \d+: ")
    for _ in range(2):
        assert int(job.hear(r"of 2 from step (\d+)")[1]) > 0
    job.process.terminate()
    endings = {line.partition("] ")[2] for line in job.ended() if "ended after step" in line}
    assert len(endings) == 1 and sum("ended after step" in line for line in job.said) == 2


def test_the_loop_of_the_page_gets_everybody_to_the_end_and_prints_what_it_says(launch: Any, tmp_path: Path) -> None:
    (program,) = [block for block in blocks("python") if block.startswith("import ")]
    (printed,) = blocks("text")
    (tmp_path / "train.py").write_text(program)
    job = launch("--clients", "2", "--max-restarts", "3", "--", sys.executable, str(tmp_path / "train.py"))
    said = [line for line in job.ended() if line.startswith("[rank")]
    assert job.process.returncode == 0
    assert sorted(said, key=rank_of) == sorted(printed.splitlines(), key=rank_of)


def test_the_page_quotes_the_example_as_it_is() -> None:
    text = EXAMPLE.read_text()
    loop, reconnecting = (block for block in blocks("python") if "take_part(" in block)
    assert loop in text
    assert {line.strip() for line in reconnecting.splitlines()} <= {line.strip() for line in text.splitlines()}


def blocks(kind: str) -> list[str]:
    return of_language(claimed(__file__, "docs/guide/recovery.md"), kind)


def rank_of(line: str) -> str:
    """What each rank says is in order."""
    return line.partition("]")[0]
