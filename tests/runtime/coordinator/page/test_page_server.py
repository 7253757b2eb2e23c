"""The page's HTTP over real sockets: what it answers, and that nobody can hold anything."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import socket
from collections.abc import Awaitable, Callable

import pytest
from google.protobuf.json_format import Parse

from collectived_proto.v1 import status_pb2 as pb
from collectived_runtime.coordinator.page.picture import Picture
from collectived_runtime.coordinator.page.server import Limits, PageServer
from collectived_runtime.daemon import CannotStart

REPLY = pb.StatusReply(unix_time=7, warnings=["<b>slow</b>"], coordinator=pb.CoordinatorStatus(address="c", job="j"))
PATIENCE = 20.0


class Source:
    """Gives the status when it may, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.may = asyncio.Event()
        self.may.set()
        self.reply = REPLY
        self.fault: Exception | None = None

    async def __call__(self) -> pb.StatusReply:
        self.asked += 1
        await self.may.wait()
        if self.fault:
            raise self.fault
        return self.reply


Story = Callable[[PageServer, Source], Awaitable[None]]


def serve(story: Story, limits: Limits | None = None, address: str = "0", secret: str = "s3cret") -> None:
    """Tells a story to a server."""

    async def run() -> None:
        source = Source()
        server = PageServer(address, Picture(source), secret, limits=limits or Limits())
        await server.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await story(server, source)
        finally:
            await server.stop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, "everything that it started has ended"

    asyncio.run(run())


def port(server: PageServer) -> int:
    return int(server.url.rstrip("/").rpartition(":")[2])


