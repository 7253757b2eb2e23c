"""The logs of real daemons after a failure: each says it once, with the same identifiers as the trace."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from tests.e2e.conftest import Cluster
from tests.waiting import settle

import collectived as cd
from collectived_proto.v1 import trace_pb2, worker_pb2_grpc

SAME = ("group", "key", "generation", "instance", "op", "code")


def test_a_failure_is_logged_once_by_each_daemon(make_cluster: Callable[..., Cluster]) -> None:
    json_lines = ("--log-format", "json", "--log-level", "info")
    cluster = make_cluster(2, options=json_lines, worker_options=json_lines)

    def body(group: cd.Group) -> None:
        group.barrier()
        if group.rank == 3:
            settle(lambda: _arrived(cluster) == {0, 1, 2})
            group.abort("enough")
            with contextlib.suppress(cd.errors.AbortedError):  # it may hear of its own abort
                group.leave()
            return
        with pytest.raises(cd.errors.AbortedError, match="enough"):
            group.all_reduce("sum", np.ones(8, np.float32))

    cluster.run(4, body, name="train")
    with grpc.insecure_channel(cluster.addresses[0]) as channel:
        replies = list(worker_pb2_grpc.WorkerStub(channel).Trace(trace_pb2.TraceRequest(group="train"), timeout=20))
    cluster.close()
    lines = [
        [json.loads(line) for line in daemon.log.splitlines()] for daemon in (cluster.coordinator, *cluster.workers)
    ]
    failures = [[line for line in log if line.get("event") == "failure"] for log in lines]
    assert [len(log) for log in failures] == [1, 1, 1], lines
    (told,) = {tuple(line[key] for key in SAME) for log in failures for line in log}
    assert told[0] == "train" and told[3:] == (1, "all_reduce(sum)", "ABORTED")
    traced = {
        (reply.worker.lanes[one.lane].group, reply.worker.lanes[one.lane].key, one.generation, one.instance, one.op)
        for reply in replies
        for one in reply.worker.collectives
        if one.code == cd.errors.Code.ABORTED
    }
    assert traced == {told[:5]}


def _arrived(cluster: Cluster) -> set[int]:
    return {rank for group in cluster.status().groups for one in group.in_flight for rank in one.arrived}
