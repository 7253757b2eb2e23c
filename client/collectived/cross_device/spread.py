"""One client on the devices of several workers: a session with each, and a hidden group for every list of devices."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Iterable
from types import TracebackType

from collectived.arguments import sendable
from collectived.cross_device.devices import full_name
from collectived.cross_device.home import connect_by, default_session, lost
from collectived.cross_device.limits import NEVER, held, timely, within
from collectived.cross_device.ranks import Ranks
from collectived.cross_device.threads import each
from collectived.cross_device.workers import Whereabouts, ask
from collectived.errors import NotFoundError, UnavailableError
from collectived.group import Group
from collectived.session import Session
from collectived_proto.deadline import Deadline
from collectived_proto.devices import DeviceName

_LEAVE_WITHIN = 5.0  # seconds
_ANSWER_WITHIN = 10.0  # seconds for the session's worker to say where the others are
_JOIN_WITHIN = 60.0  # seconds; all ranks join at once, so only a worker in trouble takes long
_numbers = itertools.count()
_lock = threading.Lock()


def spread_from(session: Session | None, deadline: Deadline = NEVER) -> Spread:
    """What this client holds beside `session`, or beside the process's default session.

    Raises:
        FailedPreconditionError: the session is closed, or the parent's.
        DeadlineExceededError: there is no default session yet, and no worker has answered by the deadline.
    """
    session = default_session(deadline) if session is None else session
    session._check_usable()
    with _lock:
        for held in session._held:
            if isinstance(held, Spread):
                return held
        return Spread(session)


class Spread:
    """Sessions with the workers of one job, and the groups of this client over their devices. Thread-safe.

    It is held by the session it starts from, as a group is: it is closed with that session.

    Attributes:
        name: as the session calls it in its log.
    """

    name = "cross-device"

    def __init__(self, session: Session) -> None:
        self._home = session
        self._task = DeviceName.parse(session.devices[0]).task
        self._lock = threading.Lock()  # over all below
        self._sessions = {self._task: session}
        self._known: dict[int, Whereabouts] = {}
        self._ranks: dict[tuple[str, ...], Ranks] = {}
        session._held.append(self)

    def devices(self, names: Iterable[str], deadline: Deadline = NEVER) -> tuple[str, ...]:
        """These devices in full; names that say no worker are devices of the session's.

        Raises:
            ValueError: not a device name.
            NotFoundError: no worker of the job has such a device; the error lists those it has.
            CollectiveError: the session's worker does not say where the others are, or not by the deadline.
        """
        full = tuple(full_name(name, self._task) for name in names)
        for device in full:
            self._check(DeviceName.parse(device), deadline)
        return full

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs of the session's worker, in full."""
        return tuple(device for device in self._home.devices if DeviceName.parse(device).kind == "GPU")

    def ranks(self, devices: tuple[str, ...], purpose: str = "", deadline: Deadline = NEVER) -> Ranks:
        """One rank per device, in this order; joined at the first use, and again after a failure.

        Args:
            devices: in full; one may be named several times.
            purpose: groups of different purposes are different groups over the same devices.

        Raises:
            CollectiveError: they cannot be joined; DeadlineExceededError: not by the deadline.
        """
        key = (*devices, purpose)
        with held(self._lock, deadline, f"a join over {len(devices)} devices"):
            ranks = self._ranks.get(key)
            if ranks is not None and ranks.over:
                ranks.let_go(within(deadline, _LEAVE_WITHIN))
                ranks = None
            if ranks is None:
                ranks = self._ranks[key] = Ranks(self._join(devices, deadline))
            return ranks

    def _check(self, device: DeviceName, deadline: Deadline) -> None:
        offered = self._home.devices if device.task == self._task else self._where(device, deadline).devices
        if str(device) not in offered:
            shown = ", ".join(DeviceName.parse(name).short for name in offered)
            raise NotFoundError(f"/job:worker/task:{device.task} has no device {device.short!r}: it has {shown}")

    def _where(self, device: DeviceName, deadline: Deadline) -> Whereabouts:
        if device.task not in self._known:
            with timely(deadline):
                self._known = ask(self._home._rpc, within(deadline, _ANSWER_WITHIN))
        if device.task not in self._known:
            shown = ", ".join(f"task {task}" for task in sorted(self._known)) or "none"
            raise NotFoundError(f"the job has no worker for {device}; its workers are: {shown}")
        return self._known[device.task]

    def _session(self, device: str, deadline: Deadline) -> Session:
        name = DeviceName.parse(device)
        session = self._sessions.get(name.task)
        if session is not None and session is not self._home and lost(session):
            self._sessions.pop(name.task).close()
            session = None
        if session is None:
            self._known.clear()  # another worker may have taken the place of one that was known
            session = connect_by(deadline, self._where(name, deadline).address)
            if device not in session.devices:  # a path means another socket on every host
                session.close()
                raise UnavailableError(f"the worker for {device} cannot be reached from here: it is on another host")
            self._sessions[name.task] = session
        return session

    def _join(self, devices: tuple[str, ...], deadline: Deadline) -> list[Group]:
        name = f"cross-device-{sendable(socket.gethostname())}-{os.getpid()}-{next(_numbers)}"
        sessions = [self._session(device, deadline) for device in devices]
        limit = within(deadline, _JOIN_WITHIN)
        wanted = True
        joined: list[Group] = []

        def join(rank: int) -> Group:
            group = sessions[rank].join(name, len(devices), rank=rank, device=devices[rank], timeout=limit)
            joined.append(group)
            if not wanted:
                Ranks([group]).leave()
            return group

        if len(devices) == 1:
            return [join(0)]
        try:
            groups, errors = each(len(devices), join, "collectived-join")
        except BaseException:
            wanted = False  # who has not joined yet leaves as soon as it has
            Ranks(joined).leave()
            raise
        if errors:
            Ranks(joined).leave()
            with timely(deadline):
                raise errors[0]
        return groups

    # As a group is held by its session

    def leave(self) -> None:
        """Leaves all groups and ends the sessions with other workers."""
        with self._lock:
            for ranks in self._ranks.values():
                ranks.leave()
            for session in self._sessions.values():
                if session is not self._home:
                    session.close()
        held = self._home._held
        if self in held:
            held.remove(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()

    def _withdraw(self, why: str) -> None:
        for session in list(self._sessions.values()):
            if session is not self._home:
                session._withdraw(why)

    def _after_fork(self) -> None:
        """Nothing to do: the sessions and groups held here are cut off by themselves."""


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
