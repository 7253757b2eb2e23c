"""HTTP/1.1 in the daemon's event loop: h11 reads and writes it, `policy` and the routes decide. One request per
connection.

No client can hold resources for long: there are few connections, each phase of one has its time, headers have a limit,
no body is read, and an answer is made and sent in pieces between which other clients have a turn. Requests are never
logged, for they may carry a credential.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from email.utils import formatdate
from http import HTTPStatus

import h11

from collectived_proto.addresses import parse_http_address
from collectived_runtime.auth.credentials import TokenAuthenticator
from collectived_runtime.http.messages import Request, Response, Routes, text_response
from collectived_runtime.http.policy import check_request, compute_allowed_hosts, find_route
from collectived_runtime.startup_error import StartupError

_LINGER_SECONDS = 1.0  # for the other side to close: else what it still sends would wipe out the answer
_CHUNK_BYTES = 64 << 10
_BACKLOG = 32

_log = logging.getLogger("collectived.http")

GetTlsContext = Callable[[], ssl.SSLContext] | None


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """
    connections: at the same time. Where there are more one goes that has asked for nothing yet, else the newest.
    header_bytes: of a request's first line and headers.
    request_seconds: until the request is there. answer_seconds: until the answer is made. send_seconds: until the
    kernel has taken all of it.
    """

    connections: int = 32
    header_bytes: int = 8 << 10
    request_seconds: float = 5.0
    answer_seconds: float = 10.0
    send_seconds: float = 20.0


class HttpServer:
    """Serves routes at one address, once it is started.

    Args:
        option: of the command line, by which the address was given, for messages where it cannot be served.
        address: `[HOST:]PORT`; without a host the loopback; port 0 is one that is free.
        gate: checks credentials.
        limits: of the resources that a client may take.
        secure: returns the TLS context, at every connection; None: plain text.

    Raises:
        StartupError: the address cannot be used, or strangers could not be told apart from permitted readers.
    """

    def __init__(
        self,
        option: str,
        address: str,
        routes: Routes,
        gate: TokenAuthenticator,
        limits: HttpLimits = HttpLimits(),
        secure: GetTlsContext = None,
    ) -> None:
        self._routes, self._authenticator, self._limits, self._get_tls_context = routes, gate, limits, secure
        if not gate.can_admit_anyone:
            raise StartupError(
                f"{option} {address}: there is no secret by which to admit readers: set COLLECTIVED_SECRET, give a "
                "token of its own (--viewing-token-file FILE), or let all readers in (--insecure)"
            )
        try:
            host, port = parse_http_address(address)
        except ValueError as error:
            raise StartupError(f"{option}: {error}") from None
        self._socket = _open_listener(option, host, port)
        at, real = self._socket.getsockname()[:2]
        self._allowed_hosts = compute_allowed_hosts(host, at, gate.insecure)
        self.address = f"{_bracketed(host)}:{real}"
        # A wildcard address is no name: a browser elsewhere may use the name of this host.
        called = socket.gethostname() if ipaddress.ip_address(at).is_unspecified else host
        self.url = f"http{'s' if secure else ''}://{_bracketed(called)}:{real}/"
        self._server: asyncio.Server | None = None
        self._connection_tasks: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], str] = {}  # whose request is not there yet, and from where; oldest first
        self._render_lock = asyncio.Lock()

    @property
    def connections(self) -> int:
        return len(self._connection_tasks)

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._on_connection, sock=self._socket, limit=self._limits.header_bytes
        )

    async def stop(self) -> None:
        """Close the listening socket and every connection."""
        self._socket.close() if self._server is None else self._server.close()
        for task in self._connection_tasks:
            task.cancel()
        await asyncio.gather(*self._connection_tasks, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Coroutine[None, None, None]:
        if self._get_tls_context is not None and isinstance(writer.transport, asyncio.ReadTransport):
            writer.transport.pause_reading()  # the first bytes are for TLS, which goes on reading
        return self._handle_connection(reader, writer)

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connection_tasks.add(task)
        try:
            self._silent[task] = _host_of(writer)
            if len(self._connection_tasks) > self._limits.connections and not self._evict_silent(task):
                return
            with contextlib.suppress(TimeoutError, OSError):
                writer.transport.set_write_buffer_limits(high=0)  # drained means that the kernel has all of it
                if self._get_tls_context is not None:
                    async with asyncio.timeout(self._limits.request_seconds):
                        await writer.start_tls(self._get_tls_context())
                    writer.transport.set_write_buffer_limits(high=1, low=0)  # with 0, TLS would never be drained
                await self._serve_request(reader, writer)
        except asyncio.CancelledError:
            pass  # the server stops; asyncio would only complain
        finally:
            self._connection_tasks.discard(task)
            self._silent.pop(task, None)
            writer.transport.abort()

    def _evict_silent(self, newest: asyncio.Task[None]) -> bool:
        """Make room for the newest connection. False where all others have sent a request.

        A client with a request needs milliseconds, so one that has sent nothing is closed: the oldest of the host that
        has most of them.
        """
        hosts = Counter(host for task, host in self._silent.items() if task is not newest)
        if not hosts:
            return False
        ((most, _),) = hosts.most_common(1)
        oldest = next(task for task, host in self._silent.items() if host == most)
        del self._silent[oldest]
        oldest.cancel()
        return True

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.header_bytes)
        with_body = True
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                request = await _read_request(connection, reader)
            task = asyncio.current_task()
            assert task is not None
            self._silent.pop(task, None)
        except h11.RemoteProtocolError as error:
            status = HTTPStatus(error.error_status_hint)
            answer = text_response(status, f"this is no request that is understood here: {status.phrase}")
        else:
            if request is None:
                return
            with_body = request.method != "HEAD"
            async with asyncio.timeout(self._limits.answer_seconds):
                answer = await self._respond(request, _host_of(writer))
        async with asyncio.timeout(self._limits.send_seconds):
            await _send_response(connection, writer, answer, with_body)
            if not writer.can_write_eof():  # TLS ends both ways at once, when the rest has been sent
                writer.close()
                return await writer.wait_closed()
        writer.write_eof()
        async with asyncio.timeout(_LINGER_SECONDS):
            while await reader.read(_CHUNK_BYTES):
                pass

    async def _respond(self, request: Request, host: str) -> Response:
        shown = request.headers.get("authorization", "")
        refused = check_request(self._routes, self._allowed_hosts, self._authenticator.get_access_level(shown), request)
        if refused:
            if refused.status is HTTPStatus.UNAUTHORIZED:
                self._authenticator.count_rejection("http", shown, host)
                if self._authenticator.login_throttle.has_failed_too_often(host):
                    return text_response(
                        HTTPStatus.TOO_MANY_REQUESTS,
                        "this needs the job's viewing token or its secret; too many wrong ones came from this address",
                    )
            return refused
        route = find_route(self._routes, request.target)
        assert route is not None
        try:
            answer = route.handler(request)
            return await self._render_body(await answer if inspect.isawaitable(answer) else answer)
        except Exception:  # any error: the others go on, and it is logged here once per request
            _log.exception("an answer could not be made")
            return text_response(HTTPStatus.INTERNAL_SERVER_ERROR, "this could not be made: see the log of the daemon")

    async def _render_body(self, answer: Response) -> Response:
        """An answer whose pieces have all been made: of one answer at a time, however many ask."""
        if isinstance(answer.body, bytes):
            return answer
        made = []
        async with self._render_lock:
            for piece in answer.body:
                made.append(piece)
                await asyncio.sleep(0)  # lets group loops, and all else that this daemon does, go first
        return replace(answer, body=b"".join(made))


async def _read_request(connection: h11.Connection, reader: asyncio.StreamReader) -> Request | None:
    """The request without its body; None where the other side went away instead.

    Raises:
        h11.RemoteProtocolError: what came is no request, or too much.
    """
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(_CHUNK_BYTES))
    if not isinstance(event, h11.Request):
        return None
    headers: dict[str, str] = {}
    for raw, value in event.headers:
        name, text = raw.decode("ascii"), value.decode("latin-1")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return Request(event.method.decode("ascii"), event.target.decode("ascii"), headers)


async def _send_response(
    connection: h11.Connection, writer: asyncio.StreamWriter, answer: Response, with_body: bool
) -> None:
    body = answer.body
    assert isinstance(body, bytes)
    fields = {
        **answer.headers,
        "content-length": str(len(body)),
        "date": formatdate(usegmt=True),
        "connection": "close",
    }
    head = h11.Response(
        status_code=answer.status.value, headers=list(fields.items()), reason=answer.status.phrase.encode()
    )
    writer.write(connection.send(head) or b"")
    if with_body:
        for start in range(0, len(body), _CHUNK_BYTES):
            writer.write(connection.send(h11.Data(body[start : start + _CHUNK_BYTES])) or b"")
            await writer.drain()
            await asyncio.sleep(0)
    await writer.drain()


def _open_listener(option: str, host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise StartupError(
            f"{option}: cannot serve at {_bracketed(host)}:{port}: {(error.strerror or str(error)).lower()}; stop "
            f"the process that uses it, or choose another {option} [HOST:]PORT (port 0 is one that is free)"
        ) from None
    return sock


def _host_of(writer: asyncio.StreamWriter) -> str:
    found = writer.get_extra_info("peername")
    return str(found[0]) if found else ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
