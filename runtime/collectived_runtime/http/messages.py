"""A request, the answer to it, and the route between them: a function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

EMPTY_PAGE_CSP = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""The Content-Security-Policy of what is no page."""
# For every answer, so that no browser makes anything of it but what it is, nor keeps it.
_SECURITY_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "content-security-policy": EMPTY_PAGE_CSP,
}


@dataclass(frozen=True, slots=True)
class Request:
    """Header names are in lower case; values of a name that came twice are joined by commas."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    """`body` may come in pieces, each of which takes at most a millisecond to be made."""

    status: HTTPStatus
    body: bytes | Iterable[bytes]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Route:
    """The handler of a path.

    handler: makes the answer; quickly where it is no coroutine. is_public: no credential is needed. ignores_query:
    the part after a `?` is ignored, instead of being another path, which is not found.
    """

    handler: Callable[[Request], Response | Awaitable[Response]]
    is_public: bool = False
    ignores_query: bool = False


Routes = Mapping[str, Route]


def ok_response(body: bytes | Iterable[bytes], kind: str, headers: Mapping[str, str] = {}) -> Response:
    """Return what was asked for; `kind` is its content type."""
    return Response(HTTPStatus.OK, body, {**_SECURITY_HEADERS, "content-type": kind, **headers})


def text_response(status: HTTPStatus, text: str, headers: Mapping[str, str] = {}) -> Response:
    return Response(
        status, f"{text}\n".encode(), {**_SECURITY_HEADERS, "content-type": "text/plain; charset=utf-8", **headers}
    )
