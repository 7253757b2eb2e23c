"""`collectived trace` asks workers that speak for themselves, or stop amid their answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.launcher.trace.test_trace import replies, serving

from collectived_launcher.status.discovery import Target
from collectived_launcher.trace import collect
from collectived_launcher.trace.absences import find_absences
from collectived_launcher.trace.collect import request_trace
from collectived_proto.v1 import trace_pb2 as pb
from collectived_proto.v1 import worker_pb2_grpc


class Alone(worker_pb2_grpc.WorkerServicer):
    """A worker that hears nothing from its coordinator: number `task` of those in `replies`."""

    def __init__(self, task: int) -> None:
        self.task = task

    def Trace(self, request: pb.TraceRequest, context: grpc.ServicerContext) -> Iterator[pb.TraceReply]:
        yield pb.TraceReply(time=pb.TraceTime(unix=1000.0, monotonic=20.0), answered_by=f"worker {self.task}")
        yield from (reply for reply in replies() if reply.worker.host == "ab"[self.task])
        yield pb.TraceReply(last=True, warnings=[] if request.local_only else ["no coordinator"])


def test_without_a_coordinator_the_workers_of_the_host_name_the_absent_together(tmp_path: Path) -> None:
    nobody = f"unix:{tmp_path}/no.sock"
    with serving(Alone(0)) as first, serving(Alone(1)) as second:
        account = request_trace(Target((first, second, nobody), "test"), pb.TraceRequest())
    assert [(one.rank, one.task) for one in find_absences(account)] == [(2, 1)]
    assert account.warnings == [
        "no coordinator",
        f"the worker at {nobody} does not answer: what it has recorded is missing",
        "this is what 2 workers of one host have recorded",
    ]


class Halting(worker_pb2_grpc.WorkerServicer):
    """Stops after one worker's account, until the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def Trace(self, request: pb.TraceRequest, context: grpc.ServicerContext) -> Iterator[pb.TraceReply]:
        yield from replies()[:2]
        self.over.wait(60)


def test_of_an_answer_that_stops_what_came_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "PART_TIMEOUT", 0.5)
    halting = Halting()
    with serving(halting) as address:
        try:
            account = request_trace(Target((address,), "test"), pb.TraceRequest())
        finally:
            halting.over.set()
    assert list(account.workers) == [0] and len(account.workers[0].collectives) == 2
    assert f"{address} stopped amid its answer" in account.warnings[0]
