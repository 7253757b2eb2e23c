"""The page of errors: a section for each, which says what docs/guide/errors.md says."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from tests.runtime.coordinator.web.test_routes import Source, tell
from tests.runtime.http.serving import get, status

from collectived import errors
from collectived_runtime.coordinator.web.errors_page import WHAT_NEXT, render_errors_page
from collectived_runtime.http.server import HttpServer

GUIDE = Path(__file__).resolve().parents[4] / "docs/guide/errors.md"


def test_every_error_has_a_section_with_its_name() -> None:
    kinds = {getattr(errors, name) for name in errors.__all__} - {errors.Code, errors.CollectiveError}
    assert set(WHAT_NEXT) == kinds
    found = re.findall(r'<section id="(\w+)"><h2>(\w+) \((\w+)\)', render_errors_page().decode())
    assert found == [(kind.__name__, kind.__name__, kind.code.name) for kind in WHAT_NEXT]


def test_it_says_what_the_guide_says() -> None:
    rows = re.findall(r"^\| \[`(\w+Error)`\]\([^)]*\) \| (.*?) \| (.*?) \|$", GUIDE.read_text(), re.MULTILINE)
    plain = [tuple(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell) for cell in row) for row in rows]
    assert plain == [(kind.__name__, *what) for kind, what in WHAT_NEXT.items()]


def test_anybody_may_read_it_and_it_runs_nothing() -> None:
    async def story(server: HttpServer, source: Source) -> None:
        head, body = await get(server, "/errors")
        assert status(head) == 200 and body == render_errors_page() and b"text/html" in head
        assert b"script-src 'none'" in head and b"<script" not in body
        assert "the caller has not identified itself" in unescape(body.decode()).lower()

    tell(story)
