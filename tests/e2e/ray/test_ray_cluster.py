"""Ranks are actors of a real Ray cluster of three nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.docs.blocks import claimed
from tests.docs.contents import EXAMPLES, RAY
from tests.docs.running import expected
from tests.waiting import settle

import collectived as cd

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]
NODES = 3


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def job(ray_cluster: Any) -> Iterator[Any]:
    with cd.integrations.ray.start(ranks_per_node=2) as job:
        yield job


def test_the_program_of_the_page(ray_cluster: Any, tmp_path: Path) -> None:
    """Before a job of these tests takes all processors."""
    (block,) = claimed(__file__)
    (tmp_path / "page.py").write_text(block.text)
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=150
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [str([10.5] * 2 * NODES)]), done.stderr


def test_the_example_of_the_reference_prints_what_it_says(ray_cluster: Any) -> None:
    path = EXAMPLES / f"{RAY}.py"
    environment = os.environ | {"RAY_ADDRESS": ray_cluster.address}
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1:] == expected(path.read_text())


def test_every_node_has_a_worker_and_every_actor_is_a_rank(job: Any) -> None:
    def body(group: Any, more: int) -> Any:
        total = group.all_reduce("sum", np.full(3, group.rank + more))
        workers = [member.worker for member in group.members]
        return group.rank, group.local_size, total.tolist(), len(set(workers)), len({m.pid for m in group.members})

    assert job.size == 2 * NODES and len(job.nodes) == NODES
    assert job.run(body, 1, timeout=30) == [(rank, 2, [21] * 3, NODES, 6) for rank in range(6)]
    assert job.run(lambda group: group.all_gather(np.array([group.rank])).tolist()) == [[0, 1, 2, 3, 4, 5]] * 6


def test_an_exception_of_a_rank_is_raised_as_it_is(job: Any) -> None:
    def body(group: Any) -> None:
        if group.rank == 4:
            raise KeyError("no such layer")
        group.barrier()

    with pytest.raises(KeyError, match="no such layer"):
        job.run(body, timeout=30)
    assert job.run(lambda group: group.size) == [6] * 6  # the actors go on


def test_a_rank_that_is_killed_is_named_to_the_others(ray_cluster: Any) -> None:
    def body(group: Any) -> Any:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.barrier()
        except Exception as error:
            return type(error).__name__, [member.rank for member in getattr(error, "missing", ())]

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]][:2]
    with cd.integrations.ray.start(nodes=nodes, cpus_per_rank=0) as job:
        calls = [rank.run.remote(body, (), "killed", 30.0) for rank in job._ranks]
        assert ray.get(calls[0]) == ("UnavailableError", [1])
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(calls[1])


def command_lines(job: Any) -> list[list[str]]:
    """Of the daemons of a job."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = path.read_text().split("\0")
            if "collectived_runtime" in words and job._name in words:
                found.append(words)
    return found


def test_nothing_is_left_when_the_block_ends(ray_cluster: Any) -> None:
    with cd.integrations.ray.start(cpus_per_rank=0) as job:
        daemons = command_lines(job)
        assert job.run(lambda group: group.rank) == [0, 1, 2]
    folders = [Path(words[words.index("--folder") + 1]) for words in daemons if "--folder" in words]
    assert len(daemons) == NODES + 1 and len(folders) == NODES
    settle(lambda: not command_lines(job))
    assert not any(folder.exists() for folder in folders)


def test_what_cannot_be_started_is_said(ray_cluster: Any) -> None:
    with pytest.raises(ValueError, match="ranks_per_node must be a whole number from 1"), cd.integrations.ray.start(0):
        pass
    with pytest.raises(ValueError, match="nodes is empty"), cd.integrations.ray.start(nodes=[]):
        pass
