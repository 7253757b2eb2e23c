"""The endpoint for scrapers: `GET /metrics` over HTTP/1.1, in the daemon's event loop.

It is no web server. One answer at a time is made, in pieces between which everybody else has a turn; who asks slowly,
reads slowly or comes too often is cut off, so that nothing is held for long on anybody's account.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from prometheus_client.exposition import choose_encoder

from collectived_runtime.daemon import CannotStart
from collectived_runtime.metrics.page import Source, pieces

log = logging.getLogger("collectived.metrics")

MOST_CONNECTIONS = 16
ASK_SECONDS = 5.0  # within which a request must have come
READ_SECONDS = 10.0  # within which an answer must have been read
LARGEST_REQUEST = 8 << 10
PATH, HEALTH_PATH = "/metrics", "/healthz"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
_TEXT = "text/plain; charset=utf-8"


def address(text: str) -> tuple[str, int]:
    """`[HOST:]PORT` in two; without a host, the loopback.

    Raises:
        ValueError: it is neither; the message says what was expected.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no [HOST:]PORT, such as 9450 or 0.0.0.0:9450 (port 0 is one that is free)")
    return host.strip("[]") or "127.0.0.1", int(port)


class MetricsServer:
    """Serves what a source tells.

    Args:
        healthy: whether this daemon can do its work, for `GET /healthz`.
    """

    def __init__(self, source: Source, healthy: Callable[[], bool] = lambda: True) -> None:
        self._source = source
        self._healthy = healthy
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._making = asyncio.Lock()

    async def start(self, where: str) -> str:
        """Listens at `[HOST:]PORT`; the address with its real port.

        Raises:
            CannotStart: nobody can listen there.
        """
        try:
            host, port = address(where)
            self._server = await asyncio.start_server(
                self._connected, host, port, limit=LARGEST_REQUEST, family=socket.AF_UNSPEC, reuse_address=True
            )
        except (OSError, ValueError) as error:
            why = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
            raise CannotStart(
                f"cannot serve metrics at {where}: {why}; give --metrics another [HOST:]PORT, or stop whoever uses it"
            ) from None
        real = self._server.sockets[0].getsockname()[1]
        return f"[{host}]:{real}" if ":" in host else f"{host}:{real}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("a scrape was cut off: %s", error or type(error).__name__)
        except asyncio.CancelledError:
            pass  # the daemon is ending
        finally:
            self._connections.discard(task)
            writer.transport.abort()  # what has not been read by now is not waited for

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(ASK_SECONDS):
            request = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status, kind, body = await self._respond(request)
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        allow = "Allow: GET, HEAD\r\n" if status == 405 else ""
        writer.transport.set_write_buffer_limits(0)  # drained is what the system has taken
        writer.write(f"{head}{allow}Connection: close\r\n\r\n".encode())
        if not request[0].startswith("HEAD "):
            writer.write(body)
        async with asyncio.timeout(READ_SECONDS):
            await writer.drain()
            writer.write_eof()
            await reader.read(1)  # until the other end closes: an abort would take back what it has not read

    async def _respond(self, request: list[str]) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        words = request[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return 400, _TEXT, b"expected a request of HTTP/1.1\n"
        method, path = words[0], words[1].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return 405, _TEXT, b"expected GET or HEAD\n"
        if path == HEALTH_PATH:
            well = self._healthy()
            return (200, _TEXT, b"SERVING\n") if well else (503, _TEXT, b"NOT_SERVING\n")
        if path != PATH:
            return 404, _TEXT, f"nothing here; metrics are at {PATH}\n".encode()
        accept = ",".join(line.partition(":")[2].strip() for line in request[1:] if line.lower().startswith("accept:"))
        encode, kind = choose_encoder(accept)
        page = []
        async with self._making:
            for piece in pieces(self._source, encode):
                page.append(piece)
                await asyncio.sleep(0)  # lets lanes, and all else that this daemon does, go first
        return 200, kind, b"".join(page)
