"""The rules of the Trace Event Format, as far as our traces use it, checked strictly.

From the public description of the format ("Trace Event Format", the document that chrome://tracing and Perfetto refer
to): the JSON object form; complete events (X), metadata events (M) and flow events (s, f). An unknown key or phase is
an error here, though viewers would pass over it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

COLOURS = {"good", "bad", "terrible"}  # of the reserved names
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
COMMON = {"ph", "pid", "tid", "ts", "name"}
KEYS = {
    "X": (COMMON | {"cat", "dur", "args"}, {"cname"}),
    "M": (COMMON | {"args"}, set()),
    "s": (COMMON | {"cat", "id"}, set()),
    "f": (COMMON | {"cat", "id", "bp"}, set()),
}

Trace = dict[str, Any]
Event = dict[str, Any]


def parsed(text: str) -> Trace:
    """The trace in a file, checked.

    Raises:
        AssertionError: it breaks a rule.
    """

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    trace = json.loads(text, parse_constant=refuse)
    check(trace)
    return dict(trace)


def check(trace: Trace) -> None:
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["otherData"], dict)
    events = trace["traceEvents"]
    assert isinstance(events, list)
    for event in events:
        _one(event)
    slices = _threads(events)
    for thread in slices.values():
        _nested(thread)
    _named(events, slices)
    _flows(events, slices)


def _one(event: Event) -> None:
    needed, allowed = KEYS[event["ph"]]
    assert needed <= set(event) <= needed | allowed, event
    assert type(event["pid"]) is int and type(event["tid"]) is int, event
    assert isinstance(event["name"], str) and event["name"], event
    _time(event["ts"], event)
    if "cat" in event:
        assert isinstance(event["cat"], str) and event["cat"], event
    if "args" in event:
        assert isinstance(event["args"], dict), event
    if event["ph"] == "X":
        _time(event["dur"], event)
        assert event.get("cname", "good") in COLOURS, event
    if event["ph"] == "M":
        key, kind = METADATA[event["name"]]
        assert set(event["args"]) == {key} and type(event["args"][key]) is kind, event
    if event["ph"] == "f":
        assert event["bp"] == "e", event


def _time(value: Any, event: Event) -> None:
    """In microseconds."""
    assert type(value) in (int, float) and math.isfinite(value) and value >= 0, event


def _threads(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def first_and_last(event: Event) -> tuple[int, int]:
    """In nanoseconds, in which our times are whole."""
    first = round(event["ts"] * 1000)
    return first, first + round(event["dur"] * 1000)


def _nested(thread: list[Event]) -> None:
    """Slices of one thread lie within each other or apart."""
    around: list[int] = []
    for event in sorted(thread, key=lambda event: (first_and_last(event)[0], -first_and_last(event)[1])):
        first, last = first_and_last(event)
        while around and around[-1] <= first:
            around.pop()
        assert not around or last <= around[-1], f"{event} overlaps another one of its thread"
        around.append(last)


def _named(events: list[Event], slices: dict[tuple[int, int], list[Event]]) -> None:
    names = [(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"]
    assert len(names) == len(set(names)), "something is named twice"
    for pid, tid in slices:
        assert ("thread_name", pid, tid) in names
        assert any(name == "process_name" and pid == named for name, named, _ in names)


def _flows(events: list[Event], slices: dict[tuple[int, int], list[Event]]) -> None:
    ends: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["name"], event["id"]].append(event)
            at = round(event["ts"] * 1000)
            thread = slices[event["pid"], event["tid"]]
            assert any(first <= at <= last for first, last in map(first_and_last, thread)), f"{event} is on no slice"
    for flow in ends.values():
        assert [event["ph"] for event in sorted(flow, key=lambda event: event["ph"] == "f")] == ["s", "f"], flow
        start, end = sorted(flow, key=lambda event: event["ph"] == "f")
        assert start["ts"] <= end["ts"], flow
