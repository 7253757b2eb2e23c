"""The process's default session: connected at its first use, forgotten in forked children."""

from __future__ import annotations

import os
import threading

from collectived.cross_device.timeouts import NO_DEADLINE, clamp_timeout, hold_lock, map_late_errors
from collectived.session import Session, connect
from collectived_proto.deadline import Deadline

_CONNECT_TIMEOUT = 10.0  # seconds for a worker to answer

_lock = threading.Lock()
_default: Session | None = None


def default_session(deadline: Deadline = NO_DEADLINE) -> Session:
    """The session of those that were given none; it ends with the process. Where its worker is lost, a new one.

    Raises:
        UnavailableError: no worker answers, or none is known.
        DeadlineExceededError: none has answered by the deadline.
    """
    global _default
    with hold_lock(_lock, deadline, "the default session"):
        if _default is not None and is_lost(_default):
            _default.close()
            _default = None
        if _default is None:
            _default = connect_by(deadline)
        return _default


def connect_by(deadline: Deadline, worker: str | None = None) -> Session:
    """`connect`, no longer than until a deadline.

    Raises:
        UnavailableError: nobody answers. DeadlineExceededError: nobody has by the deadline.
    """
    with map_late_errors(deadline):
        return connect(worker, timeout=clamp_timeout(deadline, _CONNECT_TIMEOUT))


def is_lost(session: Session) -> bool:
    """Whether a session is closed, or its worker has hung up."""
    return bool(session._unusable_reason) or session._transport.is_lost()


def _after_fork_in_child() -> None:
    global _lock, _default
    _lock = threading.Lock()
    _default = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
