"""The page: what parsers of both formats make of it, and in how short pieces it is made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from collectived_runtime.engine.record.counters import BOUNDS, Histogram
from collectived_runtime.metrics.catalogue import COORDINATOR_METRICS, PROCESS_METRICS, WORKER_METRICS
from collectived_runtime.metrics.page import (
    PAUSE,
    SAMPLES_PER_CHUNK,
    Reading,
    make_histogram_reading,
    make_reading,
    read_build_info,
    read_process,
    render_chunks,
)

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Told:
    """A source that tells something of every type, and more than fits into a piece."""

    def __init__(self) -> None:
        self.histogram = Histogram()
        for seconds in (0.00004, 0.0001, 0.3, 100.0):
            self.histogram.add(seconds)

    def read(self) -> Iterator[Reading | None]:
        yield read_build_info("worker")
        yield PAUSE
        groups = ((("0", f"g{number}"), float(number)) for number in range(3 * SAMPLES_PER_CHUNK))
        yield make_reading(WORKER_METRICS["collectived_link_sent_bytes_total"], groups)
        name = "collectived_collective_duration_seconds"
        labels = [("0", "all_reduce", "ring"), ("0", 'a "quoted"\\name', "tree")]
        yield make_histogram_reading(WORKER_METRICS[name], BOUNDS, ((which, self.histogram) for which in labels))
        yield make_reading(WORKER_METRICS["collectived_verdicts_total"], [])
        yield from read_process()


def readings() -> list[Reading]:
    return [reading for reading in Told().read() if reading is not PAUSE]


@pytest.mark.parametrize(("accept", "parser"), [("", parse), ("text/plain", parse), (OPENMETRICS, parse_openmetrics)])
def test_both_formats_say_what_the_source_tells(accept: str, parser: type) -> None:
    encode, _ = choose_encoder(accept)
    text = b"".join(render_chunks(Told(), encode)).decode()
    families = {family.name: family for family in parser(text)}
    told = {metric.family: (metric, found) for metric, samples in readings() if (found := list(samples))}
    assert list(families) == list(told)
    for name, family in families.items():
        metric, samples = told[name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        if not name.startswith("process_"):
            assert [(s.name, s.labels, s.value) for s in family.samples] == [
                (s.name, s.labels, s.value) for s in samples
            ]


def test_a_histogram_is_cumulative_and_its_bounds_are_inclusive() -> None:
    (samples,) = [s for metric, s in readings() if metric.family == "collectived_collective_duration_seconds"]
    of = [sample for sample in samples if sample.labels["algorithm"] == "ring"]
    counts = {sample.labels["le"]: sample.value for sample in of if sample.name.endswith("_bucket")}
    assert (counts["5e-05"], counts["0.0001"], counts["0.25"], counts["0.5"], counts["60.0"], counts["+Inf"]) == (
        *(1, 2, 2, 3, 3, 4),
    )
    assert [sample.value for sample in of[-2:]] == [4, pytest.approx(100.30014)]


def test_no_piece_is_longer_than_what_is_written_in_one_stretch() -> None:
    encode, _ = choose_encoder("")
    for piece in render_chunks(Told(), encode):
        assert sum(not line.startswith(b"#") for line in piece.splitlines()) <= SAMPLES_PER_CHUNK


def test_names_follow_the_conventions() -> None:
    for metric in (WORKER_METRICS | COORDINATOR_METRICS | PROCESS_METRICS).values():
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.name.startswith(("collectived_", "process_"))
        assert not metric.name.removesuffix("_total").endswith(("_ms", "_milliseconds", "_kb", "_count", "_sum"))
        assert set(metric.labels) <= {
            *("worker", "group", "operation", "algorithm", "outcome", "code", "rank", "state"),
            *("component", "version", "python", "protocol", "reason", "limit", "where", "how"),
        }, "labels are bounded: never a generation, an instance or a process"
