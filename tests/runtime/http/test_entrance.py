"""Which requests are refused, and why. No sockets."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import pytest

from collectived_proto.viewing import http_address
from collectived_runtime.credentials import Right
from collectived_runtime.http.entrance import Names, names_at, refusal
from collectived_runtime.http.messages import Answer, Request, Route, answer

LOOPBACK = Names()
_HERE = Route(lambda _: answer(b"", "text/plain"))
ROUTES = {
    "/": Route(_HERE.respond, open=True),
    "/data": _HERE,
    "/asked": Route(_HERE.respond, query=True),
}


def asked(
    names: Names = LOOPBACK,
    target: str = "/data",
    method: str = "GET",
    headers: Mapping[str, str] = {"host": "localhost:8080"},
    right: Right = Right.LOOK,
) -> Answer | None:
    return refusal(ROUTES, names, right, Request(method, target, headers))


def status(refused: Answer | None) -> HTTPStatus | None:
    return refused.status if refused else None


@pytest.mark.parametrize("target", [*ROUTES, "/asked?", "/asked?name=x&y"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_is_there_can_be_looked_at(target: str, method: str) -> None:
    assert asked(target=target, method=method) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "get"])
def test_nothing_can_be_done(method: str) -> None:
    refused = asked(method=method, right=Right.ALL)
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
    assert status(asked(target=target, headers={"host": host}, right=Right.ALL)) == 421
    assert status(asked(target=target, headers={}, right=Right.ALL)) == 421


def test_who_may_not_look_gets_what_is_open_and_is_told_what_to_show() -> None:
    assert asked(target="/", right=Right.NOTHING) is None
    refused = asked(target="/data", right=Right.NOTHING)
    assert refused and refused.status == 401 and refused.headers["www-authenticate"].startswith("Bearer")
    assert b"viewing token" in bytes(refused.body if isinstance(refused.body, bytes) else b"")


def test_by_which_names_it_goes_follows_from_the_address() -> None:
    assert names_at("127.0.0.1", "127.0.0.1", insecure=False) == Names(frozenset({"127.0.0.1"}))
    assert names_at("Box", "::1", insecure=True) == Names(frozenset({"box"}))
    assert names_at("10.0.0.1", "10.0.0.1", insecure=False) == Names(None)
    everybody = names_at("0.0.0.0", "0.0.0.0", insecure=True)
    assert asked(everybody, headers={"host": "10.0.0.1:80"}) is None
    assert status(asked(everybody, headers={"host": "evil.example"})) == 421
    assert asked(Names(None), headers={"host": "train1.example"}) is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:80", ("::1", 80)),
        ("train1.example:65535", ("train1.example", 65535)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert http_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "x", ":80", "[]:80", "localhost:", "host:x", "65536", "1:70000", "-1", "٣", "http://localhost:80/"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no \[HOST:\]PORT: expected PORT or HOST:PORT"):
        http_address(text)
