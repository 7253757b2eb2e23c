"""Which requests get no answer, and why. Pure: a request and what its sender may do in, a refusal out.

A web site must not be able to look through its visitor's browser by giving its own name the daemon's address (DNS
rebinding). So on the loopback the name in the request, the Host header, has to be one of the daemon; elsewhere that is
so only where no credential is needed, for a web site knows none.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from http import HTTPStatus

from collectived_runtime.auth.credentials import AccessLevel
from collectived_runtime.http.messages import Request, Response, Route, Routes, text_response

METHODS = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The host names that requests may use, beside addresses and `localhost`; None: any.

    loopback_only: of addresses only those of the loopback may call us.
    """

    names: frozenset[str] | None = frozenset()
    loopback_only: bool = True


def compute_allowed_hosts(host: str, address: str, insecure: bool) -> AllowedHosts:
    """The allowed hosts at an address: `host` as it was configured, and the address that it has."""
    if ipaddress.ip_address(address).is_loopback:
        return AllowedHosts(frozenset({host.lower()}))
    if insecure:
        return AllowedHosts(frozenset({host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}), False)
    return AllowedHosts(None)


def find_route(routes: Routes, target: str) -> Route | None:
    """Return what is there; None: nothing."""
    path, mark, _ = target.partition("?")
    found = routes.get(path)
    return None if found is None or (mark and not found.ignores_query) else found


def check_request(routes: Routes, names: AllowedHosts, right: AccessLevel, request: Request) -> Response | None:
    """Return why a request gets nothing; None where it does."""
    if request.method not in METHODS:
        said = f"{request.method} is not offered here: this can only be looked at"
        return text_response(HTTPStatus.METHOD_NOT_ALLOWED, said, {"allow": ", ".join(METHODS)})
    if not _is_allowed_host(names, request.headers.get("host", "")):
        return text_response(
            HTTPStatus.MISDIRECTED_REQUEST,
            "this address answers only to its own name (another came in the Host header): use http://localhost:PORT/",
        )
    route = find_route(routes, request.target)
    if route is None:
        *others, last = routes
        listed = f"{', '.join(others)} and {last}" if others else last
        return text_response(HTTPStatus.NOT_FOUND, f"there is nothing here but {listed}")
    if not route.is_public and right < AccessLevel.VIEW:
        return text_response(
            HTTPStatus.UNAUTHORIZED,
            "this needs the job's viewing token or its secret: 'authorization: Bearer TOKEN'",
            {"www-authenticate": 'Bearer realm="collectived"'},
        )
    return None


def _is_allowed_host(names: AllowedHosts, host: str) -> bool:
    if names.names is None:
        return True
    name = re.sub(r":\d*$", "", host).lower()
    if name == "localhost" or name in names.names:
        return True
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return address.is_loopback or not names.loopback_only
