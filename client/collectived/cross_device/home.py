"""The process's default session: connected at its first use, forgotten in forked children."""

from __future__ import annotations

import os
import threading

from collectived.session import Session, connect

_lock = threading.Lock()
_default: Session | None = None


def default_session() -> Session:
    """The session of those that were given none; it ends with the process. Where its worker is lost, a new one.

    Raises:
        UnavailableError: no worker answers, or none is known.
    """
    global _default
    with _lock:
        if _default is not None and lost(_default):
            _default.close()
            _default = None
        if _default is None:
            _default = connect()
        return _default


def lost(session: Session) -> bool:
    """Whether a session is closed, or its worker has hung up."""
    return bool(session._unusable) or session._transport.lost()


def _after_fork_in_child() -> None:
    global _lock, _default
    _lock = threading.Lock()
    _default = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
