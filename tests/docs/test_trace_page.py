"""docs/trace.md says what the code does: options, numbers, events, attributes."""

from __future__ import annotations

import json
import re

import click
from benchmarks.page import between
from tests.docs.contents import ROOT

from collectived_launcher.__main__ import collectived as command
from collectived_runtime.coordinator import traces
from collectived_runtime.engine import recorder
from collectived_runtime.engine.recorder import Entry, Gist, Label
from collectived_runtime.worker import telemetry
from collectived_runtime.worker.trace import MOST_BYTES

PAGE = (ROOT / "docs" / "trace.md").read_text()
WORDS = " ".join(PAGE.split())


def test_every_option_is_there_and_no_other() -> None:
    options = {name for one in command.commands["trace"].params if isinstance(one, click.Option) for name in one.opts}
    table = PAGE.partition("## The command")[2].partition("##")[0]
    assert set(re.findall(r"`(--?[a-z]+)", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)))) == options


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"the last {recorder.KEPT:,} collectives" in WORDS
    assert f"the last {recorder.KEPT_FAILED} that failed" in WORDS
    assert f"{recorder.MOST_MARKS} intervals at most, {recorder.MOST_MOVES} of them folds and moves" in WORDS
    assert MOST_BYTES == traces.MOST_BYTES
    assert f"{MOST_BYTES >> 20} MiB at most" in WORDS and f"({traces.ALL_BYTES >> 20} MiB in all)" in WORDS
    assert f"more than {['', 'one', 'two', 'three', 'four'][traces.ALL_BYTES // MOST_BYTES]} workers" in WORDS
    assert f"within {traces.ANSWER_SECONDS:g} s" in WORDS


def test_the_attributes_of_a_span_are_all_named() -> None:
    gist = Gist("ring", 1, 1, 1)
    entry = Entry(0, Label("g", 1, 1, (0,), (0,)), 1, 1, "op", gist, (0,), (1.0,), ("f.py:1",), 1.0, 2.0)
    entry = entry._replace(missing=(1,), peer=1)
    for name in telemetry.attributes(entry):
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
