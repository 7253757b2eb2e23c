"""The parts of the web page, as routes, and the server that has them.

The page is one file without data in it, so every caller may have it. The data, for callers that may view, are at
`/status.json`, as `status --json` gives them, and at `/page.json`: the same as `status`, and beside it as `findings`
the problems, in words, and as `told` the texts that commands and page share. The meaning of each error is at `/errors`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from functools import partial
from importlib.resources import files

from collectived_runtime.auth.credentials import TokenAuthenticator
from collectived_runtime.coordinator.web.cache import StatusCache
from collectived_runtime.coordinator.web.errors_page import render_errors_page
from collectived_runtime.http.healthz import healthz_routes
from collectived_runtime.http.messages import (
    EMPTY_PAGE_CSP,
    Request,
    Response,
    Route,
    Routes,
    ok_response,
)
from collectived_runtime.http.server import GetTlsContext, HttpServer

PAGE, ERRORS = "/", "/errors"
DATA_PATHS = ("/status.json", "/page.json")


def make_routes(picture: StatusCache) -> Routes:
    """Return the routes of the page and its data."""
    shown = make_page_answer(files(__package__).joinpath("page.html").read_bytes())
    meanings = make_page_answer(render_errors_page())
    data = Route(partial(_serve_data, picture))
    return {
        PAGE: Route(lambda _: shown, is_public=True),
        ERRORS: Route(lambda _: meanings, is_public=True),
        **dict.fromkeys(DATA_PATHS, data),
    }


def make_page_server(
    address: str, picture: StatusCache, well: Callable[[], bool], gate: TokenAuthenticator, secure: GetTlsContext = None
) -> HttpServer:
    """Make the server that `--http` asks for. `well` is for `/healthz`; the rest is as in `HttpServer`."""
    return HttpServer("--http", address, {**make_routes(picture), **healthz_routes(well)}, gate, secure=secure)


def make_page_answer(source: bytes) -> Response:
    """The page. Its headers limit what a browser may do with it."""
    return ok_response(source, "text/html; charset=utf-8", {"content-security-policy": content_security_policy(source)})


async def _serve_data(picture: StatusCache, request: Request) -> Response:
    document = (await picture.documents())[request.target]
    varies = {"vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return ok_response(document.gzipped, "application/json", {**varies, "content-encoding": "gzip"})
    return ok_response(document.plain, "application/json", varies)


def content_security_policy(source: bytes) -> str:
    """The Content-Security-Policy of a page: its own script and style, known by their digests, and its own server."""
    script, style = (" ".join(_digests(source, tag)) or "'none'" for tag in (b"script", b"style"))
    return (
        f"{EMPTY_PAGE_CSP}; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "require-trusted-types-for 'script'"
    )


def _digests(source: bytes, tag: bytes) -> list[str]:
    inside = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), source, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in inside]
