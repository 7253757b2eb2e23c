"""Whatever dies around a worker, in whatever state: each of its descriptors is handled by its owner, and it rests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import Cluster
from tests.waiting import settle

import collectived as cd

WATCHED_SECONDS = 2.0
MOST_WORK = 0.25  # of that time: a loop that spins takes all of it, or a fifth beside others

REPEATS = """
import sys, collectived as cd
with cd.connect() as session, session.join() as group:
    for _ in range(20):
        group.all_reduce("sum", 1.0)
    print("ready", flush=True)
    sys.stdin.readline()
"""
LEAVES = """
import sys, collectived as cd
with cd.connect() as session:
    with session.join() as group:
        group.all_reduce("sum", 1.0)
    print("ready", flush=True)
    sys.stdin.readline()
"""
AMID_DATA = """
import numpy as np, collectived as cd
with cd.connect() as session, session.join() as group:
    value = np.ones(4 << 20, np.float32)
    group.all_reduce("sum", value)
    print("ready", flush=True)
    while True:
        group.all_reduce("sum", value)
"""
WAITS = """
import numpy as np, collectived as cd
with cd.connect() as session, session.join() as group:
    print("ready", flush=True)
    group.all_reduce("sum", np.ones(1 << 18))
"""


def work_of(pid: int) -> float:
    """Seconds of a processor that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def take_part(cluster: Cluster, name: str, play: Callable[[cd.Group], Any]) -> Any:
    """Rank 0 of two, on the worker that is watched, in a session that goes on."""
    session = cd.connect(cluster.addresses[0])
    return session, play(session.join(name, 2, rank=0, timeout=20))


def repeat(group: cd.Group) -> cd.Group:
    for _ in range(20):
        group.all_reduce("sum", 1.0)
    return group


def leave(group: cd.Group) -> cd.Group:
    with group:
        group.all_reduce("sum", 1.0)
    return group


def reduce_until_it_fails(group: cd.Group) -> cd.Group:
    value = np.ones(4 << 20, np.float32)
    with pytest.raises(cd.errors.CollectiveError):
        while True:
            group.all_reduce("sum", value)
    return group


@pytest.mark.timeout(120)
@pytest.mark.parametrize("neighbour", ["worker", "client"])
def test_a_worker_rests_when_its_neighbours_have_died(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, neighbour: str
) -> None:
    """With links that the core waits on, kept ones, some amid data; doorbells; and streams of gRPC."""
    cluster = make_cluster(2)
    plays = {"lent": (REPEATS, repeat), "kept": (LEAVES, leave), "data": (AMID_DATA, reduce_until_it_fails)}
    clients, sessions = [], []
    with ExitStack() as closing, ThreadPoolExecutor(len(plays)) as pool:
        own = {name: pool.submit(take_part, cluster, name, play) for name, (_, play) in plays.items()}
        clients += [cluster.client(1, 2, name, program) for name, (program, _) in plays.items()]
        near = cluster.first(1)  # on the watched worker itself
        clients += [near.client(0, 1, "doorbell", REPEATS)]
        clients += [near.client(rank, 3, "open", WAITS) for rank in range(2)]
        monkeypatch.setenv("COLLECTIVED_TRANSPORT", "grpc")
        clients += [near.client(0, 2, "stream", WAITS)]
        other = cd.connect(cluster.addresses[0])
        closing.callback(other.close)
        third = pool.submit(other.join, "open", 3, rank=2, timeout=20)
        group = other.join("stream", 2, rank=1, timeout=20)
        for client in clients:
            assert client.stdout.readline() == "ready\n"
        sessions += [own[name].result(30)[0] for name in ("lent", "kept")]
        if neighbour == "worker":
            cluster.workers[1].process.kill()
            for path in cluster.folder.glob("*-1.sock"):  # which nobody else takes away
                closing.callback(path.unlink)
        for client in clients:
            client.kill()
            client.communicate()
        sessions.append(own["data"].result(30)[0])
        for left in (group, third.result(20)):
            with pytest.raises(cd.errors.CollectiveError):
                left.barrier(timeout=30)
        for session in sessions:
            closing.callback(session.close)
        pid = cluster.workers[0].process.pid

        def rests() -> bool:
            before, began = work_of(pid), time.monotonic()
            time.sleep(WATCHED_SECONDS)
            return work_of(pid) - before < MOST_WORK * min(WATCHED_SECONDS, time.monotonic() - began)

        assert settle(rests, 30)
