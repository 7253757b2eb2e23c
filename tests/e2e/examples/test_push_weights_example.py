"""`examples/push_weights.py` run for real: a trainer, and servers of another job: one is killed, one is added."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.examples.test_elastic_example import Process

EXAMPLE = str(Path(__file__).parents[3] / "examples/push_weights.py")
SERVES = r"^serves step (\d+), weights (\w+), loss ([\d.]+)"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def start(two_workers: Any) -> Iterator[Any]:
    """Starts trainers and servers, each on a worker, of which none outlives the test."""
    started: list[Process] = []

    def one_more(role: str, worker: int, **environment: str) -> Process:
        told = {"COLLECTIVED_WORKER": two_workers.addresses[worker], "COLLECTIVED_JOB": role, "PUSH_EVERY": "0.2"}
        started.append(Process(EXAMPLE, role, **told, **environment))
        return started[-1]

    yield one_more
    for one in started:
        with one.process:
            one.process.kill()


def test_servers_of_another_job_get_the_trainers_weights_though_one_is_killed_and_one_is_added(start: Any) -> None:
    trainers = [start("train", rank, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    first, second = start("serve", 1), start("serve", 0)
    for server in (first, second):
        server.hear(SERVES)
    trainers[0].hear("^pushed to 2: ")

    second.process.kill()
    trainers[0].hear("^one generation less: .* is lost")
    first.hear("^one generation less: .* is lost")
    without = int(first.hear(SERVES)[1])
    third = start("serve", 0)
    assert int(third.hear(SERVES)[1]) > without
    trainers[0].hear("^pushed to 2: ")

    trainers[1].process.terminate()  # any rank of the job: all of them end after the same step
    endings = {trainer.ended()[-1] for trainer in trainers}
    assert [trainer.process.returncode for trainer in trainers] == [0, 0]
    assert len(endings) == 1 and re.fullmatch(r"trained to step \d+, weights \w{12}", *endings)
    pushed = [re.findall(r"^pushed to \d: step (\d+), weights (\w+)", line) for line in trainers[0].said]
    last = [step for found in pushed for step, _ in found][-1]
    for server in (first, third):  # they go on without it, with the last that it had
        while server.hear(SERVES)[1] != last:
            pass
        server.process.terminate()
        assert re.fullmatch(r"ended after \d+ answers", server.ended()[-1])
        assert server.process.returncode == 0
        served = [found for line in server.said for found in re.findall(SERVES, line)]
        assert {(step, weights) for step, weights, _ in served} <= {pair for found in pushed for pair in found}
        losses = [float(loss) for _, _, loss in served]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
