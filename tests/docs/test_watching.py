"""docs/operate/watching.md lists keys, views, paths and limits: those that the code has."""

from __future__ import annotations

import re

from tests.docs.contents import ROOT

from collectived_launcher.hosts.loop import PROGRESS_INTERVAL
from collectived_launcher.top.state import KEYS, VIEWS
from collectived_proto.report.progress import REFRESH_SECONDS, Progress
from collectived_runtime.coordinator.web.routes import DATA_PATHS, ERRORS, PAGE
from collectived_runtime.http.healthz import healthz_routes
from collectived_runtime.http.server import HttpLimits

TEXT = (ROOT / "docs/operate/watching.md").read_text()


def first_column(of: str) -> list[str]:
    """Of the table under this heading of a column."""
    (table,) = re.findall(rf"^\| {of} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    return [row.split("|")[1].strip() for row in table.splitlines()]


def test_every_key_is_there_in_the_words_of_the_help() -> None:
    assert first_column("key") == [key for key, _ in KEYS]
    assert all(f"| {key} | {meaning} |" in TEXT for key, meaning in KEYS)


def test_every_view_and_every_path_is_there() -> None:
    assert first_column("view") == [view.value for view in VIEWS]
    assert first_column("path") == [f"`{path}`" for path in (PAGE, *DATA_PATHS, ERRORS, *healthz_routes(bool))]


def test_the_limits_are_those_of_the_server() -> None:
    limits = HttpLimits()
    said = " ".join(TEXT.split())
    assert (
        f"{limits.connections} connections at a time, one request each, {limits.header_bytes} bytes of headers" in said
    )
    assert f"{limits.request_seconds:g} s to ask and {limits.send_seconds:g} s to take the answer" in said


def test_the_line_of_long_work_is_there_with_its_interval() -> None:
    assert REFRESH_SECONDS == PROGRESS_INTERVAL
    assert f"a line every {REFRESH_SECONDS:g} seconds" in TEXT
    shown = Progress("collectived doctor", "asking hosts", 2, "hosts")
    shown.advance("localhost")
    assert f"collectived doctor: {shown.describe()}, 10 s so far\n" in TEXT
