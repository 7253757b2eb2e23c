"""Unix sockets at which no descriptors are wanted.

A process that receives a message closes the descriptors that came with it, and closing can block: a TCP socket with
SO_LINGER whose peer does not read holds the thread that closes it for the linger time. So the kernel is set to refuse
messages with descriptors (`SO_PASSRIGHTS`): the sender gets EPERM, and accepted sockets inherit it.

A kernel before Linux 6.17 does not know that option. There, a `PeekingSocket` looks at a message before it takes it:
descriptors in it are not closed by that. A message with descriptors is never taken. Its connection is broken, and
closed by another thread.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from collectived_runtime.limits.closing import PatientCloser

SO_PASSRIGHTS = 83  # Linux 6.17; not named by Python's socket module
_PEEK_BYTES = 64 << 10


def create_unix_socket(kind: socket.SocketKind) -> socket.socket:
    """A Unix socket to listen at; neither it nor what it accepts takes descriptors."""
    plain = socket.socket(socket.AF_UNIX, kind)
    try:
        plain.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        return plain
    except OSError:  # an older kernel
        return PeekingSocket(socket.AF_UNIX, kind, fileno=plain.detach())


class PeekingSocket(socket.socket):
    """For kernels without SO_PASSRIGHTS. `recv` and `recv_into` raise OSError (EPROTO) where descriptors came."""

    def accept(self) -> tuple[socket.socket, str]:
        connection, address = super().accept()
        accepted = PeekingSocket(connection.family, connection.type, fileno=connection.detach())
        if self.gettimeout():
            accepted.setblocking(True)
        return accepted, address

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        if self.type == socket.SOCK_SEQPACKET:
            self._peek(1, flags)
            return super().recv(size, flags)
        # Of a stream no more than was looked at: what has come since may bring descriptors.
        seen = self._peek(min(size, _PEEK_BYTES), flags)
        return super().recv(seen, flags) if seen else b""

    def recv_into(self, buffer: bytearray, size: int = 0, flags: int = 0, /) -> int:  # type: ignore[override]
        data = self.recv(size or len(buffer), flags)
        buffer[: len(data)] = data
        return len(data)

    def _peek(self, size: int, flags: int) -> int:
        """How much is there, of so many bytes at most."""
        data, _, told, _ = self.recvmsg(size, 0, flags | socket.MSG_PEEK)
        if told & socket.MSG_CTRUNC:
            raise OSError(errno.EPROTO, "a descriptor came that was not asked for")
        return len(data)

    def close(self) -> None:
        """Let the other side see the end at once. Descriptors in unread messages are closed by another thread."""
        if self.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # it was not connected any more
            self.shutdown(socket.SHUT_RDWR)
        _closer.close(self.detach())


_closer = PatientCloser()
