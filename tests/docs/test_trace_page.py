"""docs/operate/trace.md says what the code does: options, numbers, events, attributes."""

from __future__ import annotations

import json
import re

import click
from benchmarks.page import between
from tests.docs.contents import ROOT

from collectived_launcher.__main__ import collectived as command
from collectived_runtime.coordinator import trace_collector
from collectived_runtime.engine.record import flight_recorder
from collectived_runtime.engine.record.flight_recorder import Entry, GroupLabel, ProgramSummary
from collectived_runtime.worker.observe import otel
from collectived_runtime.worker.observe.trace import MAX_TRACE_BYTES

PAGE = (ROOT / "docs" / "operate" / "trace.md").read_text()
WORDS = " ".join(PAGE.split())


def test_every_option_is_there_and_no_other() -> None:
    options = {name for one in command.commands["trace"].params if isinstance(one, click.Option) for name in one.opts}
    table = PAGE.partition("## The command")[2].partition("##")[0]
    assert set(re.findall(r"`(--?[a-z]+)", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)))) == options


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"the last {flight_recorder.MAX_ENTRIES:,} collectives" in WORDS
    assert f"the last {flight_recorder.MAX_FAILED_ENTRIES} that failed" in WORDS
    assert (
        f"{flight_recorder.MOST_MARKS} intervals at most, {flight_recorder.MOST_MOVES} of them folds and moves" in WORDS
    )
    assert MAX_TRACE_BYTES == trace_collector.MAX_WORKER_BYTES
    assert (
        f"{MAX_TRACE_BYTES >> 20} MiB at most" in WORDS
        and f"({trace_collector.MAX_TOTAL_BYTES >> 20} MiB in all)" in WORDS
    )
    assert (
        f"more than {['', 'one', 'two', 'three', 'four'][trace_collector.MAX_TOTAL_BYTES // MAX_TRACE_BYTES]} workers"
        in WORDS
    )
    assert f"within {trace_collector.PART_TIMEOUT_SECONDS:g} s" in WORDS


def test_the_attributes_of_a_span_are_all_named() -> None:
    summary = ProgramSummary("ring", 1, 1, 1)
    entry = Entry(0, GroupLabel("g", 1, 1, (0,), (0,)), 1, 1, "op", summary, (0,), (1.0,), ("f.py:1",), 1.0, 2.0)
    entry = entry._replace(missing=(1,), peer=1)
    for name in otel.attributes(entry):
        assert f"`{name}`" in PAGE or f"`{name.removeprefix('collectived')}`" in PAGE, name


def test_the_examples_are_json() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("{")]
    event, logged = map(json.loads, lines)
    assert (event["name"], logged["event"]) == ("rank 2 has not arrived", "failure")


def test_there_is_a_place_for_what_was_measured() -> None:
    assert "x" in between(PAGE, "recorder", "x")
    table = PAGE.partition("<!-- recorder -->")[2].partition("<!-- end of recorder -->")[0]
    measured = re.findall(r"≤ 3\.00 µs \| ([\d.]+) µs \| yes", table)
    assert len(measured) == 5 == table.count("µs | yes")
