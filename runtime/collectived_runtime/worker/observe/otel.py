"""OpenTelemetry: a span per collective and worker, made from the flight recorder by a thread of its own.

Group loops know nothing of it. The spans of one instance have the same trace id on all workers, made from its
identifiers, so that a backend shows them together. Nothing of OpenTelemetry is imported unless it is asked for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from collectived_proto.errors import Code
from collectived_proto.report.phrases import peer_label
from collectived_runtime.engine.record.flight_recorder import Entry, FlightRecorder, RingBuffer
from collectived_runtime.startup_error import StartupError
from collectived_runtime.worker.observe.status import WorkerIdentity

log = logging.getLogger("collectived.telemetry")

EXPORT_INTERVAL_SECONDS = 1.0  # between looks into the recorder
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_INSTALL = "pip install 'collectived[otel]'"


def is_enabled(asked: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether spans are to be sent: where it was asked for, or where the environment says whereto."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return asked or any(environment.get(name) for name in ENDPOINTS)


def start(asked: bool, recorder: FlightRecorder, identity: WorkerIdentity, job: str) -> Telemetry | None:
    """Begin to send spans if that is wanted.

    Raises:
        StartupError: it was asked for, and OpenTelemetry is not installed.
    """
    if not is_enabled(asked):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        if asked:
            raise StartupError(f"--otel needs OpenTelemetry, which is not installed ({error}): {_INSTALL}") from None
        log.warning("%s is set, but OpenTelemetry is not installed (%s): %s", ENDPOINTS[0], error, _INSTALL)
        return None
    return Telemetry(recorder, identity, job, BatchSpanProcessor(OTLPSpanExporter()))


class Telemetry:
    """Sends spans until it is closed.

    Args:
        processor: an `opentelemetry.sdk.trace.SpanProcessor`, which is taken over.
    """

    def __init__(self, recorder: FlightRecorder, identity: WorkerIdentity, job: str, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        about: dict[str, str | int] = {
            "service.name": "collectived-worker",
            "service.namespace": job,
            "service.instance.id": identity.incarnation,
            "host.name": identity.host,
            "process.pid": os.getpid(),
            "collectived.worker": identity.task,
        }
        self._id_generator = _create_id_generator()
        resource = Resource.create(dict(about))
        self._provider = TracerProvider(resource=resource, id_generator=self._id_generator, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("collectived")
        self._readers = [RingReader(recorder.completed), RingReader(recorder.failed)]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what has been recorded until now, and end."""
        self._stopped.set()
        self._thread.join()
        self._provider.shutdown()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopped.wait(EXPORT_INTERVAL_SECONDS)
            for drain in self._readers:
                self._send(drain.read_new())

    def _send(self, entries: Iterable[Entry]) -> None:
        to_unix = time.time() - time.monotonic()
        for entry in entries:
            self._send_span(entry, lambda at: int((at + to_unix) * 1e9))

    def _send_span(self, entry: Entry, unix: Callable[[float], int]) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._id_generator.next_trace = trace_id(entry)
        began = min(entry.arrival_times, default=entry.started_at or entry.ended_at)
        span = self._tracer.start_span(entry.op, start_time=unix(began), attributes=attributes(entry))
        for rank, at in zip(entry.ranks, entry.arrival_times, strict=True):
            span.add_event("arrived", {"collectived.rank": rank}, timestamp=unix(at))
        if entry.started_at:
            span.add_event("started", timestamp=unix(entry.started_at))
        if entry.code:
            span.set_status(Status(StatusCode.ERROR, entry.message))
        span.end(end_time=unix(entry.ended_at))


def trace_id(entry: Entry) -> int:
    """The same for an instance on all workers; a send and its recv have one each."""
    mine = f"|{entry.ranks}" if entry.peer >= 0 else ""
    text = f"collectived|{entry.label.key}|{entry.generation}|{entry.instance}{mine}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big") or 1


def attributes(entry: Entry) -> dict[str, Any]:
    """The attributes of a span: the identifiers of status, trace and log, and the description of the collective."""
    file, _, line = entry.sites[0].rpartition(":") if entry.sites else ("", "", "")
    said: dict[str, Any] = {
        "collectived.group": entry.label.name,
        "collectived.key": str(entry.label.key),
        "collectived.generation": str(entry.generation),
        "collectived.instance": entry.instance,
        "collectived.ranks": list(entry.ranks),
        "collectived.size": entry.label.size,
        "collectived.bytes": entry.summary.nbytes,
        "collectived.code": _code_name(entry.code),
    }
    if file and line.isdecimal():
        said |= {"code.file.path": file, "code.line.number": int(line)}
    if entry.summary.algorithm:
        said |= {"collectived.algorithm": entry.summary.algorithm, "collectived.packs": entry.summary.packs}
        said["collectived.shards"] = entry.summary.shards
    if entry.missing:
        said["collectived.missing"] = list(entry.missing)
    if entry.peer >= 0:
        said["collectived.peer"] = peer_label(entry.peer)
    return said


def _code_name(code: int) -> str:
    try:
        return Code(code).name
    except ValueError:
        return str(code)


class RingReader:
    """Reads the entries of a ring since the last look. Entries overwritten before that are counted and logged."""

    def __init__(self, ring: RingBuffer) -> None:
        self._ring = ring
        self._next = 0

    def read_new(self) -> list[Entry]:
        found = self._ring.entries(self._next)
        if not found:
            return found
        if lost := found[0].number - self._next:
            log.warning("%d collectives were recorded faster than spans are made of them: they have none", lost)
        first = found[0].number
        # A gap further on is one that its group loop is about to fill: what follows it has its turn later.
        found = [entry for place, entry in enumerate(found) if entry.number == first + place]
        self._next = first + len(found)
        return found


def _create_id_generator() -> Any:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """Random span ids; the trace id that was laid ready."""

        next_trace = 1

        def generate_trace_id(self) -> int:
            return self.next_trace

    return Ids()
