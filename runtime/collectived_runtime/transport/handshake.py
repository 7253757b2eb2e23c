"""Handshakes on a connection before it is a link, as generators that yield the poll events that they wait for.

Where links are encrypted, TLS comes first: each side shows a certificate of the job's authority, and the dialler checks
that it names the host that was dialled. The hello follows inside of it, for a certificate says nothing of groups.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Generator

from collectived_runtime.transport import hello as hello_
from collectived_runtime.transport.hello import HandshakeCut, HelloRefused, LinkHello
from collectived_runtime.transport.link import Stream, TcpStream
from collectived_runtime.transport.tls_stream import TlsStream, describe_error

TLS_ALERT = b"\x15\x03"  # how TLS answers what is none
_WRONG_VERSION = TLS_ALERT + b"\x03\x00\x02\x02\x46"
PEER_SPEAKS_TLS = "it speaks TLS on its links, and this worker does not: give it --tls-cert, --tls-key and --tls-ca too"
_NOT_TLS_REASONS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "UNKNOWN_PROTOCOL",
    "UNSUPPORTED_PROTOCOL",
    "HTTPS_PROXY_REQUEST",
)
_PEER_HUNG_UP = "it hung up within the handshake of TLS: has it been given --tls-cert, --tls-key and --tls-ca too?"


TlsContexts = Callable[[], tuple[ssl.SSLContext, ssl.SSLContext]]
"""With what links are accepted and with what they are dialled, as it is now."""


def wrap_tls(connection: socket.socket, contexts: TlsContexts, host: str | None) -> ssl.SSLSocket:
    """The connection, to be used instead from now on. `host`: that was dialled; None: we were."""
    accepts, dials = contexts()
    if host is None:
        return accepts.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    return dials.wrap_socket(connection, server_hostname=host, do_handshake_on_connect=False)


def do_tls_handshake(secured: ssl.SSLSocket) -> Generator[int, None, None]:
    """The handshake of TLS.

    Raises:
        HelloRefused: the other side's certificate is not accepted, it speaks no TLS, or it has hung up.
    """
    while True:
        try:
            secured.do_handshake()
            return
        except ssl.SSLWantReadError:
            yield select.POLLIN
        except ssl.SSLWantWriteError:
            yield select.POLLOUT
        except (ssl.SSLEOFError, ConnectionError):
            raise HelloRefused(_PEER_HUNG_UP) from None
        except ssl.SSLError as error:
            if error.reason in _NOT_TLS_REASONS:
                _send_tls_alert(secured)
            raise _translate_tls_error(error) from None


def read(connection: socket.socket, count: int, begun: bytes = b"") -> Generator[int, None, bytes]:
    """So many bytes of which some have been read before, perhaps more than so many; reads none beyond them."""
    data = begun
    while len(data) < count:
        try:
            piece = connection.recv(count - len(data))
        except (BlockingIOError, ssl.SSLWantReadError):
            yield select.POLLIN
            continue
        except ssl.SSLEOFError:
            piece = b""
        except ssl.SSLError as error:
            raise _translate_tls_error(error) from None
        if not piece:
            if data.startswith(TLS_ALERT):
                raise HelloRefused(PEER_SPEAKS_TLS)
            raise HandshakeCut("it hung up within the handshake")
        data += piece
    return data


def write(connection: socket.socket, data: bytes) -> Generator[int, None, None]:
    while data:
        try:
            data = data[connection.send(data) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            yield select.POLLOUT


def exchange_hello(connection: socket.socket, hello: LinkHello, secret: str) -> Generator[int, None, Stream]:
    """Say hello on a dialled connection, and return the stream of the link.

    Raises:
        HandshakeCut: the other side has no room for a link just now, or has hung up.
        HelloRefused: it does not prove that it knows the secret, or speaks no version alike.
    """
    said = hello.encode()
    yield from write(connection, said)
    answer = yield from read(connection, hello_.ANSWER_BYTES)
    hello_.check_answer(answer, hello.acceptor)
    nonce, shown = answer[: hello_.NONCE_BYTES], answer[hello_.NONCE_BYTES :]
    hello_.verify_proof(secret, "accept", said, nonce, shown)
    yield from write(connection, hello_.proof(secret, "dial", said, nonce))
    return make_stream(connection)


def await_bye(connection: socket.socket, farewell: bytes, unread: bytes) -> Generator[int, None, bytes]:
    """Wait until the other side has said farewell too, and return the bytes read beyond that.

    Args:
        unread: what of this has been read before.

    Raises:
        HelloRefused: it has said something else, or ended the connection.
    """
    said = yield from read(connection, len(farewell), unread)
    if not said.startswith(farewell):
        raise HelloRefused("the connection of a link that is over still carries something")
    return said[len(farewell) :]


def is_still_valid(connection: socket.socket, contexts: TlsContexts | None, *, dialled: bool) -> bool:
    """Whether a connection that was made before would be made the same way now.

    One over TLS belongs to the certificates that were in use then; and what the other side showed may have expired.
    """
    if contexts is None or not isinstance(connection, ssl.SSLSocket):
        return contexts is None
    accepts, dials = contexts()
    shown = connection.getpeercert() or {}
    ends = ssl.cert_time_to_seconds(str(shown.get("notAfter", "Jan  1 00:00:00 1970 GMT")))
    return connection.context is (dials if dialled else accepts) and ends > time.time()


def make_stream(connection: socket.socket) -> Stream:
    """Return what a link goes on with after the hello."""
    if not isinstance(connection, ssl.SSLSocket):
        return TcpStream(connection)
    if connection.pending():  # poll would never report it
        raise HelloRefused("it said more than its hello before it was let in")
    return TlsStream(connection)


def _send_tls_alert(secured: ssl.SSLSocket) -> None:
    """OpenSSL says nothing to what is no TLS at all; and what is closed unread resets the connection."""
    with contextlib.suppress(OSError):
        os.read(secured.fileno(), 4096)
        os.write(secured.fileno(), _WRONG_VERSION)


def _translate_tls_error(error: ssl.SSLError) -> HelloRefused:
    """Say what an error of TLS means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return HelloRefused(f"its certificate is not accepted: {error.verify_message.rstrip('.')}")
    reason = error.reason or ""
    if "ALERT" in reason:
        why = reason.rpartition("ALERT_")[2].lower().replace("_", " ")
        return HelloRefused(f"it does not accept this worker's certificate: {why}")
    if reason in _NOT_TLS_REASONS:
        return HelloRefused(
            "it speaks no TLS on its links, as this worker does: give it --tls-cert, --tls-key and --tls-ca"
        )
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return HelloRefused("it showed no certificate")
    return HelloRefused(f"no TLS with it: {describe_error(error)}")
