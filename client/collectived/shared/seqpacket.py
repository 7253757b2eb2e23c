"""The worker's door: Unix SOCK_SEQPACKET sockets beside gRPC, each admitted by a one-time token."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import sys

from collectived.errors import UnavailableError
from collectived_proto.ipc import messages

_LINUX = sys.platform == "linux"
_ANCILLARY_SIZE = socket.CMSG_SPACE(array.array("i").itemsize) if _LINUX else 0  # one descriptor
DESCRIPTOR_LOST = -2  # instead of a descriptor that came while this process could have no more
_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC) if _LINUX else 0


def connect(path: str, token: bytes, timeout: float, worker: str) -> socket.socket:
    """A non-blocking socket at the worker's door, with the token sent.

    Raises:
        UnavailableError: the door does not open.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # A blocking connect with a limit waits for its turn where many knock; a non-blocking one is turned away.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))
        sock.connect(path)
        sock.send(messages.encode_hello(token))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise UnavailableError(f"{worker} cannot be reached at {path}: {error}; is it still running?") from error
    return sock


def _timeval(seconds: float) -> bytes:
    microseconds = max(1, min(int(seconds * 1e6), 1 << 50))  # zero would mean without a limit
    return struct.pack("@ll", *divmod(microseconds, 1_000_000))


def receive(sock: socket.socket, buffer: bytearray) -> tuple[bytes, int]:
    """One message and the descriptor that came with it, or -1; b"" where the other side has hung up.

    `DESCRIPTOR_LOST` stands for one that the kernel has dropped, for this process is at its limit.

    Raises:
        BlockingIOError: nothing is there.
    """
    try:
        length, ancillary, flags, _ = sock.recvmsg_into([buffer], _ANCILLARY_SIZE, _FLAGS)
    except BlockingIOError:
        raise
    except OSError:
        return b"", -1
    descriptor = _descriptor(ancillary) if ancillary else -1
    if flags & socket.MSG_CTRUNC and descriptor < 0:
        descriptor = DESCRIPTOR_LOST
    return bytes(memoryview(buffer)[:length]), descriptor


def close(sock: socket.socket, buffer: bytearray) -> None:
    """Closes a socket so that the other side still reads all that was sent.

    Unread messages here would make the kernel report a reset there, before the last messages.
    """
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # also wakes a thread that waits in it
    with contextlib.suppress(BlockingIOError):
        while True:
            message, descriptor = receive(sock, buffer)
            if descriptor >= 0:
                os.close(descriptor)
            if not message:
                break
    sock.close()


def _descriptor(ancillary: list[tuple[int, int, bytes]]) -> int:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    for extra in found[1:]:
        os.close(extra)
    return found[0] if found else -1


def send(sock: socket.socket, message: bytes, timeout: float) -> bool:
    """Sends one message; False where the other side has hung up or has not made room for it in time."""
    while True:
        try:
            sock.send(message)
            return True
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(sock, select.POLLOUT)
            if not waiting.poll(timeout * 1000):
                return False
        except OSError:
            return False
