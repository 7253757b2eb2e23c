"""`collectived trace` shows that it asks workers, and how many of them it has written."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tests.heard_stderr import BAR, heard_stderr
from tests.launcher.trace.test_trace import replies, serving

from collectived_launcher.__main__ import run
from collectived_launcher.trace import collect
from collectived_proto.v1 import trace_pb2 as pb
from collectived_proto.v1 import worker_pb2_grpc


class Slow(worker_pb2_grpc.WorkerServicer):
    """Tells all that it knows when the test lets it."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def Trace(self, request: pb.TraceRequest, context: grpc.ServicerContext) -> Iterator[pb.TraceReply]:
        self.may_answer.wait(60)
        yield from replies()


@pytest.mark.parametrize(
    ("terminal", "asking", "writing"),
    [
        (
            False,
            r"collectived trace: asking workers, \d+ s so far$",
            r"collectived trace: writing \S+, 0 of 2 workers done, ",
        ),
        (True, f"asking workers {BAR}", rf"writing \S+ {BAR} 0/2 0:"),
    ],
    ids=["pipe", "terminal"],
)
def test_who_waits_for_a_trace_sees_how_far_it_is(
    terminal: bool, asking: str, writing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "PART_TIMEOUT", 60.0)
    slow, output = Slow(), tmp_path / "t"
    os.mkfifo(output)  # writing goes on when somebody reads
    with (
        heard_stderr(monkeypatch, terminal=terminal) as heard,
        serving(slow) as address,
        ThreadPoolExecutor(1) as pool,
    ):
        ending = pool.submit(run, ["trace", "--worker", address, "-o", str(output), "--json"])
        try:
            heard.hear(asking)
            slow.may_answer.set()
            heard.hear(writing)
        finally:
            slow.may_answer.set()
            written = output.read_text()
        assert ending.result() == 0
    assert json.loads(written)
