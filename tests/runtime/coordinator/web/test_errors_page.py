"""The page of errors: a section for each. docs/guide/errors.md is made of the same words."""

from __future__ import annotations

import re
from html import unescape

from tests.runtime.coordinator.web.test_routes import Source, tell
from tests.runtime.http.serving import get, status

from collectived import errors
from collectived_runtime.coordinator.web.errors_page import WHAT_NEXT, render_errors_page
from collectived_runtime.http.server import HttpServer


def test_every_error_has_a_section_with_its_name() -> None:
    kinds = {getattr(errors, name) for name in errors.__all__} - {errors.Code, errors.CollectiveError}
    assert set(WHAT_NEXT) == kinds
    found = re.findall(r'<section id="(\w+)"><h2>(\w+) \((\w+)\)', render_errors_page().decode())
    assert found == [(kind.__name__, kind.__name__, kind.code.name) for kind in WHAT_NEXT]


def test_anybody_may_read_it_and_it_runs_nothing() -> None:
    async def story(server: HttpServer, source: Source) -> None:
        head, body = await get(server, "/errors")
        assert status(head) == 200 and body == render_errors_page() and b"text/html" in head
        assert b"script-src 'none'" in head and b"<script" not in body
        assert "the caller has not identified itself" in unescape(body.decode()).lower()

    tell(story)
