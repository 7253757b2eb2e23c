"""docs/operate/metrics.md has the metrics of the catalogue, and the limits of who asks for them."""

from __future__ import annotations

import re

from tests.docs import metrics_page
from tests.docs.blocks import claimed
from tests.docs.metrics_page import TABLES, fresh

from collectived_proto.config.daemons import CoordinatorSettings, WorkerSettings
from collectived_proto.config.settings import list_settings
from collectived_proto.ipc import job_files
from collectived_proto.v1 import worker_pb2
from collectived_runtime.engine.record.counters import BOUNDS
from collectived_runtime.http.server import HttpLimits
from collectived_runtime.metrics.labels import MAX_GROUP_LABELS

PAGE = metrics_page.PAGE.read_text()

COORDINATOR_ADDRESS, WORKER_ADDRESS = (
    next(key.const for key in list_settings(settings) if key.name == "metrics")
    for settings in (CoordinatorSettings, WorkerSettings)
)


def test_the_tables_are_what_the_catalogue_says() -> None:
    assert PAGE.count("<!-- made: ") == len(TABLES)
    assert fresh(PAGE) == PAGE, "run `make docs` and commit the result"


def test_a_changed_meaning_is_noticed() -> None:
    assert (
        fresh(PAGE.replace("Connected clients.", "Clients.")) == PAGE != PAGE.replace("Connected clients.", "Clients.")
    )


def test_the_page_names_no_metric_that_there_is_not() -> None:
    known = {metric.name for table in TABLES.values() for metric in table}
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
