"""OpenTelemetry's spans: what they say, that none is sent twice, and that nothing is imported unasked."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from collectived_proto.errors import Code
from collectived_runtime.engine.record.flight_recorder import Entry, FlightRecorder, GroupLabel, ProgramSummary
from collectived_runtime.startup_error import StartupError
from collectived_runtime.worker.observe import otel
from collectived_runtime.worker.observe.otel import Telemetry, is_enabled, trace_id
from collectived_runtime.worker.observe.status import WorkerIdentity

LABEL = GroupLabel("world", 7, 4, (0, 1), (0, 1))
IDENTITY = WorkerIdentity(0, "host", "incarnation", (), "unix:/w.sock", "127.0.0.1:1")


def put(recorder: FlightRecorder, instance: int, *, code: int = 0, ended: float = 12.0, peer: int = -1) -> None:
    ring = recorder.failed if code else recorder.completed
    missing = (2,) if code else ()
    message = "rank 2 was missing" if code else ""
    summary = ProgramSummary("ring", 4096, 1, 2)
    ring.put(
        (
            *(LABEL, 100, instance, "all_reduce(sum)", summary, (0, 1), (10.0, 11.0), ("train.py:8",) * 2),
            *(11.0, ended, (), code, message, missing, peer),
        )
    )


def spans_of(recorder: FlightRecorder) -> list[Any]:
    exporter = InMemorySpanExporter()
    made = Telemetry(recorder, IDENTITY, "job", SimpleSpanProcessor(exporter))
    made.close()
    return list(exporter.get_finished_spans())


def test_a_span_says_what_trace_and_log_say() -> None:
    recorder = FlightRecorder()
    put(recorder, 5)
    (span,) = spans_of(recorder)
    assert (span.name, span.end_time - span.start_time) == ("all_reduce(sum)", pytest.approx(2e9, abs=10))
    assert dict(span.attributes) == {
        "collectived.group": "world",
        "collectived.key": "7",
        "collectived.generation": "100",
        "collectived.instance": 5,
        "collectived.ranks": (0, 1),
        "collectived.size": 4,
        "collectived.bytes": 4096,
        "collectived.code": "OK",
        "collectived.algorithm": "ring",
        "collectived.packs": 1,
        "collectived.shards": 2,
        "code.file.path": "train.py",
        "code.line.number": 8,
    }
    arrivals = [(event.name, dict(event.attributes), event.timestamp - span.start_time) for event in span.events]
    assert [(name, said) for name, said, _ in arrivals] == [
        ("arrived", {"collectived.rank": 0}),
        ("arrived", {"collectived.rank": 1}),
        ("started", {}),
    ]
    assert [at for *_, at in arrivals] == pytest.approx([0, 1e9, 1e9], abs=10)
    about = span.resource.attributes
    assert (about["service.name"], about["service.namespace"], about["collectived.worker"]) == (
        "collectived-worker",
        "job",
        0,
    )


def test_a_failure_is_an_error_with_its_verdict() -> None:
    recorder = FlightRecorder()
    put(recorder, 5, code=Code.DEADLINE_EXCEEDED)
    (span,) = spans_of(recorder)
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "rank 2 was missing"
    assert span.attributes["collectived.code"] == "DEADLINE_EXCEEDED"
    assert span.attributes["collectived.missing"] == (2,)


def test_spans_of_an_instance_lie_together_whichever_worker_sends_them() -> None:
    one, other = FlightRecorder(), FlightRecorder()
    put(one, 5)
    put(other, 5, ended=13.0)
    put(other, 6)
    (first,), (second, third) = spans_of(one), spans_of(other)
    assert first.context.trace_id == second.context.trace_id != third.context.trace_id
    assert first.context.span_id != second.context.span_id


def test_each_is_sent_once_and_those_that_were_overwritten_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    recorder = FlightRecorder(kept=8)
    drain = otel.RingReader(recorder.completed)
    for instance in range(3):
        put(recorder, instance)
    assert [entry.instance for entry in drain.read_new()] == [0, 1, 2]
    assert drain.read_new() == []
    for instance in range(3, 14):
        put(recorder, instance)
    assert [entry.instance for entry in drain.read_new()] == list(range(6, 14))
    assert [record.getMessage() for record in caplog.records] == [
        "3 collectives were recorded faster than spans are made of them: they have none"
    ]


def test_what_follows_a_gap_that_is_being_filled_has_its_turn_later() -> None:
    recorder = FlightRecorder(kept=8)
    drain = otel.RingReader(recorder.completed)
    put(recorder, 0)
    number = next(recorder.completed.numbers)  # a group loop is between the two steps of its writing
    put(recorder, 2)
    assert [entry.instance for entry in drain.read_new()] == [0]
    recorder.completed.slots[number] = (number, *recorder.completed.entries()[0][1:])
    assert [entry.number for entry in drain.read_new()] == [1, 2]


@pytest.mark.parametrize(
    ("asked", "environment", "expected"),
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}, True),
        (True, {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_it_is_off_unless_asked(asked: bool, environment: dict[str, str], expected: bool) -> None:
    assert is_enabled(asked, environment) is expected


def test_nothing_of_opentelemetry_is_imported_while_it_is_off() -> None:
    program = (
        "import sys, collectived_runtime.worker.server as server;"
        "from collectived_runtime.worker.observe import otel;"
        "assert otel.start(False, None, None, '') is None;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "[]\n"


def test_a_send_and_its_recv_have_a_trace_each() -> None:
    fields = (
        0,
        LABEL,
        100,
        1 << 62,
        "send(to=1, tag=0)",
        ProgramSummary(),
        (0,),
        (1.0,),
        ("",),
        1.0,
        2.0,
        (),
        0,
        "",
        (),
    )
    mine, theirs = Entry(*fields, peer=1), Entry(*fields, peer=0)._replace(ranks=(1,))
    assert trace_id(mine) != trace_id(theirs)
    assert 0 < trace_id(mine) < 1 << 128


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
        self.names += [span.name for scope in scopes for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_a_collector_by_the_time_the_worker_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    recorder = FlightRecorder()
    try:
        made = otel.start(False, recorder, IDENTITY, "job")
        assert made is not None
        for instance in range(100):
            put(recorder, instance)
        made.close()
        assert collector.names == ["all_reduce(sum)"] * 100
    finally:
        server.stop(None).wait()


def test_without_opentelemetry_a_worker_that_was_asked_does_not_start_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(StartupError, match=r"--otel needs OpenTelemetry.*pip install 'collectived\[otel\]'"):
        otel.start(True, FlightRecorder(), IDENTITY, "job")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert otel.start(False, FlightRecorder(), IDENTITY, "job") is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed" in caplog.text
