"""The page's HTTP: h11 reads and writes it, `answers` decides. One request per connection.

Nobody can hold anything for long: there are few connections, each phase of one has its time, headers have a limit, no
body is read, and an answer is handed to the kernel in pieces. What was asked is never logged, for it may carry a
credential.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from importlib.resources import files

import h11

from collectived_proto.viewing import http_address, viewing_token
from collectived_runtime.coordinator.page import answers
from collectived_runtime.coordinator.page.answers import Door, Request, Response
from collectived_runtime.coordinator.page.picture import Picture
from collectived_runtime.daemon import CannotStart

_LINGER_SECONDS = 1.0  # for the other side to close: else what it still sends would wipe out the answer
_PIECE = 64 << 10
_BACKLOG = 32

_log = logging.getLogger("collectived.coordinator.page")


@dataclass(frozen=True, slots=True)
class Limits:
    """
    connections: at the same time; more are closed at once.
    header_bytes: of a request's first line and headers.
    request_seconds: until the request is there. answer_seconds: until the answer is made. send_seconds: until the
    kernel has taken all of it.
    """

    connections: int = 32
    header_bytes: int = 8 << 10
    request_seconds: float = 5.0
    answer_seconds: float = 5.0
    send_seconds: float = 20.0


class PageServer:
    """Serves the page at one address.

    Args:
        address: `[HOST:]PORT`; without a host the loopback; port 0 is one that is free.
        picture: the data.
        secret: the job's; where others than the loopback can reach the page, it or its viewing token is to be shown.
        insecure: nobody has to show anything.
        limits: of what anybody may take.

    Raises:
        CannotStart: nobody can listen there, or everybody could look and there is no secret to keep them out.
    """

    def __init__(
        self, address: str, picture: Picture, secret: str, insecure: bool = False, limits: Limits = Limits()
    ) -> None:
        self._limits = limits
        self._picture = picture
        self._page = answers.page(files(__package__).joinpath("page.html").read_bytes())
        try:
            host, port = http_address(address)
        except ValueError as error:
            raise CannotStart(f"--http: {error}") from None
        self._socket = _listening(host, port)
        where = self._socket.getsockname()
        try:
            self._door = door(host, where[0], secret, insecure)
        except CannotStart:
            self._socket.close()
            raise
        self.needs_token = bool(self._door.credentials)
        self.url = f"http://{_shown(host, where[0])}:{where[1]}/"
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._socket, limit=self._limits.header_bytes)

    async def stop(self) -> None:
        """Closes the door and every connection."""
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._picture.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            if len(self._serving) > self._limits.connections:
                return
            writer.transport.set_write_buffer_limits(high=0)  # drained means that the kernel has all of it
            with contextlib.suppress(TimeoutError, OSError):
                await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the server stops; asyncio would only complain
        finally:
            self._serving.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.header_bytes)
        with_body = True
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                request = await _request(connection, reader)
        except h11.RemoteProtocolError as error:
            status = HTTPStatus(error.error_status_hint)
            response = answers.plain(status, f"this is no request that is understood here: {status.phrase}")
        else:
            if request is None:
                return
            with_body = request.method != "HEAD"
            async with asyncio.timeout(self._limits.answer_seconds):
                response = await self._answer(request)
        async with asyncio.timeout(self._limits.send_seconds):
            await _send(connection, writer, response, with_body)
        writer.write_eof()
        async with asyncio.timeout(_LINGER_SECONDS):
            while await reader.read(_PIECE):
                pass

    async def _answer(self, request: Request) -> Response:
        refused = answers.refusal(self._door, request)
        if refused:
            return refused
        if request.target == answers.PAGE:
            return self._page
        try:
            document = (await self._picture.documents())[request.target]
        except Exception:  # whatever it is, the page goes on, and it is told here once per request
            _log.exception("the status for the page could not be made")
            return answers.plain(
                HTTPStatus.INTERNAL_SERVER_ERROR, "the status could not be made: see the coordinator's log"
            )
        if "gzip" in request.headers.get("accept-encoding", ""):
            return answers.data(document.gzipped, {"content-encoding": "gzip"})
        return answers.data(document.plain, {})


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> Request | None:
    """The request without its body; None where the other side went away instead.

    Raises:
        h11.RemoteProtocolError: what came is no request, or too much.
    """
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(_PIECE))
    if not isinstance(event, h11.Request):
        return None
    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
    return Request(event.method.decode("ascii"), event.target.decode("ascii"), headers)


async def _send(connection: h11.Connection, writer: asyncio.StreamWriter, response: Response, with_body: bool) -> None:
    fields = {
        **response.headers,
        "content-length": str(len(response.body)),
        "date": formatdate(usegmt=True),
        "connection": "close",
    }
    head = h11.Response(
        status_code=response.status.value, headers=list(fields.items()), reason=response.status.phrase.encode()
    )
    writer.write(connection.send(head) or b"")
    if with_body:
        for start in range(0, len(response.body), _PIECE):
            writer.write(connection.send(h11.Data(response.body[start : start + _PIECE])) or b"")
            await writer.drain()
    await writer.drain()


def door(host: str, address: str, secret: str, insecure: bool) -> Door:
    """Who may look in at an address.

    Raises:
        CannotStart: others could reach it, and there is no secret to tell who is invited.
    """
    if ipaddress.ip_address(address).is_loopback:
        return Door(names=frozenset({host.lower()}))
    if insecure:
        return Door(
            names=frozenset({host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}), only_loopback=False
        )
    if not secret:
        raise CannotStart(
            f"--http {host}: others can reach this address, and there is no secret by which to know who is invited: "
            "set COLLECTIVED_SECRET, serve on the loopback (--http PORT), or let everybody in (--insecure)"
        )
    return Door(credentials=(secret, viewing_token(secret)))


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotStart(f"--http {host}:{port}: {(error.strerror or str(error)).lower()}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise CannotStart(
            f"cannot serve the page at {host}:{port}: {(error.strerror or str(error)).lower()}; choose another --http "
            "(port 0 is one that is free)"
        ) from None
    return sock


def _shown(host: str, address: str) -> str:
    """How a browser elsewhere may call us: a wildcard address is nobody's name."""
    name = socket.gethostname() if ipaddress.ip_address(address).is_unspecified else host
    return f"[{name}]" if ":" in name else name
