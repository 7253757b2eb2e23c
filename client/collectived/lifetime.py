"""Open sessions: closed in order when the interpreter exits, and cut off from their worker in a forked child."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import stat
from typing import Protocol


class Mortal(Protocol):
    """What must not outlive the process that made it."""

    def close(self) -> None: ...
    def _after_fork(self) -> None: ...


_open: list[Mortal] = []
_abandoned: list[Mortal] = []  # a parent's: never collected here, for gRPC would act on threads that do not exist


def opened(session: Mortal) -> None:
    _open.append(session)


def closed(session: Mortal) -> None:
    with contextlib.suppress(ValueError):
        _open.remove(session)


def _at_exit() -> None:
    for session in list(_open):
        session.close()


def _after_fork_in_child() -> None:
    for session in _open:
        session._after_fork()
    _abandoned.extend(_open)
    _open.clear()


def drop_connections(peer: object) -> None:
    """Replaces this process's sockets to `peer`, which are gRPC's, by /dev/null.

    Not closed: gRPC still knows their numbers, and would close whatever came to have them.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if _peer(int(name)) == peer:
                os.dup2(null, int(name), inheritable=False)
    os.close(null)


def _peer(descriptor: int) -> object:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return None
    sock = socket.socket(fileno=descriptor)
    try:
        return sock.getpeername()
    finally:
        sock.detach()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
