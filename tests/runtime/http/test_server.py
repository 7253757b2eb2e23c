"""What is so of every page that a daemon serves, over real sockets: its HTTP, and that nobody can hold anything."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from tests.runtime.http.serving import ADMITTED, SECRET, TOKEN, Story, get, port, say, serve, status

from collectived_runtime.auth.credentials import TokenAuthenticator
from collectived_runtime.http.healthz import healthz_routes
from collectived_runtime.http.messages import Request, Response, Route, Routes, ok_response
from collectived_runtime.http.server import HttpLimits, HttpServer
from collectived_runtime.startup_error import StartupError

LARGE = 16 << 20  # bytes: more than sockets buffer
TEXT = "text/plain"


class Pages:
    """Routes of every kind."""

    def __init__(self) -> None:
        self.well = True
        self.asked = 0
        self.may = asyncio.Event()
        self.may.set()
        self.fault: Exception | None = None
        self.making = self.most = 0

    @property
    def routes(self) -> Routes:
        return {
            "/": Route(lambda _: ok_response(b"hello\n", TEXT), is_public=True),
            "/plain": Route(
                lambda request: ok_response(request.headers.get("x", "").encode(), TEXT), ignores_query=True
            ),
            "/later": Route(self._later),
            "/pieces": Route(lambda _: ok_response(self._pieces(), TEXT)),
            "/large": Route(lambda _: ok_response(b"x" * LARGE, TEXT)),
            **healthz_routes(lambda: self.well),
        }

    async def _later(self, request: Request) -> Response:
        self.asked += 1
        await self.may.wait()
        if self.fault:
            raise self.fault
        return ok_response(b"at last\n", TEXT)

    def _pieces(self) -> Iterator[bytes]:
        self.making += 1
        self.most = max(self.most, self.making)
        for number in range(200):
            if self.fault:
                raise self.fault
            yield b"%d\n" % number
        self.making -= 1


def tell(
    story: Story,
    pages: Pages | None = None,
    limits: HttpLimits | None = None,
    gate: TokenAuthenticator | None = None,
    address: str = "0",
) -> None:
    serve(
        lambda: HttpServer(
            "--http", address, (pages or Pages()).routes, gate or TokenAuthenticator(SECRET), limits or HttpLimits()
        ),
        story,
    )


def test_an_answer_has_its_length_its_guards_and_ends_the_connection() -> None:
    async def story(server: HttpServer) -> None:
        head, body = await get(server, "/")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and body == b"hello\n"
        for line in (
            b"content-type: text/plain",
            b"content-length: 6",
            b"connection: close",
            b"cache-control: no-store",
            b"x-content-type-options: nosniff",
            b"x-frame-options: DENY",
            b"content-security-policy: default-src 'none'",
            b"date: ",
        ):
            assert b"\r\n" + line in head, line
        head, nothing = await get(server, "/", method="HEAD")
        assert b"\r\ncontent-length: 6" in head and nothing == b""

    tell(story)


def test_pieces_are_one_answer_whose_length_is_known() -> None:
    async def story(server: HttpServer) -> None:
        head, body = await get(server, "/pieces", ADMITTED)
        assert body.split() == [b"%d" % number for number in range(200)]
        assert b"\r\ncontent-length: %d" % len(body) in head
        head, nothing = await get(server, "/pieces", ADMITTED, method="HEAD")
        assert b"\r\ncontent-length: %d" % len(body) in head and nothing == b""

    tell(story)


def test_others_have_their_turn_while_pieces_are_made_and_one_answer_is_made_at_a_time() -> None:
    pages = Pages()

    async def story(server: HttpServer) -> None:
        turns = 0
        asking = asyncio.gather(*(get(server, "/pieces", ADMITTED) for _ in range(3)))
        while not asking.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 200 and pages.most == 1

    tell(story, pages)


def test_a_header_that_comes_twice_is_read_as_one() -> None:
    async def story(server: HttpServer) -> None:
        _, body = await get(server, "/plain?what=ever", ADMITTED, "X: a", "x: b")
        assert body == b"a, b"

    tell(story)


@pytest.mark.parametrize("shown", [SECRET, TOKEN, "token-of-a-file"])
def test_the_secret_and_viewing_tokens_open(shown: str) -> None:
    gate = TokenAuthenticator(SECRET, token="token-of-a-file")

    async def story(server: HttpServer) -> None:
        for target in ("/plain", "/pieces", "/later"):
            assert status((await get(server, target, f"Authorization: Bearer {shown}"))[0]) == 200
        assert not gate.reject_counts

    tell(story, gate=gate)


def test_without_a_credential_only_what_is_open_is_told_also_on_the_loopback_and_refusals_are_counted() -> None:
    gate = TokenAuthenticator(SECRET)

    async def story(server: HttpServer) -> None:
        for target, expected in (("/", 200), ("/healthz", 200), ("/plain", 401), ("/pieces", 401), ("/later", 401)):
            head, _ = await get(server, target)
            assert status(head) == expected, target
            assert (b"\r\nwww-authenticate: Bearer" in head) == (expected == 401)
        for wrong in ("Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}, Bearer {TOKEN}"):
            assert status((await get(server, "/plain", f"Authorization: {wrong}"))[0]) == 401
        assert status((await get(server, "/plain", ADMITTED, ADMITTED))[0]) == 401
        assert gate.reject_counts == {("http", "nothing"): 3, ("http", "wrong"): 5}

    tell(story, gate=gate)


def test_insecure_lets_everybody_look_but_by_no_foreign_name() -> None:
    async def story(server: HttpServer) -> None:
        assert status((await get(server, "/plain"))[0]) == 200
        assert status((await say(server, b"GET /plain HTTP/1.1\r\nHost: evil.example\r\n\r\n"))[0]) == 421

    tell(story, gate=TokenAuthenticator(insecure=True))
    tell(story, gate=TokenAuthenticator(insecure=True), address="0.0.0.0:0")


def test_beyond_the_loopback_it_answers_to_any_name_but_needs_a_credential() -> None:
    async def story(server: HttpServer) -> None:
        assert server.address.startswith("0.0.0.0:") and f"//{socket.gethostname()}:" in server.url
        assert status((await say(server, b"GET /plain HTTP/1.1\r\nHost: train1\r\n\r\n"))[0]) == 401
        asked = f"GET /plain HTTP/1.1\r\nHost: train1\r\n{ADMITTED}\r\n\r\n"
        assert status((await say(server, asked.encode()))[0]) == 200

    tell(story, address="0.0.0.0:0")


def test_health_is_told_as_a_status_and_nothing_else() -> None:
    pages = Pages()

    async def story(server: HttpServer) -> None:
        head, body = await get(server, "/healthz")
        assert (status(head), body) == (200, b"SERVING\n")
        pages.well = False
        head, body = await get(server, "/healthz")
        assert (status(head), body) == (HTTPStatus.SERVICE_UNAVAILABLE, b"NOT_SERVING\n")

    tell(story, pages)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"what?\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000, 431),
        (b"GET /" + b"a" * 20_000, 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000, 405),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 200),
    ],
)
def test_whatever_is_said_gets_one_answer(text: bytes, expected: int) -> None:
    async def story(server: HttpServer) -> None:
        head, _ = await say(server, text)
        assert status(head) == expected, head

    tell(story)


def test_a_second_request_on_a_connection_is_not_read() -> None:
    async def story(server: HttpServer) -> None:
        one = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        _, body = await say(server, one + one)
        assert body == b"hello\n"

    tell(story)


def test_who_says_nothing_is_closed() -> None:
    async def story(server: HttpServer) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port(server)) for _ in range(2)]
        silent[0][1].write(b"GET / HTTP/1.1\r\nHost: local")
        endings = await asyncio.gather(*(reader.read() for reader, _ in silent), return_exceptions=True)
        assert all(ending == b"" or isinstance(ending, ConnectionError) for ending in endings)
        for _, writer in silent:
            writer.close()
        while server.connections:
            await asyncio.sleep(0)
        assert status((await get(server, "/"))[0]) == 200

    tell(story, limits=HttpLimits(connections=2, request_seconds=0.2))


def test_silent_connections_make_room_for_whoever_asks() -> None:
    async def story(server: HttpServer) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port(server)) for _ in range(7)]
        for _ in range(3):
            assert status((await get(server, "/"))[0]) == 200
        ended = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in silent[:3])), 20)
        assert ended == [b""] * 3, "the oldest have gone"
        for _, writer in silent:
            writer.close()

    tell(story, limits=HttpLimits(connections=4, request_seconds=3600))


def test_where_all_have_asked_one_beyond_the_last_place_is_closed_at_once() -> None:
    pages = Pages()

    async def story(server: HttpServer) -> None:
        pages.may.clear()
        first = asyncio.ensure_future(get(server, "/later", ADMITTED))
        while not server.connections or server._silent:
            await asyncio.sleep(0)
        assert await get(server, "/") == (b"", b""), "although the first keeps its place for an hour"
        pages.may.set()
        assert status((await first)[0]) == 200

    tell(story, pages, HttpLimits(connections=1, answer_seconds=3600))


def test_who_does_not_read_is_cut_off_and_holds_up_nobody() -> None:
    async def story(server: HttpServer) -> None:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, ("127.0.0.1", port(server)))
            await loop.sock_sendall(deaf, f"GET /large HTTP/1.1\r\nHost: localhost\r\n{ADMITTED}\r\n\r\n".encode())
            while not server.connections:
                await asyncio.sleep(0)
            assert status((await get(server, "/"))[0]) == 200
            while server.connections:
                await asyncio.sleep(0.01)

    tell(story, limits=HttpLimits(send_seconds=0.3))


def test_an_answer_that_takes_too_long_is_given_up() -> None:
    pages = Pages()

    async def story(server: HttpServer) -> None:
        pages.may.clear()
        assert await get(server, "/later", ADMITTED) == (b"", b"")
        pages.may.set()
        assert status((await get(server, "/"))[0]) == 200, "and others are answered"

    tell(story, pages, HttpLimits(answer_seconds=0.3))


@pytest.mark.parametrize("target", ["/later", "/pieces"])
def test_a_fault_is_said_in_the_log_alone(target: str, caplog: pytest.LogCaptureFixture) -> None:
    pages = Pages()
    pages.fault = RuntimeError("a fault of ours")

    async def story(server: HttpServer) -> None:
        head, body = await get(server, target, ADMITTED)
        assert status(head) == 500 and b"a fault" not in body
        assert "a fault of ours" in caplog.text and TOKEN not in caplog.text

    tell(story, pages)


def test_what_is_shown_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def story(server: HttpServer) -> None:
        await get(server, "/plain", f"Authorization: Bearer {SECRET}")
        await get(server, f"/?token={SECRET}", f"Authorization: Bearer wrong-{SECRET}")
        await say(server, f"GET /{SECRET} HTTP/1.1\r\n\r\n".encode())
        await say(server, f"{SECRET}\r\n\r\n".encode())

    with caplog.at_level(logging.DEBUG):
        tell(story)
    assert SECRET not in caplog.text


def test_addresses_that_cannot_be_served_are_refused_in_words() -> None:
    async def story(server: HttpServer) -> None:
        for address, words in (
            (str(port(server)), f"--metrics: cannot serve at 127.0.0.1:{port(server)}: .*in use.*another --metrics"),
            ("no-such-host.invalid:80", "no-such-host.invalid"),
            ("http", "--metrics: 'http' is no .* expected PORT or HOST:PORT"),
        ):
            with pytest.raises(StartupError, match=words):
                HttpServer("--metrics", address, {}, TokenAuthenticator(SECRET))

    tell(story)


@pytest.mark.parametrize("address", ["0", "0.0.0.0:0"])
def test_where_nobody_could_show_anything_it_is_not_served(address: str) -> None:
    with pytest.raises(StartupError, match="no secret by which.*COLLECTIVED_SECRET.*--viewing-token-file.*--insecure"):
        HttpServer("--metrics", address, {}, TokenAuthenticator())


def test_one_that_never_started_leaves_nothing() -> None:
    async def run() -> None:
        await HttpServer("--http", "0", {}, TokenAuthenticator(SECRET)).stop()

    asyncio.run(run())
