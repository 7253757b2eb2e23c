"""The coordinator's page over HTTP: the page, its data, and what a browser may do with them."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files

from google.protobuf.json_format import Parse
from tests.runtime.http.serving import ADMITTED, SECRET, get, serve, status

from collectived_proto.v1 import common_pb2
from collectived_proto.v1 import status_pb2 as pb
from collectived_runtime.auth.credentials import TokenAuthenticator
from collectived_runtime.coordinator.web.cache import StatusCache, derived_to_json
from collectived_runtime.coordinator.web.routes import (
    DATA_PATHS,
    content_security_policy,
    make_page_answer,
    make_page_server,
)
from collectived_runtime.http.server import HttpServer

REPLY = pb.StatusReply(unix_time=7, warnings=["<b>slow</b>"], coordinator=pb.CoordinatorStatus(address="c", job="j"))
SOURCE = files("collectived_runtime.coordinator.web").joinpath("page.html").read_bytes()


class Source:
    """Gives the status when it may, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.may = asyncio.Event()
        self.may.set()

    async def __call__(self) -> pb.StatusReply:
        self.asked += 1
        await self.may.wait()
        return REPLY


def tell(story: Callable[[HttpServer, Source], Awaitable[None]]) -> None:
    source = Source()
    picture = StatusCache(source)

    async def then(server: HttpServer) -> None:
        try:
            await story(server, source)
        finally:
            await picture.close()

    serve(lambda: make_page_server("0", picture, lambda: True, TokenAuthenticator(SECRET)), then)


def test_the_data_are_the_status_and_what_hurts() -> None:
    async def story(server: HttpServer, source: Source) -> None:
        head, body = await get(server, "/status.json", ADMITTED)
        assert b"content-type: application/json" in head and b"vary: accept-encoding" in head
        assert Parse(body, pb.StatusReply()) == REPLY
        assert set(json.loads(body)) == {field.name for field in pb.StatusReply.DESCRIPTOR.fields}
        _, body = await get(server, "/page.json", ADMITTED)
        document = json.loads(body)
        assert document["status"]["warnings"] == ["<b>slow</b>"]
        assert document["problems"] == [{"word": "warning", "severity": "warning", "sentence": "<b>slow</b>"}]
        head, body = await get(server, "/page.json", ADMITTED, "Accept-Encoding: gzip, br")
        assert b"content-encoding: gzip" in head and json.loads(gzip.decompress(body)) == document

    tell(story)


def test_the_page_has_no_data_in_it_and_is_open_the_data_are_not() -> None:
    async def story(server: HttpServer, source: Source) -> None:
        head, body = await get(server, "/")
        assert b"text/html" in head and body == SOURCE and b"content-security-policy: " in head
        for target in DATA_PATHS:
            assert status((await get(server, target))[0]) == 401
        assert status((await get(server, "/healthz"))[0]) == 200
        assert source.asked == 0

    tell(story)


def test_however_many_look_workers_are_asked_once() -> None:
    async def story(server: HttpServer, source: Source) -> None:
        source.may.clear()
        looks = [asyncio.ensure_future(get(server, "/page.json", ADMITTED)) for _ in range(5)]
        while source.asked == 0 or server.connections < len(looks):
            await asyncio.sleep(0)
        looks[0].cancel()
        source.may.set()
        answers = await asyncio.gather(*looks[1:])
        assert all(status(head) == 200 for head, _ in answers)
        assert source.asked == 1, "one who goes away takes the answer from nobody else"

    tell(story)


def test_the_policy_lets_run_what_is_in_the_page_and_nothing_else() -> None:
    said = make_page_answer(SOURCE).headers["content-security-policy"]
    assert said == content_security_policy(SOURCE) and "unsafe" not in said and "http" not in said
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


def test_the_page_is_told_what_the_other_faces_say_of_the_same() -> None:
    member = common_pb2.Member(rank=0, last_instance=2, last_op="barrier()")
    group = pb.GroupStatus(name="j/w", state="ready", size=1, members=[member], in_flight=[pb.InFlight(seconds=9)])
    workers = [
        pb.WorkerStatus(connected=True, draining=True, release="0.1.0"),
        pb.WorkerStatus(last_heartbeat_seconds=9),
    ]
    over = pb.GroupStatus(state="ended", members=[member])
    failure = pb.Failure(verdict=common_pb2.Verdict(code=9))
    assert derived_to_json(pb.StatusReply(workers=workers, groups=[group, over], failures=[failure])) == {
        "ranks": 1,
        "workers": ["draining", "lost"],
        "accounts": [True, False],
        "groups": [
            {"counted": True, "size": "1", "late": [True], "late_posts": [], "finished": ["#2"]},
            {"counted": False, "size": "0", "late": [], "late_posts": [], "finished": ["#2"]},
        ],
        "failures": ["FAILED_PRECONDITION"],
        "errors": ["FailedPreconditionError"],
    }
