"""Open sessions: closed in order when the interpreter exits, and cut off from their worker in a forked child.

gRPC closes its own sockets in a child, and does so at once because no RPC is open between calls (see `rpc.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import Protocol


class ProcessBound(Protocol):
    """An object that must not outlive the process that made it."""

    def close(self) -> None: ...
    def _after_fork(self) -> None: ...


_open_sessions: list[ProcessBound] = []
_inherited_sessions: list[
    ProcessBound
] = []  # a parent's: never collected here, for gRPC would act on threads that do not exist


def register(session: ProcessBound) -> None:
    _open_sessions.append(session)


def unregister(session: ProcessBound) -> None:
    with contextlib.suppress(ValueError):
        _open_sessions.remove(session)


def _at_exit() -> None:
    for session in list(_open_sessions):
        session.close()


def _after_fork_in_child() -> None:
    for session in _open_sessions:
        session._after_fork()
    _inherited_sessions.extend(_open_sessions)
    _open_sessions.clear()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
