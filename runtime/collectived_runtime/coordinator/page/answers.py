"""Which answer a request gets. Pure: a request and who may look in, a response out.

The page is one file without data in it, so anybody may have it. The data are at `/status.json`, as `status --json`
gives them, and at `/page.json`: the same as `status`, and beside it as `hurts` what hurts, in words. A *door* says who
may have those: whoever shows a credential, or everybody who can reach the loopback. In the second case a web site must
not be able to look through its visitor's browser by giving its own name our address (DNS rebinding), so the name by
which we are called, the Host header, has to be one of ours.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

PAGE = "/"
DATA = ("/status.json", "/page.json")
_METHODS = ("GET", "HEAD")
_NO_STORE = {"cache-control": "no-store"}
# For every answer, so that no browser makes anything of it but what it is.
_GUARDS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
}
_NOTHING = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class Door:
    """Who may see the data.

    credentials: any of these is to be shown, as `authorization: Bearer …`; none: nobody has to.
    names: how we may be called where nobody has to show anything, beside addresses and `localhost`.
    only_loopback: of addresses only those of the loopback may call us.
    """

    credentials: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    only_loopback: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """Header names are in lower case; of those that came twice, the last."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    status: HTTPStatus
    body: bytes
    headers: Mapping[str, str]


def refusal(door: Door, request: Request) -> Response | None:
    """Why a request gets no page and no data; None where it does."""
    if request.method not in _METHODS:
        said = f"{request.method} is not offered here: this page can only be looked at"
        return plain(HTTPStatus.METHOD_NOT_ALLOWED, said, {"allow": ", ".join(_METHODS)})
    if not door.credentials and not _ours(door, request.headers.get("host", "")):
        return plain(
            HTTPStatus.MISDIRECTED_REQUEST,
            "this address answers only to its own name (another came in the Host header): use http://localhost:PORT/",
        )
    if request.target not in (PAGE, *DATA):
        return plain(HTTPStatus.NOT_FOUND, f"there is nothing here but {PAGE}, {' and '.join(DATA)}")
    if request.target in DATA and not _admitted(door, request.headers.get("authorization", "")):
        return plain(
            HTTPStatus.UNAUTHORIZED,
            "this needs the job's viewing token or its secret: 'authorization: Bearer TOKEN'",
            {"www-authenticate": 'Bearer realm="collectived"'},
        )
    return None


def page(source: bytes) -> Response:
    """The page; what a browser may do with it is in its headers."""
    return Response(
        HTTPStatus.OK,
        source,
        {**_GUARDS, **_NO_STORE, "content-type": "text/html; charset=utf-8", "content-security-policy": policy(source)},
    )


def data(body: bytes, headers: Mapping[str, str]) -> Response:
    """A JSON document."""
    return Response(
        HTTPStatus.OK,
        body,
        {
            **_GUARDS,
            **_NO_STORE,
            "content-type": "application/json",
            "content-security-policy": _NOTHING,
            "vary": "accept-encoding",
            **headers,
        },
    )


def plain(status: HTTPStatus, text: str, headers: Mapping[str, str] = _NO_STORE) -> Response:
    """An error, in words."""
    return Response(
        status,
        f"{text}\n".encode(),
        {
            **_GUARDS,
            **_NO_STORE,
            "content-type": "text/plain; charset=utf-8",
            "content-security-policy": _NOTHING,
            **headers,
        },
    )


def policy(source: bytes) -> str:
    """The Content-Security-Policy of a page: its own script and style, known by their digests, and its own server."""
    script, style = (" ".join(_digests(source, tag)) for tag in (b"script", b"style"))
    return (
        f"{_NOTHING}; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "require-trusted-types-for 'script'"
    )


def _digests(source: bytes, tag: bytes) -> list[str]:
    inside = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), source, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in inside]


def _ours(door: Door, host: str) -> bool:
    name = re.sub(r":\d*$", "", host).lower()
    if name == "localhost" or name in door.names:
        return True
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return address.is_loopback or not door.only_loopback


def _admitted(door: Door, authorization: str) -> bool:
    scheme, _, shown = authorization.partition(" ")
    given = shown.strip().encode()
    matches = [hmac.compare_digest(given, credential.encode()) for credential in door.credentials]
    return not matches or (scheme.lower() == "bearer" and any(matches))
