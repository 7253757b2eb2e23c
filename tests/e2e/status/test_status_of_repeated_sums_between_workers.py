"""Small sums between workers that the native core carries over are told as all others are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.e2e.conftest import Cluster
from tests.e2e.metrics.test_daemon_metrics import Page

import collectived as cd

TIMES, COUNT = 500, 250
BYTES = TIMES * COUNT * 4


def show(cluster: Cluster, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "collectived_launcher", *words, "--worker", cluster.addresses[0]]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_repeated_sums_are_counted_and_traced(make_cluster: Callable[..., Cluster]) -> None:
    """Of each its number, its ranks and when they came, and of all of them how many, how much and how long."""
    cluster = make_cluster(2, worker_options=("--metrics", "0"))
    told: list[tuple[dict[str, Any], dict[str, Any], Page]] = []

    def body(group: cd.Group) -> None:
        for _ in range(TIMES):
            group.all_reduce("sum", np.ones(COUNT, np.float32))
        group.send(None, 1 - group.rank)  # both have their results once each has heard of the other
        group.recv(1 - group.rank)
        if group.rank == 0:
            trace = show(cluster, "trace", "--output", "-")
            told.append((show(cluster, "status", "--json"), trace, Page(cluster.metrics[1])))
            group.send(None, 1)
        else:
            group.recv(0)

    cluster.run(2, body)
    report, trace, page = told[0]
    (group,) = [one for one in report["groups"] if one["state"] == "ready"]
    assert int(group["collectives_done"]) == TIMES
    assert [int(member["last_instance"]) for member in group["members"]] == [TIMES - 1] * 2
    assert {member["last_op"] for member in group["members"]} == {"all_reduce(sum)"}
    labels = {"operation": "all_reduce", "algorithm": "one_shot"}
    assert page("collectived_collectives_total", **labels, outcome="ok") == TIMES
    assert page("collectived_payload_bytes_total", **labels) == BYTES
    assert page("collectived_collective_duration_seconds_count", **labels) == TIMES
    assert page("collectived_collective_wait_seconds_count", operation="all_reduce") == TIMES
    sums = [event["args"] for event in trace["traceEvents"] if event.get("cat") == "collective"]
    assert {one["instance"] for one in sums} == set(range(TIMES))
