"""What `collectived bench` makes of what its ranks tell; here a stand-in tells it, and no daemon runs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.e2e.launcher.conftest import PATIENCE, Place

from collectived_launcher.bench.record import Record, apply_event, group_failures, parse_event
from collectived_launcher.bench.tables import format_cells, format_number, heading

CONDITIONS: dict[str, Any] = {
    "operation": "reduce",
    "dtype": "int32",
    "reduce_op": "sum",
    "root": 1,
    "ranks": 4,
    "workers": 2,
    "transport": "shared memory",
    "memory": "own",
    "in_flight": 2,
}
ROW: dict[str, Any] = {
    "size_bytes": 65536,
    "count": 16384,
    "iterations": 20,
    "p50_seconds": 1.5e-4,
    "p99_seconds": 2e-3,
    "mean_seconds": 2e-4,
    "algorithm_bandwidth": 436906666.7,
    "bus_bandwidth": 436906666.7,
    "errors": 3,
}
BEGIN = {"event": "begin", "conditions": CONDITIONS, "sizes": [65536, 262144]}
DRIVE = """
import json, sys
from collectived_launcher import __main__
from collectived_launcher.bench import cli as bench
tells = "import sys\\nfor line in sys.argv[1].splitlines(): print(line)\\nsys.exit(int(sys.argv[2]))"
bench.PROGRAM = (sys.executable, "-c", tells, sys.argv[1], sys.argv[2])
sys.exit(__main__.run(["bench", "reduce", "-b", "64K", "-e", "256K", *sys.argv[3:]]))
"""


def told(place: Place, events: list[Any], status: int, *options: str) -> subprocess.CompletedProcess[str]:
    """The command as rank 0 of 4, whose measuring program prints these events and ends with that status."""
    lines = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in events)
    return subprocess.run(
        [sys.executable, "-c", DRIVE, lines, str(status), *options],
        env={**place.environment, "COLLECTIVED_WORKER": "unix:/none", "RANK": "0", "WORLD_SIZE": "4"},
        text=True,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_wrong_result_is_in_the_table_and_exit_status_1(place: Place) -> None:
    done = told(place, [BEGIN, {"event": "row", **ROW}, {"event": "end"}], 0)
    assert done.returncode == 1 and done.stderr == "collectived bench: 3 elements of results were wrong\n"
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[0] == "reduce: 4 ranks on 2 workers, shared memory, ordinary arrays, 2 in flight"
    assert lines[3].split() == ["65536", "16384", "int32", "sum", "1", "20", "150.0", "2000", "0.437", "0.437", "3"]


def test_a_failure_is_told_once_and_shows_what_was_measured(place: Place) -> None:
    failed = {"event": "failed", "rank": 0, "error": "AbortedError: gone", "trace": ""}
    done = told(place, [BEGIN, {"event": "row", **ROW, "errors": 0}, failed], 1, "--json")
    assert done.returncode == 1 and done.stderr.count("AbortedError: gone") == 1
    found = json.loads(done.stdout)
    assert found["complete"] is False and len(found["rows"]) == 1
    assert found["failures"] == [{"ranks": [0], "error": "AbortedError: gone", "trace": ""}]


def test_what_else_a_rank_prints_goes_to_standard_error(place: Place) -> None:
    done = told(place, [BEGIN, "a warning", '{"event": "unknown"}', "7", {"event": "end"}], 0, "--json")
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["[rank 0] a warning", '[rank 0] {"event": "unknown"}', "[rank 0] 7"]
    assert json.loads(done.stdout)["complete"] is True


def test_a_worker_that_vanished_before_ranks_came_is_exit_status_3(place: Place) -> None:
    failed = {"event": "failed", "rank": 0, "error": "UnavailableError: no worker answers", "trace": ""}
    done = told(place, [failed], 3)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "collectived bench: rank 0: UnavailableError: no worker answers\n"


def test_ranks_that_fail_alike_or_in_consequence_are_told_once() -> None:
    failures = [
        (2, "AbortedError: rank 1 gave up", "", 1),
        (1, "ValueError: bad", "Traceback ...", None),
        (0, "AbortedError: rank 1 gave up", "", 1),
        (3, "ValueError: bad", "Traceback ...", None),
    ]
    assert group_failures(failures) == [([1, 3], "ValueError: bad", "Traceback ...")]


def test_a_record_follows_the_events() -> None:
    record = Record()
    size_event = {"event": "size", "size_bytes": 65536, "iterations": 20}
    for one in (BEGIN, size_event):
        apply_event(record, parse_event(json.dumps(one).encode()) or {})
    assert record.sizes == [65536, 262144] and record.current == (65536, 20) and not record.complete
    apply_event(record, {"event": "row", **ROW})
    assert record.current is None and record.rows == [ROW] and record.wrong_elements == 3


@pytest.mark.parametrize("line", [b"", b"null", b"[]", b'{"event": 7}', b"\xff"])
def test_what_is_no_event_is_known(line: bytes) -> None:
    assert parse_event(line) is None


def test_figures_in_words() -> None:
    assert [format_number(value) for value in (0.5, 99.94, 99.96, 999.4, 999.6)] == [
        "0.50",
        "99.94",
        "100.0",
        "999.4",
        "1000",
    ]
    assert heading({**CONDITIONS, "ranks": 1, "workers": 1, "in_flight": 0}).startswith("reduce: 1 rank on 1 worker, ")


def test_a_dash_stands_for_what_an_operation_has_not() -> None:
    conditions = {**CONDITIONS, "dtype": None, "reduce_op": None, "root": None}
    row = {**ROW, "algorithm_bandwidth": None, "bus_bandwidth": None, "errors": None}
    assert format_cells(conditions, row) == ["65536", "16384", "-", "-", "-", "20", "150.0", "2000", "-", "-", "-"]
