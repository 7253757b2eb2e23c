"""A request, the answer to it, and the route between them: a function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

NOTHING = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""The Content-Security-Policy of what is no page."""
# For every answer, so that no browser makes anything of it but what it is, nor keeps it.
_GUARDS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "content-security-policy": NOTHING,
}


@dataclass(frozen=True, slots=True)
class Request:
    """Header names are in lower case; values of a name that came twice are joined by commas."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """`body` may come in pieces, each of which takes at most a millisecond to be made."""

    status: HTTPStatus
    body: bytes | Iterable[bytes]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Route:
    """What is at a path.

    respond: makes the answer; quickly where it is no coroutine. open: nobody has to show anything. query: what follows
    a `?` is passed over, instead of being another path where nothing is.
    """

    respond: Callable[[Request], Answer | Awaitable[Answer]]
    open: bool = False
    query: bool = False


Routes = Mapping[str, Route]


def answer(body: bytes | Iterable[bytes], kind: str, headers: Mapping[str, str] = {}) -> Answer:
    """What was asked for. `kind` is its content type."""
    return Answer(HTTPStatus.OK, body, {**_GUARDS, "content-type": kind, **headers})


def plain(status: HTTPStatus, text: str, headers: Mapping[str, str] = {}) -> Answer:
    """A line of text."""
    return Answer(status, f"{text}\n".encode(), {**_GUARDS, "content-type": "text/plain; charset=utf-8", **headers})


def health(well: Callable[[], bool]) -> Routes:
    """`/healthz`: whether this daemon can do its work now, and nothing else; so it is open."""

    def respond(request: Request) -> Answer:
        return plain(HTTPStatus.OK, "SERVING") if well() else plain(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_SERVING")

    return {"/healthz": Route(respond, open=True, query=True)}
