"""A link over TLS, once both sides have verified their certificates (`handshake.py`).

OpenSSL writes whole records. A record that it has begun and the kernel has not taken cannot be taken back, so `send`
counts only bytes that have left, and is given the same bytes again. OpenSSL gives out records one by one, and of one
that is read in part poll knows nothing: hence `min_read_bytes`.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from collectived_runtime.transport.link import BytesLike, LinkBroken, break_link

RECORD_BYTES = 16 << 10  # the most that a record holds
_CHUNK_BYTES = 4 * RECORD_BYTES  # encrypted at once
_MAX_SEND_BYTES = 1 << 20  # sent between two looks at the world


class TlsStream:
    """A connected socket whose handshake is done."""

    min_read_bytes = RECORD_BYTES

    def __init__(self, secured: ssl.SSLSocket) -> None:
        secured.setblocking(False)
        secured.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = secured
        self._unsent_bytes = 0  # bytes that OpenSSL has, and that have not left

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, parts: Sequence[BytesLike]) -> int:
        taken = 0
        rest = [memoryview(part) for part in parts if len(part)]
        while rest and taken < _MAX_SEND_BYTES:
            chunk = self._next_chunk(rest)
            try:
                count = self._socket.send(chunk)
            except ssl.SSLWantWriteError:
                self._unsent_bytes = len(chunk)
                break
            except OSError as error:
                raise break_link(error, describe_error(error)) from error
            self._unsent_bytes = 0
            taken += count
            _skip(rest, count)
        return taken

    def recv_into(self, view: memoryview) -> int:
        try:
            received = self._socket.recv_into(view)
        except ssl.SSLWantReadError:
            return 0
        except OSError as error:
            raise break_link(error, describe_error(error)) from error
        if not received:
            raise LinkBroken("the peer closed the connection")
        return received

    def close(self) -> None:
        self._socket.close()

    def _next_chunk(self, rest: Sequence[memoryview]) -> BytesLike:
        """The next bytes to encrypt: a begun record, else a stretch of a large part, else small parts together."""
        first = rest[0]
        length = self._unsent_bytes or (_CHUNK_BYTES if len(first) >= RECORD_BYTES else RECORD_BYTES)
        if len(first) >= length or len(rest) == 1:
            chunk: BytesLike = first[:length]
        else:
            joined = bytearray()
            for part in rest:
                joined += part[: length - len(joined)]
                if len(joined) == length:
                    break
            chunk = joined
        if len(chunk) < self._unsent_bytes:
            raise ValueError(f"a send of {self._unsent_bytes} bytes was begun, and goes on with {len(chunk)}")
        return chunk


def _skip(rest: list[memoryview], count: int) -> None:
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    if count:
        rest[0] = rest[0][count:]


def describe_error(error: OSError) -> str:
    if isinstance(error, ssl.SSLEOFError):
        return "the peer closed the connection"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).lower().replace('_', ' ')}"
    return error.strerror or str(error)
