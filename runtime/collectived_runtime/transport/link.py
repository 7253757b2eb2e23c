"""A link: one connection to one peer worker, serving one group generation on one channel.

The promise that every stream below a link keeps (`tests/runtime/transport/test_link_streams.py` holds each to it):

- nothing blocks: `send` takes what fits and says how much, `recv_into` gives what is there; 0 means "not now";
- bytes arrive in order, once, or the stream breaks with `LinkBroken`, on both sides, never silently;
- a zero-byte read of the system below is a lost peer, and therefore `LinkBroken`;
- a read of `min_read_bytes` or more leaves nothing behind that poll does not report.

And the promise of a sender: bytes that were not taken are given again, before any others, or the stream is
closed. A part of them may be on its way.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from collectived_runtime.transport.frame import HEADER_BYTES

BytesLike = bytes | bytearray | memoryview

READ_AHEAD_BYTES = 4 << 10  # read together with a header: a small frame takes one system call
# Bytes on their way to a worker of the same host: more would leave the caches before they are read. To another host
# the system chooses, for there a path may hold more.
LOCAL_SEND_BYTES = 512 << 10


class LinkBroken(Exception):
    """The connection to a peer is gone, or carries what it should not.

    Attributes:
        peer: its task; -1 as long as only the stream below knows.
    """

    def __init__(self, what: str, peer: int = -1) -> None:
        super().__init__(what)
        self.peer = peer


class LinkProtocolError(LinkBroken):
    """It carries what no peer should send."""


class LinkRefused(LinkBroken):
    """No link, though no worker is lost: the peer turns it down, this host cannot dial, or no packet passes."""


# The path has ended, which is no word of the peer.
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


def break_link(error: OSError, why: str) -> LinkBroken:
    """The error of a link whose connection has ended so."""
    return LinkRefused(why) if error.errno in _UNREACHABLE else LinkBroken(why)


class Stream(Protocol):
    """Bytes both ways, never blocking."""

    @property
    def min_read_bytes(self) -> int:
        """As many bytes as may come in one piece."""

    def fileno(self) -> int:
        """The descriptor to poll; -1 for none."""

    def send(self, parts: Sequence[BytesLike]) -> int:
        """Take a prefix of the concatenated parts; its length, 0 when full."""

    def recv_into(self, view: memoryview) -> int:
        """Fill a prefix of a view that is not empty; its length, 0 when nothing is there."""

    def close(self) -> None: ...


class TcpStream:
    """A connected TCP socket."""

    min_read_bytes = 1

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # it has ended, which its user sees
            if connected.getsockname()[0] == connected.getpeername()[0]:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BYTES)
        self._socket = connected

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, parts: Sequence[BytesLike]) -> int:
        try:
            return self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)  # a process that shares it may have it block
        except BlockingIOError:
            return 0
        except OSError as error:
            raise break_link(error, error.strerror or str(error)) from error

    def recv_into(self, view: memoryview) -> int:
        try:
            received = self._socket.recv_into(view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise break_link(error, error.strerror or str(error)) from error
        if not received:
            raise LinkBroken("the peer closed the connection")
        return received

    def shutdown(self, how: int) -> None:
        """End the connection also for other processes that have its descriptor; raise OSError where it has ended."""
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()


class PeerAddress(NamedTuple):
    """Another worker, as it is dialled."""

    task: int
    incarnation: str
    address: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Origin:
    """The connection below a link, and the peer that it was dialled to; None: the peer dialled it."""

    connection: socket.socket
    dialled_peer: PeerAddress | None


class Link:
    """A stream with the state of its framing. `origin` is for its connection server, to keep the connection; None: it
    cannot.

    `is_mid_send` is True while a frame has been sent in part, or was given to the stream and not taken: such a link can
    only be closed. A header that has been read but belongs to a later instance stays in `read_header`: the link is
    *parked*, and nothing behind it is read but what came along.

    Attributes:
        is_lent: whether another process reads and writes it now.
    """

    def __init__(self, peer: int, channel: int, stream: Stream, way: Origin | None = None) -> None:
        self.peer = peer
        self.channel = channel
        self.stream = stream
        self.origin = way
        self.is_mid_send = False
        self.is_lent = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self._was_lent = False  # another process may have its descriptor still
        self._sent_ahead = 0  # bytes that `resume` has said are sent
        # Bytes that have been read and not been taken; there is always room in it for a piece.
        self._ahead = bytearray(HEADER_BYTES + max(READ_AHEAD_BYTES, stream.min_read_bytes))
        self._view = memoryview(self._ahead)
        self._begin = self._end = 0  # of it

    def read_header(self) -> bytes | None:
        """The next header, read as far as it is there; None until it is whole. Stays until `consume_header`."""
        if not self.has_header:
            if self._begin:  # a header begins where there is room for all of it and some more
                self._ahead[: self._end - self._begin] = self._ahead[self._begin : self._end]
                self._begin, self._end = 0, self._end - self._begin
            while not self.has_header:
                received = self._receive(self._view[self._end :])
                if not received:
                    return None
                self._end += received
        return bytes(self._view[self._begin : self._begin + HEADER_BYTES])

    @property
    def has_header(self) -> bool:
        """Whether a whole header is waiting."""
        return self._end - self._begin >= HEADER_BYTES

    @property
    def unread_bytes(self) -> bytes:
        """Bytes that have come and have not been taken."""
        return bytes(self._view[self._begin : self._end])

    def take_unread(self) -> bytes:
        """Take the unread bytes. The caller reads on in place of this link, until `resume`."""
        unread = self.unread_bytes
        self._begin = self._end = 0
        return unread

    def resume(self, unread: bytes, sent: int) -> None:
        """Go on after `take_unread`: these bytes are read next, and so many of those that are sent next have left."""
        if len(unread) + self.stream.min_read_bytes > len(self._ahead):
            self._ahead = bytearray(len(unread) + HEADER_BYTES + max(READ_AHEAD_BYTES, self.stream.min_read_bytes))
            self._view = memoryview(self._ahead)
        self._ahead[: len(unread)] = unread
        self._begin, self._end = 0, len(unread)
        self._sent_ahead = sent
        self.is_mid_send = sent > 0

    def lend(self) -> None:
        """Another process goes on here, until `take_back`. Meanwhile it may be amid a frame."""
        self.is_lent = self.is_mid_send = self._was_lent = True

    def take_back(self, *, is_whole: bool) -> None:
        """Go on here, behind whole frames if `is_whole`; else perhaps amid some, and then nothing is sent any more."""
        self.is_lent, self.is_mid_send = False, not is_whole

    def consume_header(self) -> None:
        self._begin += HEADER_BYTES
        self.bytes_received += HEADER_BYTES

    def send(self, parts: Sequence[BytesLike]) -> int:
        if self._sent_ahead:
            taken = min(self._sent_ahead, sum(map(len, parts)))
            self._sent_ahead -= taken
            self.bytes_sent += taken
            return taken
        try:
            taken = self.stream.send(parts)
        except LinkBroken as error:
            error.peer = self.peer
            raise
        self.bytes_sent += taken
        return taken

    def recv_into(self, view: memoryview) -> int:
        """Fill a prefix of a view that is not empty with what follows the header; its length, 0: nothing is there."""
        if self._begin == self._end and len(view) < self.stream.min_read_bytes:
            self._begin, self._end = 0, self._receive(self._view)
        if ahead := self._end - self._begin:
            received = min(ahead, len(view))
            view[:received] = self._view[self._begin : self._begin + received]
            self._begin += received
        else:
            received = self._receive(view) if len(view) >= self.stream.min_read_bytes else 0
        self.bytes_received += received
        return received

    def _receive(self, view: memoryview) -> int:
        try:
            return self.stream.recv_into(view)
        except LinkBroken as error:
            error.peer = self.peer
            raise

    def close(self) -> None:
        if self._was_lent and isinstance(self.stream, TcpStream):  # closing the descriptor alone would not end it
            with contextlib.suppress(OSError):  # it has ended
                self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()
