"""Which requests are refused, and why. No sockets."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import pytest

from collectived_runtime.auth.credentials import AccessLevel
from collectived_runtime.http.messages import Request, Response, Route, ok_response
from collectived_runtime.http.policy import AllowedHosts, check_request, compute_allowed_hosts

LOOPBACK = AllowedHosts()
_HERE = Route(lambda _: ok_response(b"", "text/plain"))
ROUTES = {
    "/": Route(_HERE.handler, is_public=True),
    "/data": _HERE,
    "/asked": Route(_HERE.handler, ignores_query=True),
}


def asked(
    names: AllowedHosts = LOOPBACK,
    target: str = "/data",
    method: str = "GET",
    headers: Mapping[str, str] = {"host": "localhost:8080"},
    right: AccessLevel = AccessLevel.VIEW,
) -> Response | None:
    return check_request(ROUTES, names, right, Request(method, target, headers))


def status(refused: Response | None) -> HTTPStatus | None:
    return refused.status if refused else None


@pytest.mark.parametrize("target", [*ROUTES, "/asked?", "/asked?name=x&y"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_is_there_can_be_looked_at(target: str, method: str) -> None:
    assert asked(target=target, method=method) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "get"])
def test_nothing_can_be_done(method: str) -> None:
    refused = asked(method=method, right=AccessLevel.ALL)
    assert refused and refused.status == 405 and refused.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "target", ["/index.html", "//", "/../data", "/data?x", "/data?", "/data/", "*", "http://localhost/", "", "?"]
)
def test_there_is_nothing_else(target: str) -> None:
    refused = asked(target=target)
    assert refused and refused.status == 404
    assert refused.body == b"there is nothing here but /, /data and /asked\n"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8080", "127.9.9.9", "[::1]:8080", "[::1]"])
def test_the_loopback_answers_to_its_names(host: str) -> None:
    assert asked(headers={"host": host}) is None


@pytest.mark.parametrize("target", list(ROUTES))
@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example:8080", "10.0.0.1", "[fe80::1]", "127.0.0.1.evil.example", "", ":80"],
)
def test_a_site_that_gives_its_name_our_address_sees_nothing(target: str, host: str) -> None:
    assert status(asked(target=target, headers={"host": host}, right=AccessLevel.ALL)) == 421
    assert status(asked(target=target, headers={}, right=AccessLevel.ALL)) == 421


def test_who_may_not_look_gets_what_is_open_and_is_told_what_to_show() -> None:
    assert asked(target="/", right=AccessLevel.NONE) is None
    refused = asked(target="/data", right=AccessLevel.NONE)
    assert refused and refused.status == 401 and refused.headers["www-authenticate"].startswith("Bearer")
    assert b"viewing token" in bytes(refused.body if isinstance(refused.body, bytes) else b"")


def test_by_which_names_it_goes_follows_from_the_address() -> None:
    assert compute_allowed_hosts("127.0.0.1", "127.0.0.1", insecure=False) == AllowedHosts(frozenset({"127.0.0.1"}))
    assert compute_allowed_hosts("Box", "::1", insecure=True) == AllowedHosts(frozenset({"box"}))
    assert compute_allowed_hosts("10.0.0.1", "10.0.0.1", insecure=False) == AllowedHosts(None)
    everybody = compute_allowed_hosts("0.0.0.0", "0.0.0.0", insecure=True)
    assert asked(everybody, headers={"host": "10.0.0.1:80"}) is None
    assert status(asked(everybody, headers={"host": "evil.example"})) == 421
    assert asked(AllowedHosts(None), headers={"host": "train1.example"}) is None
