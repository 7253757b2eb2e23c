"""Who gets the page and its data, and what a browser may do with them. No sockets."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files

import pytest

from collectived_proto.viewing import http_address, viewing_token
from collectived_runtime.coordinator.page.answers import DATA, PAGE, Door, Request, Response, page, policy, refusal
from collectived_runtime.coordinator.page.server import door
from collectived_runtime.daemon import CannotStart

SOURCE = files("collectived_runtime.coordinator.page").joinpath("page.html").read_bytes()
LOOPBACK = Door()
GUARDED = Door(credentials=("s3cret", viewing_token("s3cret")))


def asked(
    where: Door, target: str = DATA[0], method: str = "GET", headers: Mapping[str, str] = {"host": "localhost:8080"}
) -> Response | None:
    return refusal(where, Request(method, target, headers))


def status(answer: Response | None) -> HTTPStatus | None:
    return answer.status if answer else None


@pytest.mark.parametrize("target", [PAGE, *DATA])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_page_and_the_data_can_be_looked_at(target: str, method: str) -> None:
    assert asked(LOOPBACK, target, method) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "get"])
def test_nothing_can_be_done(method: str) -> None:
    answer = asked(LOOPBACK, PAGE, method)
    assert answer and answer.status == 405 and answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "target", ["/index.html", "//", "/../status.json", "/status.json?x", "/status.json/", "*", "http://localhost/", ""]
)
def test_there_is_nothing_else(target: str) -> None:
    assert status(asked(LOOPBACK, target)) == 404


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8080", "127.9.9.9", "[::1]:8080", "[::1]"])
def test_the_loopback_answers_to_its_names(host: str) -> None:
    assert asked(LOOPBACK, headers={"host": host}) is None


@pytest.mark.parametrize("target", [PAGE, *DATA])
@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example:8080", "10.0.0.1", "[fe80::1]", "127.0.0.1.evil.example", "", ":80"],
)
def test_a_site_that_gives_its_name_our_address_sees_nothing(target: str, host: str) -> None:
    assert status(asked(LOOPBACK, target, headers={"host": host})) == 421
    assert status(asked(LOOPBACK, target, headers={})) == 421


def test_everybody_may_look_where_that_was_asked_for_but_by_no_foreign_name() -> None:
    everybody = door("0.0.0.0", "0.0.0.0", "s3cret", insecure=True)
    assert asked(everybody, headers={"host": "10.0.0.1:80"}) is None
    assert status(asked(everybody, headers={"host": "evil.example"})) == 421


@pytest.mark.parametrize("shown", ["Bearer s3cret", f"bearer {viewing_token('s3cret')}", "Bearer  s3cret "])
def test_where_others_can_reach_it_the_secret_or_its_token_opens(shown: str) -> None:
    assert asked(GUARDED, headers={"host": "train1.example", "authorization": shown}) is None


@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer ", "Bearer wrong", "s3cret", "Basic s3cret", "Bearer s3cretx", "Bearer ä"]
)
def test_and_nothing_else_does(shown: str) -> None:
    for target in DATA:
        answer = asked(GUARDED, target, headers={"host": "train1.example", "authorization": shown})
        assert answer and answer.status == 401 and answer.headers["www-authenticate"].startswith("Bearer")
    assert asked(GUARDED, PAGE, headers={"host": "train1.example"}) is None, "the page has no data in it"


def test_who_needs_a_credential_follows_from_the_address() -> None:
    assert not door("127.0.0.1", "127.0.0.1", "s3cret", insecure=False).credentials
    assert not door("::1", "::1", "", insecure=False).credentials
    assert door("10.0.0.1", "10.0.0.1", "s3cret", insecure=False) == GUARDED
    with pytest.raises(CannotStart, match="COLLECTIVED_SECRET"):
        door("0.0.0.0", "0.0.0.0", "", insecure=False)


def test_the_token_does_not_tell_the_secret() -> None:
    assert re.fullmatch("[0-9a-f]{32}", viewing_token("s3cret"))
    assert viewing_token("s3cret") != viewing_token("s3cres") and viewing_token("") == ""


def test_the_policy_lets_run_what_is_in_the_page_and_nothing_else() -> None:
    response = page(SOURCE)
    said = response.headers["content-security-policy"]
    assert said == policy(SOURCE) and "unsafe" not in said and "http" not in said
    (script,) = re.findall(rb"<script>(.*?)</script>", SOURCE, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in said
    for words in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for"):
        assert words in said


def test_the_page_takes_nothing_from_elsewhere_and_makes_no_markup_of_data() -> None:
    assert SOURCE.count(b"<script") == 1 and SOURCE.count(b"<style") == 1
    for word in (
        rb"https?:",
        rb"@import",
        rb"url\(",
        rb"innerHTML",
        rb"outerHTML",
        rb"insertAdjacent",
        rb"document\.write",
    ):
        assert not re.search(word, SOURCE), word
    assert not re.search(rb"\b(eval|Function|style)\s*[(=]", SOURCE), "the policy would not let it"
    assert not re.search(rb"\son[a-z]+\s*=", SOURCE)


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


@pytest.mark.parametrize("text", ["", "x", ":80", "[]:80", "localhost:", "65536", "-1", "٣", "http://localhost:80/"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected PORT or HOST:PORT"):
        http_address(text)
