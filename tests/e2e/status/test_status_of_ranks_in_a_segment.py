"""Ranks of one worker carry out their collectives themselves; what daemons tell of them is exact all the same."""

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

TIMES, COUNT = 1000, 250
BYTES = TIMES * COUNT * 4


def status(cluster: Cluster) -> dict[str, Any]:
    command = [sys.executable, "-m", "collectived_launcher", "status", "--worker", cluster.addresses[0], "--json"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_thousand_collectives_are_told_as_a_thousand(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(1, worker_options=("--metrics", "0"))
    told: list[tuple[dict[str, Any], Page]] = []

    def body(group: cd.Group) -> None:
        for _ in range(TIMES):
            group.all_reduce("sum", np.ones(COUNT, np.float32))
        group.send(None, 1 - group.rank)  # both have their results once each has heard of the other
        group.recv(1 - group.rank)
        if group.rank == 0:
            told.append((status(cluster), Page(cluster.metrics[1])))
            group.send(None, 1)
        else:
            group.recv(0)

    cluster.run(2, body)
    (report, page), after = told[0], Page(cluster.metrics[1])
    (group,) = [one for one in report["groups"] if one["state"] == "ready"]
    assert (int(group["collectives_done"]), int(group["bytes_reduced"])) == (TIMES, BYTES)
    assert [int(member["last_instance"]) for member in group["members"]] == [TIMES - 1] * 2
    assert {member["last_op"] for member in group["members"]} == {"all_reduce(sum)"}
    (rate,) = [one for one in group["rates"] if one["op"] == "all_reduce"]
    assert (int(rate["collectives"]), int(rate["bytes"])) == (TIMES, BYTES)
    for seen in (page, after):  # the totals of a group that has ended stay
        labels = {"operation": "all_reduce", "algorithm": "segment"}
        assert seen("collectived_collectives_total", **labels, outcome="ok") == TIMES
        assert seen("collectived_payload_bytes_total", **labels) == BYTES
        assert seen("collectived_collective_duration_seconds_count", **labels) == TIMES
        assert 512 <= seen("collectived_collective_wait_seconds_count", operation="all_reduce") <= TIMES
