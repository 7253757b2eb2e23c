"""Open sessions: closed in order when the interpreter exits, and cut off from their worker in a forked child.

gRPC closes its own sockets in a child, and does so at once because no RPC is open between calls (see `rpc.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
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


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
