"""What the page is made of, as routes, and the server that has them.

The page is one file without data in it, so anybody may have it. The data, for whoever may look, are at `/status.json`,
as `status --json` gives them, and at `/page.json`: the same as `status`, and beside it as `hurts` what hurts, in words,
and as `told` what three faces say alike.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from functools import partial
from importlib.resources import files

from collectived_runtime.coordinator.page.picture import Picture
from collectived_runtime.credentials import Gate
from collectived_runtime.http.messages import NOTHING, Answer, Request, Route, Routes, answer, health
from collectived_runtime.http.server import HttpServer, Secure

PAGE = "/"
DATA = ("/status.json", "/page.json")


def routes(picture: Picture) -> Routes:
    """Of the page and its data."""
    shown = page(files(__package__).joinpath("page.html").read_bytes())
    data = Route(partial(_data, picture))
    return {PAGE: Route(lambda _: shown, open=True), **dict.fromkeys(DATA, data)}


def page_server(
    address: str, picture: Picture, well: Callable[[], bool], gate: Gate, secure: Secure = None
) -> HttpServer:
    """What `--http` asks for. `well` is for `/healthz`; the rest is as in `HttpServer`."""
    return HttpServer("--http", address, {**routes(picture), **health(well)}, gate, secure=secure)


def page(source: bytes) -> Answer:
    """The page; what a browser may do with it is in its headers."""
    return answer(source, "text/html; charset=utf-8", {"content-security-policy": policy(source)})


async def _data(picture: Picture, request: Request) -> Answer:
    document = (await picture.documents())[request.target]
    varies = {"vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return answer(document.gzipped, "application/json", {**varies, "content-encoding": "gzip"})
    return answer(document.plain, "application/json", varies)


def policy(source: bytes) -> str:
    """The Content-Security-Policy of a page: its own script and style, known by their digests, and its own server."""
    script, style = (" ".join(_digests(source, tag)) for tag in (b"script", b"style"))
    return (
        f"{NOTHING}; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "require-trusted-types-for 'script'"
    )


def _digests(source: bytes, tag: bytes) -> list[str]:
    inside = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), source, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in inside]
