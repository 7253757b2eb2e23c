"""docs/operate/metrics.md lists every metric of the catalogue, with type, unit, labels and meaning, and no other.

`python -m tests.docs.test_metrics_page` prints the tables.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.blocks import claimed

from collectived_proto.config.daemons import CoordinatorSettings, WorkerSettings
from collectived_proto.config.settings import list_settings
from collectived_proto.ipc import job_files
from collectived_proto.v1 import worker_pb2
from collectived_runtime.engine.record.counters import BOUNDS
from collectived_runtime.http.server import HttpLimits
from collectived_runtime.metrics.catalogue import (
    COMMON_METRICS,
    COORDINATOR_METRICS,
    PROCESS_METRICS,
    WORKER_METRICS,
    Metric,
)
from collectived_runtime.metrics.labels import MAX_GROUP_LABELS

PAGE = (Path(__file__).parents[2] / "docs/operate/metrics.md").read_text()
TABLES = {
    "Of both": {**{metric.name: metric for metric in COMMON_METRICS}, **PROCESS_METRICS},
    "Of a worker": {name: metric for name, metric in WORKER_METRICS.items() if metric not in COMMON_METRICS},
    "Of the coordinator": {
        name: metric for name, metric in COORDINATOR_METRICS.items() if metric not in COMMON_METRICS
    },
}

COORDINATOR_ADDRESS, WORKER_ADDRESS = (
    next(key.const for key in list_settings(settings) if key.name == "metrics")
    for settings in (CoordinatorSettings, WorkerSettings)
)


def unit(metric: Metric) -> str:
    name = metric.name.removesuffix("_total")
    return next((unit for unit in ("seconds", "bytes") if name.endswith(f"_{unit}")), "number")


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {unit(metric)} | {labels or '-'} | {metric.help} |"


@pytest.mark.parametrize("title", TABLES)
def test_the_page_lists_what_there_is(title: str) -> None:
    section = PAGE.partition(f"### {title}\n")[2].partition("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [row(metric) for metric in TABLES[title].values()]


def test_the_page_names_no_metric_that_there_is_not() -> None:
    known = {name for table in TABLES.values() for name in table}
    named = set(re.findall(r"collectived_[a-z_]+|process_[a-z_]+", PAGE)) - {"collectived_proto"}
    suffixed = {name + suffix for name in known for suffix in ("_bucket", "_sum", "_count")}
    assert named <= known | suffixed


def test_the_page_says_how_many_and_where() -> None:
    assert f"{COORDINATOR_ADDRESS}" in PAGE and f"{WORKER_ADDRESS}" in PAGE
    assert f"at most {MAX_GROUP_LABELS} names" in PAGE
    limits, said = HttpLimits(), " ".join(PAGE.split())
    assert f"At most {limits.connections} connections at a time" in said
    assert f"within {limits.request_seconds:g} s or not read within {limits.send_seconds:g} s" in said
    assert f"{len(BOUNDS)} bounds from 50 µs to 60 s" in PAGE and (BOUNDS[0], BOUNDS[-1]) == (5e-5, 60.0)


def test_grpcurl_is_told_to_ask_for_what_is_served() -> None:
    (block,) = claimed(__file__)
    lists, asks = (line.split() for line in block.text.splitlines())
    assert lists[:-1] == asks[:-1] == ["grpcurl", "-plaintext", "-unix", f"{job_files.SYSTEM_FOLDER}/worker-0.sock"]
    service, _, method = asks[-1].partition("/")
    assert lists[-1] == "list" and worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name == service
    assert worker_pb2.DESCRIPTOR.services_by_name["Worker"].methods_by_name[method].input_type.name == "StatusRequest"


if __name__ == "__main__":
    for title, table in TABLES.items():
        print(f"\n### {title}\n\n| metric | type | unit | labels | what it tells |\n|---|---|---|---|---|")
        print("\n".join(map(row, table.values())))
