"""The endpoint: what it answers, and that nobody can hold it up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from collectived_runtime.daemon import CannotStart
from collectived_runtime.metrics import server as module
from collectived_runtime.metrics.catalogue import WORKER
from collectived_runtime.metrics.page import PAUSE, Reading, numbers
from collectived_runtime.metrics.server import MOST_CONNECTIONS, MetricsServer, address

Story = Callable[[int, MetricsServer], Awaitable[None]]


class Told:
    """A source with so many groups."""

    def __init__(self, groups: int = 3) -> None:
        self.groups = groups
        self.well = True

    def read(self) -> Iterator[Reading | None]:
        yield PAUSE
        groups = ((("0", f"g{number}"), 1.0) for number in range(self.groups))
        yield numbers(WORKER["collectived_ranks"], groups)


def served(story: Story, source: Told | None = None) -> None:
    async def run() -> None:
        told = source or Told()
        server = MetricsServer(told, lambda: told.well)
        where = await server.start("127.0.0.1:0")
        try:
            await story(int(where.rpartition(":")[2]), server)
        finally:
            await server.close()

    asyncio.run(run())


async def ask(port: int, request: str) -> tuple[str, dict[str, str], str]:
    """Status line, headers and body of an answer; all "" where it is cut off."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request.encode())
        answer = (await reader.read()).decode()
    except ConnectionError:
        return "", {}, ""
    finally:
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    status, *headers = head.split("\r\n")
    return status, {key: value for key, _, value in (line.partition(": ") for line in headers)}, body


def get(path: str, *headers: str, method: str = "GET") -> str:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: here", *headers, "", ""))


def test_metrics_are_told_in_the_format_that_is_asked_for() -> None:
    async def story(port: int, server: MetricsServer) -> None:
        status, headers, body = await ask(port, get("/metrics"))
        assert (status, int(headers["Content-Length"])) == ("HTTP/1.1 200 OK", len(body))
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert 'collectived_ranks{group="g2",worker="0"} 1.0' in body
        status, headers, body = await ask(port, get("/metrics", "accept: application/openmetrics-text;version=1.0.0"))
        assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert body.endswith("# EOF\n")
        status, headers, body = await ask(port, get("/metrics?name=x", method="HEAD"))
        assert status == "HTTP/1.1 200 OK" and int(headers["Content-Length"]) > 0 and body == ""

    served(story)


def test_what_is_not_there_is_said() -> None:
    async def story(port: int, server: MetricsServer) -> None:
        assert (await ask(port, get("/")))[0] == "HTTP/1.1 404 Not Found"
        status, headers, _ = await ask(port, get("/metrics", method="POST"))
        assert (status, headers["Allow"]) == ("HTTP/1.1 405 Method Not Allowed", "GET, HEAD")
        assert (await ask(port, "what?\r\n\r\n"))[0] == "HTTP/1.1 400 Bad Request"
        assert await ask(port, get("/metrics", "x: " + "y" * module.LARGEST_REQUEST)) == ("", {}, "")

    served(story)


def test_health_is_told_as_a_status() -> None:
    told = Told()

    async def story(port: int, server: MetricsServer) -> None:
        assert (await ask(port, get("/healthz")))[0] == "HTTP/1.1 200 OK"
        told.well = False
        status, _, body = await ask(port, get("/healthz"))
        assert (status, body) == ("HTTP/1.1 503 Service Unavailable", "NOT_SERVING\n")

    served(story, told)


def test_who_asks_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_SECONDS", 0.05)

    async def story(port: int, server: MetricsServer) -> None:
        assert await ask(port, "GET /metr") == ("", {}, "")
        assert not server._connections

    served(story)


def test_who_does_not_read_is_cut_off_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", 0.2)

    async def story(port: int, server: MetricsServer) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            await loop.sock_connect(deaf, ("127.0.0.1", port))
            await loop.sock_sendall(deaf, get("/metrics").encode())
            while not server._connections:
                await asyncio.sleep(0)
            assert (await ask(port, get("/healthz")))[0] == "HTTP/1.1 200 OK"
            while server._connections:
                await asyncio.sleep(0.01)

    served(story, Told(100_000))


def test_of_too_many_at_once_the_last_are_cut_off() -> None:
    async def story(port: int, server: MetricsServer) -> None:
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST_CONNECTIONS)]
        while len(server._connections) < MOST_CONNECTIONS:
            await asyncio.sleep(0)
        assert await ask(port, get("/metrics")) == ("", {}, "")
        for _, writer in open_ones:
            writer.close()
        while server._connections:
            await asyncio.sleep(0)
        assert (await ask(port, get("/metrics")))[0] == "HTTP/1.1 200 OK"

    served(story)


def test_others_have_their_turn_while_a_page_is_made() -> None:
    async def story(port: int, server: MetricsServer) -> None:
        turns = 0
        asking = asyncio.ensure_future(ask(port, get("/metrics")))
        while not asking.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 100  # a page of 200 pieces

    served(story, Told(10_000))


@pytest.mark.parametrize(
    ("text", "found"),
    [("9450", ("127.0.0.1", 9450)), (":0", ("127.0.0.1", 0)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:2", ("::1", 2))],
)
def test_an_address_needs_no_host(text: str, found: tuple[str, int]) -> None:
    assert address(text) == found


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "1:70000"])
def test_what_is_no_address_is_quoted(text: str) -> None:
    async def run() -> None:
        with pytest.raises(CannotStart, match=r"is no \[HOST:\]PORT"):
            await MetricsServer(Told()).start(text)

    asyncio.run(run())


def test_a_port_in_use_is_named() -> None:
    async def story(port: int, server: MetricsServer) -> None:
        with pytest.raises(CannotStart, match=f"cannot serve metrics at {port}: .*in use.*another"):
            await MetricsServer(Told()).start(str(port))

    served(story)