async def say(server: PageServer, text: bytes) -> tuple[bytes, bytes]:
    """Sends bytes; the head and the body of what comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port(server))
    try:
        writer.write(text)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return head, body


async def get(server: PageServer, target: str, *headers: str) -> tuple[bytes, bytes]:
    lines = (f"GET {target} HTTP/1.1", f"Host: localhost:{port(server)}", *headers, "", "")
    return await say(server, "\r\n".join(lines).encode())


def test_the_data_are_the_status_and_what_hurts() -> None:
    async def story(server: PageServer, source: Source) -> None:
        head, body = await get(server, "/status.json")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"\r\nconnection: close" in head
        assert b"content-type: application/json" in head and b"cache-control: no-store" in head
        assert Parse(body, pb.StatusReply()) == REPLY
        assert set(json.loads(body)) == {field.name for field in pb.StatusReply.DESCRIPTOR.fields}
        _, body = await get(server, "/page.json")
        told = json.loads(body)
        assert told["status"]["warnings"] == ["<b>slow</b>"]
        assert told["hurts"] == [{"word": "warning", "severity": "warning", "sentence": "<b>slow</b>"}]
        head, body = await get(server, "/page.json", "Accept-Encoding: gzip, br")
        assert b"content-encoding: gzip" in head and json.loads(gzip.decompress(body)) == told

    serve(story)


def test_the_page_comes_whole_and_a_head_without_it() -> None:
    async def story(server: PageServer, source: Source) -> None:
        head, body = await get(server, "/")
        assert b"text/html" in head and body.endswith(b"</html>\n") and b"content-security-policy: " in head
        assert f"content-length: {len(body)}".encode() in head
        head, nothing = await say(server, b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head and nothing == b""
        assert source.asked == 0

    serve(story)


def test_however_many_look_workers_are_asked_once() -> None:
    async def story(server: PageServer, source: Source) -> None:
        source.may.clear()
        looks = [asyncio.ensure_future(get(server, "/page.json")) for _ in range(5)]
        while source.asked == 0:
            await asyncio.sleep(0)
        looks[0].cancel()
        source.may.set()
        answers = await asyncio.gather(*looks[1:])
        assert all(head.startswith(b"HTTP/1.1 200") for head, _ in answers)
        assert source.asked == 1, "one who goes away takes the answer from nobody else"

    serve(story)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000, b"431"),
        (b"GET /" + b"a" * 20_000, b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"GET / HTTP/1.0\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"421"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000, b"405"),
        (b"GET /status.json HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"200"),
    ],
)
def test_whatever_is_said_gets_one_answer(text: bytes, status: bytes) -> None:
    async def story(server: PageServer, source: Source) -> None:
        head, _ = await say(server, text)
        assert head.split()[1] == status, head

    serve(story)


def test_a_second_request_on_a_connection_is_not_read() -> None:
    async def story(server: PageServer, source: Source) -> None:
        one = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        _, body = await say(server, one + one)
        assert body.count(b"HTTP/1.1") == 0 and body.count(b"<!doctype") == 1

    serve(story)


def test_who_says_nothing_is_closed_and_so_is_who_comes_when_all_places_are_taken() -> None:
    async def story(server: PageServer, source: Source) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port(server)) for _ in range(3)]
        silent[0][1].write(b"GET / HTTP/1.1\r\nHost: local")
        endings = await asyncio.gather(*(reader.read() for reader, _ in silent), return_exceptions=True)
        assert all(ending == b"" or isinstance(ending, ConnectionError) for ending in endings)
        for _, writer in silent:
            writer.close()
        head, _ = await get(server, "/")
        assert head.startswith(b"HTTP/1.1 200")

    serve(story, Limits(connections=2, request_seconds=0.2))


def test_one_beyond_the_last_place_is_closed_at_once() -> None:
    async def story(server: PageServer, source: Source) -> None:
        first = await asyncio.open_connection("127.0.0.1", port(server))
        reader, writer = await asyncio.open_connection("127.0.0.1", port(server))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b"", "although the first keeps its place for an hour"
        writer.close()
        first[1].close()

    serve(story, Limits(connections=1, request_seconds=3600))


def test_who_does_not_read_holds_nothing() -> None:
    async def story(server: PageServer, source: Source) -> None:
        source.reply = pb.StatusReply(warnings=["x" * (16 << 20)])  # more than sockets buffer
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", port(server)))
            slow.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while source.asked == 0:
                await asyncio.sleep(0.01)
            source.reply = REPLY
            head = b""
            while not head.startswith(b"HTTP/1.1 200"):  # its place is the only one
                try:
                    head, _ = await get(server, "/")
                except ConnectionError:
                    await asyncio.sleep(0.05)

    serve(story, Limits(connections=1, send_seconds=0.3))


def test_an_answer_that_takes_too_long_is_given_up_and_a_fault_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def story(server: PageServer, source: Source) -> None:
        source.may.clear()
        head, _ = await get(server, "/status.json")
        assert head == b""
        source.fault = RuntimeError("a fault of ours")
        source.may.set()
        head, body = await get(server, "/status.json")
        assert b" 500 " in head and b"a fault" not in body
        assert "a fault of ours" in caplog.text

    serve(story, Limits(answer_seconds=0.3))


def test_what_is_shown_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def story(server: PageServer, source: Source) -> None:
        await get(server, "/status.json", "Authorization: Bearer s3cret")
        await get(server, "/?token=s3cret", "Authorization: Bearer wrong-s3cret")
        await say(server, b"GET /s3cret HTTP/1.1\r\n\r\n")

    with caplog.at_level(logging.DEBUG):
        serve(story)
    assert "s3cret" not in caplog.text


def test_addresses_that_cannot_be_served_are_refused_in_words() -> None:
    async def story(server: PageServer, source: Source) -> None:
        for address, words in (
            (str(port(server)), "in use"),
            ("no-such-host.invalid:80", "no-such-host.invalid"),
            ("http", "expected PORT or HOST:PORT"),
        ):
            with pytest.raises(CannotStart, match=words):
                PageServer(address, Picture(source), "s3cret")
        with pytest.raises(CannotStart, match="no secret by which"):
            PageServer("0.0.0.0:0", Picture(source), "")

    serve(story)


def test_beyond_the_loopback_the_link_names_the_host_and_needs_a_token() -> None:
    async def story(server: PageServer, source: Source) -> None:
        assert server.needs_token and f"//{socket.gethostname()}:" in server.url
        head, _ = await get(server, "/page.json")
        assert b" 401 " in head
        head, _ = await get(server, "/page.json", "Authorization: Bearer s3cret")
        assert b" 200 " in head

    serve(story, address="0.0.0.0:0")
