"""A server of pages over TLS: what it says to those who speak it, and to those who do not."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from tests.certificates import Signer
from tests.runtime.http.serving import ADMITTED, SECRET, Story, get, port, serve, status

from collectived_proto.tls.files import TlsFiles, client_context, load_material
from collectived_runtime.auth.certificates import Certificates
from collectived_runtime.auth.credentials import TokenAuthenticator
from collectived_runtime.http.healthz import healthz_routes
from collectived_runtime.http.messages import Route, ok_response
from collectived_runtime.http.server import HttpLimits, HttpServer

USUAL = HttpLimits()


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path)


def served(files: TlsFiles, story: Story, limits: HttpLimits = USUAL) -> None:
    tls, gate = Certificates(files), TokenAuthenticator(SECRET)
    serve(lambda: HttpServer("--http", "0", healthz_routes(lambda: True), gate, limits, tls.get_http_context), story)


async def asked(server: HttpServer, trust: ssl.SSLContext) -> bytes:
    """What is answered over TLS."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port(server), ssl=trust, server_hostname="localhost")
    writer.write(f"GET /healthz HTTP/1.1\r\nHost: localhost:{port(server)}\r\n\r\n".encode())
    said = await reader.read()
    writer.close()
    return said


def test_an_answer_comes_whole_and_its_address_says_https(signer: Signer) -> None:
    host = signer.issue("host")

    async def story(server: HttpServer) -> None:
        assert server.url.startswith("https://")
        said = await asked(server, client_context(load_material(TlsFiles(ca=host.ca))))
        head, _, body = said.partition(b"\r\n\r\n")
        assert status(head) == 200
        assert f"content-length: {len(body)}".encode() in head.lower()

    served(host, story)


def test_a_long_answer_comes_whole_to_who_reads_slowly(signer: Signer) -> None:
    host = signer.issue("host")
    tls, body = Certificates(host), bytes(range(256)) * (24 << 10)

    async def story(server: HttpServer) -> None:
        trust = client_context(load_material(TlsFiles(ca=host.ca)))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port(server), ssl=trust, server_hostname="localhost", limit=1 << 10
        )
        writer.write(f"GET /long HTTP/1.1\r\nHost: localhost:{port(server)}\r\n{ADMITTED}\r\n\r\n".encode())
        got = b""
        while piece := await reader.read(16 << 10):
            got += piece
            await asyncio.sleep(0)
        assert got.partition(b"\r\n\r\n")[2] == body
        writer.close()

    routes = {"/long": Route(lambda _: ok_response(body, "text/plain"))}
    serve(lambda: HttpServer("--http", "0", routes, TokenAuthenticator(SECRET), secure=tls.get_http_context), story)


def test_plain_text_gets_no_answer(signer: Signer) -> None:
    async def story(server: HttpServer) -> None:
        head, _ = await get(server, "/healthz")
        assert not head.startswith(b"HTTP")

    served(signer.issue("host"), story)


def test_who_says_nothing_is_shown_out(signer: Signer) -> None:
    async def story(server: HttpServer) -> None:
        silent, writer = await asyncio.open_connection("127.0.0.1", port(server))
        assert await silent.read() == b""
        writer.close()
        while server.connections:
            await asyncio.sleep(0)

    served(signer.issue("host"), story, HttpLimits(request_seconds=0.1))


def test_more_than_are_let_in_are_closed_before_anything_is_said(signer: Signer) -> None:
    async def story(server: HttpServer) -> None:
        first, writer = await asyncio.open_connection("127.0.0.1", port(server))
        while not server.connections:
            await asyncio.sleep(0)
        second, other = await asyncio.open_connection("127.0.0.1", port(server))
        assert await second.read() == b""
        writer.close()
        other.close()

    served(signer.issue("host"), story, HttpLimits(connections=1))


def test_a_new_certificate_is_served_to_the_next(signer: Signer) -> None:
    host = signer.issue("host")

    async def shown(server: HttpServer) -> bytes:
        trust = client_context(load_material(TlsFiles(ca=host.ca)))
        _, writer = await asyncio.open_connection("127.0.0.1", port(server), ssl=trust, server_hostname="localhost")
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return found

    async def story(server: HttpServer) -> None:
        before = await shown(server)
        assert await shown(server) == before
        signer.replace("host", signer.issued("host"))
        assert await shown(server) != before

    served(host, story)
