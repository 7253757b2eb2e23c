"""Receptions whose links are encrypted: who gets a link, and what the others hear."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Signer

from collectived_proto.tls.files import TlsFiles, TlsMaterial, client_context, load_material, server_context
from collectived_runtime.transport import handshake
from collectived_runtime.transport import hello as hello_
from collectived_runtime.transport.connections import ConnectionServer
from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.handshake import TlsContexts
from collectived_runtime.transport.hello import NONCE_BYTES, LinkHello
from collectived_runtime.transport.link import Link
from collectived_runtime.transport.tls_stream import TlsStream

SECRET = "of these tests"
KEY = (7, 100, 0, 3)

Made = Callable[..., ConnectionServer]


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def made() -> Iterator[Made]:
    folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
    receptions: list[ConnectionServer] = []

    def make(task: int, files: TlsFiles | None, secret: str = SECRET) -> ConnectionServer:
        contexts = contexts_of(load_material(files)) if files else None
        receptions.append(
            ConnectionServer(task, secret, str(folder / f"door-{task}"), ("127.0.0.1", 0), contexts=contexts)
        )
        return receptions[-1]

    try:
        yield make
        for reception in receptions:
            reception.close()
        assert not any(folder.iterdir())
    finally:
        shutil.rmtree(folder)


def contexts_of(material: TlsMaterial) -> TlsContexts:
    both = server_context(material, demand=True), client_context(material)
    return lambda: both


def link(dialler: ConnectionServer, acceptor: ConnectionServer) -> tuple[Any, Any]:
    """What came of a link between the two: what was dialled or why not, and what was accepted if anything."""
    dialled: queue.Queue[Any] = queue.Queue()
    accepted: queue.Queue[Link] = queue.Queue()
    acceptor.expect_links([KEY], accepted.put)
    hello = LinkHello(0, 1, 7, 100, 3, os.urandom(NONCE_BYTES))
    address = ("127.0.0.1", acceptor.link_port)
    dialler.dial(DialRequest(address, hello, dialled.put, lambda error: dialled.put(str(error))))
    found = dialled.get(timeout=20)
    return found, accepted.get(timeout=20) if isinstance(found, Link) else None


def refusal(dialler: ConnectionServer, acceptor: ConnectionServer) -> str:
    why, _ = link(dialler, acceptor)
    assert isinstance(why, str), "there is a link"
    return why


def test_both_sides_show_certificates_and_the_link_carries_bytes(made: Made, signer: Signer) -> None:
    mine, theirs = link(made(0, signer.issue("a")), made(1, signer.issue("b")))
    assert isinstance(mine.stream, TlsStream) and isinstance(theirs.stream, TlsStream)
    assert mine.send([b"x" * 100]) == 100
    received, got = bytearray(100), 0
    while got < 100:
        got += theirs.recv_into(memoryview(received)[got:])
    assert received == b"x" * 100
    mine.close()
    theirs.close()


def test_certificates_do_not_stand_in_for_the_secret_of_the_job(made: Made, signer: Signer) -> None:
    why = refusal(made(0, signer.issue("a")), made(1, signer.issue("b"), "of another job"))
    assert "does not know this job's secret" in why


def test_a_plain_worker_gets_no_link_to_an_encrypted_one(made: Made, signer: Signer) -> None:
    why = refusal(made(0, None), made(1, signer.issue("b")))
    assert "it speaks TLS on its links, and this worker does not: give it --tls-cert" in why


def test_an_encrypted_worker_gives_no_link_to_a_plain_one(made: Made, signer: Signer) -> None:
    why = refusal(made(0, signer.issue("a")), made(1, None))
    assert "it hung up within the handshake of TLS: has it been given --tls-cert" in why


def test_a_worker_of_another_authority_is_refused_by_whoever_looks_first(
    made: Made, signer: Signer, tmp_path: Path
) -> None:
    why = refusal(made(0, signer.issue("a")), made(1, Signer(tmp_path).issue("b")))
    assert "its certificate is not accepted:" in why


def test_a_dialler_whose_certificate_is_not_accepted_hears_so(made: Made, signer: Signer, tmp_path: Path) -> None:
    other = Signer(tmp_path).issue("a")
    why = refusal(made(0, TlsFiles(other.cert, other.key, signer.ca)), made(1, signer.issue("b")))
    assert "it does not accept this worker's certificate: unknown ca" in why


def test_a_certificate_has_to_name_the_host_that_was_dialled(made: Made, signer: Signer) -> None:
    why = refusal(made(0, signer.issue("a")), made(1, signer.issue("b", names=("elsewhere.example",))))
    assert "certificate is not valid for '127.0.0.1'" in why


def test_who_says_nothing_and_who_speaks_nonsense_hold_nobody_up(made: Made, signer: Signer) -> None:
    dialler, acceptor = made(0, signer.issue("a")), made(1, signer.issue("b"))
    silent = socket.create_connection(("127.0.0.1", acceptor.link_port))
    with silent, socket.create_connection(("127.0.0.1", acceptor.link_port)) as loud:
        loud.settimeout(10)
        loud.sendall(b"\x16\x03\x01\x02\x00" + os.urandom(600))
        mine, theirs = link(dialler, acceptor)
        mine.close()
        theirs.close()
        assert until_end(loud) != b"", "it is told in the words of TLS that this was none"


def until_end(connection: socket.socket) -> bytes:
    """What is still said there, until the other side has hung up."""
    said = b""
    with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
        while piece := connection.recv(4096):
            said += piece
    return said


def test_who_goes_on_before_it_is_let_in_is_refused(made: Made, signer: Signer) -> None:
    """Of what OpenSSL holds poll would never tell the group loop."""
    acceptor, files = made(1, signer.issue("b")), signer.issue("a")
    context: ssl.SSLContext = client_context(load_material(files))
    said = LinkHello(0, 1, 7, 100, 3, os.urandom(NONCE_BYTES)).encode()
    with (
        socket.create_connection(("127.0.0.1", acceptor.link_port), 10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        secured.sendall(said)
        answer = b""
        while len(answer) < hello_.ANSWER_BYTES:
            answer += secured.recv(hello_.ANSWER_BYTES - len(answer))
        secured.sendall(hello_.proof(SECRET, "dial", said, answer[:NONCE_BYTES]) + b"more")
        assert until_end(secured) == b""


def test_who_is_gone_before_tls_begins_ends_nobody_else(
    made: Made, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL's wrapper closes a connection that was reset with something unread, and takes its descriptor along."""
    first, second = made(0, signer.issue("a")), made(1, signer.issue("b"))
    real = handshake.wrap_tls

    def reset(connection: socket.socket, contexts: TlsContexts, host: str | None) -> Any:
        monkeypatch.setattr(handshake, "wrap_tls", real)
        connection.detach()
        os.close(next(iter(second._handshakes._by_descriptor)))
        raise ssl.SSLError("reset before the handshake")

    monkeypatch.setattr(handshake, "wrap_tls", reset)
    with socket.create_connection(("127.0.0.1", second.link_port)) as guest, contextlib.suppress(ConnectionResetError):
        assert guest.recv(1) == b""
    mine, theirs = link(first, second)
    mine.close()
    theirs.close()
