"""The communicators that every process has: COMM_WORLD and COMM_SELF, joined at their first use."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable

from collectived.cross_device.device_sessions import default_session
from collectived.cross_device.replica import get_replica_context
from collectived.group import Group
from collectived.mpi.communicator import COMM_NULL as COMM_NULL
from collectived.mpi.communicator import Comm


class ProcessComm(Comm):
    """A communicator that joins its group at its first use, and again in a forked child."""

    def __init__(self, join: Callable[[], Group]) -> None:
        super().__init__()
        self._find_group = join
        self._lock = threading.Lock()
        self._pid = 0

    @property
    def group(self) -> Group:
        """The group, with all that MPI has no name for."""
        if self._group is not None and self._pid == os.getpid():
            return self._group
        with self._lock:
            if self._group is None or self._pid != os.getpid():
                self._group, self._pid = self._find_group(), os.getpid()
            return self._group

    def __bool__(self) -> bool:
        return True

    def _after_fork(self) -> None:
        self._lock = threading.Lock()


def _join_self() -> Group:
    return default_session().join(f"self-{uuid.uuid4().hex}", 1, rank=0)


COMM_WORLD = ProcessComm(lambda: get_replica_context()._group)
COMM_SELF = ProcessComm(_join_self)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=COMM_WORLD._after_fork)
    os.register_at_fork(after_in_child=COMM_SELF._after_fork)
