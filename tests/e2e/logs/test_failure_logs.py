"""The logs of real daemons after a failure: each says it once, with the same identifiers as the trace."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from tests.docs.blocks import claimed
from tests.docs.stage import plain
from tests.e2e.conftest import Cluster
from tests.waiting import settle

import collectived as cd
from collectived_proto.v1 import trace_pb2, worker_pb2_grpc
from collectived_runtime.logs import TextLines

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


def test_the_lines_of_the_page(make_cluster: Callable[..., Cluster]) -> None:
    text, event = (block.text.strip() for block in claimed(__file__))
    cluster = make_cluster(2, worker_options=("--log-format", "json", "--log-level", "info"))
    call = "group.all_reduce('sum', 1.0, options=cd.CommunicationOptions(timeout_seconds=2))"
    program = compile("\n" * 7 + call, "abort.py", "exec")  # in the line that the page names

    def body(group: cd.Group) -> None:
        if group.rank == 2:
            settle(lambda: not _arrived(cluster) and failed.is_set())
            return
        with pytest.raises(cd.errors.DeadlineExceededError):
            exec(program, {"group": group, "cd": cd})
        failed.set()

    failed = threading.Event()
    cluster.run_sessions(4, lambda _, group: body(group), "world")
    cluster.close()
    (line,) = [line for line in cluster.workers[0].log.splitlines() if '"event": "failure"' in line]
    found, shown = json.loads(line), json.loads(event)
    assert list(found) == list(shown)
    for key in set(shown) - {"time", "key", "generation"}:
        assert without_stack(str(found[key])) == without_stack(str(shown[key])), key
    record = logging.LogRecord(found["logger"], logging.INFO, "", 0, found["message"], (), None)
    assert without_stack(TextLines().format(record)) == without_stack(text)


def without_stack(text: str) -> str:
    """Here the rank that is missing is a thread of this test."""
    return plain(re.sub(r"; now: [^;]+;", "; now: …;", text))


def _arrived(cluster: Cluster) -> set[int]:
    return {rank for group in cluster.status().groups for one in group.in_flight for rank in one.arrived}
