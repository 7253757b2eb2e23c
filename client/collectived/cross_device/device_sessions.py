"""One client on the devices of several workers: a session with each, and a hidden group for every list of devices."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from collectived.arguments import escape_surrogates
from collectived.cross_device.local_ranks import LocalRanks, run_in_threads
from collectived.cross_device.timeouts import NO_DEADLINE, clamp_timeout, hold_lock, map_late_errors
from collectived.cross_device.values import full_device_name
from collectived.errors import DeadlineExceededError, NotFoundError, UnavailableError
from collectived.group import Group
from collectived.session import Session, connect
from collectived_proto.deadline import Deadline
from collectived_proto.devices import DeviceName

if TYPE_CHECKING:
    from collectived.connection.rpc import WorkerClient

_CONNECT_TIMEOUT = 10.0  # seconds for a worker to answer
_LEAVE_TIMEOUT = 5.0  # seconds
_STATUS_TIMEOUT = 10.0  # seconds for the session's worker to say where the others are
_JOIN_TIMEOUT = 60.0  # seconds; all ranks join at once, so only a worker in trouble takes long

_numbers = itertools.count()
_default_lock = threading.Lock()
_default: Session | None = None
_device_sessions_lock = threading.Lock()


def default_session(deadline: Deadline = NO_DEADLINE) -> Session:
    """The session of those that were given none; it ends with the process. Where its worker is lost, a new one.

    Raises:
        UnavailableError: no worker answers, or none is known.
        DeadlineExceededError: none has answered by the deadline.
    """
    global _default
    with hold_lock(_default_lock, deadline, "the default session"):
        if _default is not None and is_lost(_default):
            _default.close()
            _default = None
        if _default is None:
            _default = connect_by(deadline)
        return _default


def connect_by(deadline: Deadline, worker: str | None = None) -> Session:
    """`connect`, no longer than until a deadline.

    Raises:
        UnavailableError: no worker answers. DeadlineExceededError: none has answered by the deadline.
    """
    with map_late_errors(deadline):
        return connect(worker, timeout=clamp_timeout(deadline, _CONNECT_TIMEOUT))


def is_lost(session: Session) -> bool:
    """Whether a session is closed, or its worker has hung up."""
    return bool(session._unusable_reason) or session._transport.is_lost()


@dataclass(frozen=True, slots=True)
class WorkerLocation:
    """A worker: the address at which it is connected to, and its devices in full."""

    address: str
    devices: tuple[str, ...]


def fetch_workers(rpc: WorkerClient, timeout: float) -> dict[int, WorkerLocation]:
    """All workers of the job by their task; `timeout` is in seconds.

    Raises:
        UnavailableError: no answer in time. CollectiveError: the worker refuses.
    """
    from collectived_proto.v1 import status_pb2  # late, for it brings protobuf

    try:
        reply = rpc.status(status_pb2.StatusRequest(), timeout)
    except DeadlineExceededError:
        raise UnavailableError(
            f"{rpc.name} has not answered within {timeout:.3g} s where the job's other workers are; one may be stopped"
        ) from None
    return {row.task: WorkerLocation(row.address, tuple(row.devices)) for row in reply.workers if row.address}


def get_device_sessions(session: Session | None, deadline: Deadline = NO_DEADLINE) -> DeviceSessions:
    """Return the sessions that this client holds beside `session`, or beside the process's default session.

    Raises:
        FailedPreconditionError: the session is closed, or the parent's.
        DeadlineExceededError: there is no default session yet, and no worker has answered by the deadline.
    """
    session = default_session(deadline) if session is None else session
    session._check_usable()
    with _device_sessions_lock:
        for held in session._resources:
            if isinstance(held, DeviceSessions):
                return held
        return DeviceSessions(session)


class DeviceSessions:
    """Sessions with the workers of one job, and the groups of this client over their devices. Thread-safe.

    It is held by the session it starts from, as a group is: it is closed with that session.

    Attributes:
        name: as the session calls it in its log.
    """

    name = "cross-device"

    def __init__(self, session: Session) -> None:
        self._home_session = session
        self._task = DeviceName.parse(session.devices[0]).task
        self._lock = threading.Lock()  # over all below
        self._sessions = {self._task: session}
        self._worker_locations: dict[int, WorkerLocation] = {}
        self._ranks_by_devices: dict[tuple[str, ...], LocalRanks] = {}
        session._resources.append(self)

    def resolve_devices(self, names: Iterable[str], deadline: Deadline = NO_DEADLINE) -> tuple[str, ...]:
        """These devices in full; names that say no worker are devices of the session's.

        Raises:
            ValueError: not a device name.
            NotFoundError: no worker of the job has such a device; the error lists those it has.
            CollectiveError: the session's worker does not say where the others are, or not by the deadline.
        """
        full = tuple(full_device_name(name, self._task) for name in names)
        for device in full:
            self._check_device(DeviceName.parse(device), deadline)
        return full

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs of the session's worker, in full."""
        return tuple(device for device in self._home_session.devices if DeviceName.parse(device).kind == "GPU")

    def get_ranks(self, devices: tuple[str, ...], purpose: str = "", deadline: Deadline = NO_DEADLINE) -> LocalRanks:
        """One rank per device, in this order; joined at the first use, and again after a failure.

        Args:
            devices: in full; one may be named several times.
            purpose: groups of different purposes are different groups over the same devices.

        Raises:
            CollectiveError: they cannot be joined; DeadlineExceededError: not by the deadline.
        """
        key = (*devices, purpose)
        with hold_lock(self._lock, deadline, f"a join over {len(devices)} devices"):
            ranks = self._ranks_by_devices.get(key)
            if ranks is not None and ranks.is_over:
                ranks.discard(clamp_timeout(deadline, _LEAVE_TIMEOUT))
                ranks = None
            if ranks is None:
                ranks = self._ranks_by_devices[key] = LocalRanks(self._join(devices, deadline))
            return ranks

    def _check_device(self, device: DeviceName, deadline: Deadline) -> None:
        offered = (
            self._home_session.devices if device.task == self._task else self._locate_worker(device, deadline).devices
        )
        if str(device) not in offered:
            shown = ", ".join(DeviceName.parse(name).short for name in offered)
            raise NotFoundError(f"worker {device.task} has no device {device.short!r}: it has {shown}")

    def _locate_worker(self, device: DeviceName, deadline: Deadline) -> WorkerLocation:
        if device.task not in self._worker_locations:
            with map_late_errors(deadline):
                self._worker_locations = fetch_workers(
                    self._home_session._rpc, clamp_timeout(deadline, _STATUS_TIMEOUT)
                )
        if device.task not in self._worker_locations:
            shown = ", ".join(f"task {task}" for task in sorted(self._worker_locations)) or "none"
            raise NotFoundError(f"the job has no worker for {device}; its workers are: {shown}")
        return self._worker_locations[device.task]

    def _get_session(self, device: str, deadline: Deadline) -> Session:
        name = DeviceName.parse(device)
        session = self._sessions.get(name.task)
        if session is not None and session is not self._home_session and is_lost(session):
            self._sessions.pop(name.task).close()
            session = None
        if session is None:
            self._worker_locations.clear()  # another worker may have taken the place of one that was known
            session = connect_by(deadline, self._locate_worker(name, deadline).address)
            if device not in session.devices:  # a path means another socket on every host
                session.close()
                raise UnavailableError(f"the worker for {device} cannot be reached from here: it is on another host")
            self._sessions[name.task] = session
        return session

    def _join(self, devices: tuple[str, ...], deadline: Deadline) -> list[Group]:
        name = f"cross-device-{escape_surrogates(socket.gethostname())}-{os.getpid()}-{next(_numbers)}"
        sessions = [self._get_session(device, deadline) for device in devices]
        limit = clamp_timeout(deadline, _JOIN_TIMEOUT)
        wanted = True
        joined: list[Group] = []

        def join(rank: int) -> Group:
            group = sessions[rank].join(name, len(devices), rank=rank, device=devices[rank], timeout=limit)
            joined.append(group)
            if not wanted:
                LocalRanks([group]).leave()
            return group

        if len(devices) == 1:
            return [join(0)]
        try:
            groups, errors = run_in_threads(len(devices), join, "collectived-join")
        except BaseException:
            wanted = False  # a rank that has not joined yet leaves as soon as it has
            LocalRanks(joined).leave()
            raise
        if errors:
            LocalRanks(joined).leave()
            with map_late_errors(deadline):
                raise errors[0]
        return groups

    # As a group is held by its session

    def leave(self) -> None:
        """Leaves all groups and ends the sessions with other workers."""
        with self._lock:
            for ranks in self._ranks_by_devices.values():
                ranks.leave()
            for session in self._sessions.values():
                if session is not self._home_session:
                    session.close()
        held = self._home_session._resources
        if self in held:
            held.remove(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()

    def _cancel(self, why: str) -> None:
        for session in list(self._sessions.values()):
            if session is not self._home_session:
                session._cancel(why)

    def _after_fork(self) -> None:
        """Nothing to do: the sessions and groups held here are cut off by themselves."""


def _after_fork_in_child() -> None:
    global _default, _default_lock, _device_sessions_lock
    _default_lock, _device_sessions_lock = threading.Lock(), threading.Lock()
    _default = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
