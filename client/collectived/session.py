"""Session: this process's connection to the worker of its host."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from collectived import address, door, environment, lifetime
from collectived.arguments import sendable, whole
from collectived.doorbell import Doorbell
from collectived.errors import CollectiveError, FailedPreconditionError, NotFoundError, UnimplementedError
from collectived.group import Group
from collectived.leaves import Array, element_type
from collectived.memory import Memory, SessionSocket
from collectived.prepare import Signatures
from collectived_proto.devices import DeviceName
from collectived_proto.numpy_types import to_numpy
from collectived_proto.options import CommunicationOptions, seconds

if TYPE_CHECKING:
    import grpc

    from collectived.rpc import Joined, Opened, Wish, Worker

log = logging.getLogger("collectived")

_DOOR_WITHIN = 10.0  # seconds
_MOST_RANKS = 1 << 20  # more is a mistake: nobody waits for that many


def connect(
    worker: str | None = None,
    *,
    timeout: float | timedelta | None = 10.0,
    credentials: grpc.ChannelCredentials | None = None,
) -> Session:
    """Connects to a worker: `worker`, else COLLECTIVED_WORKER, else the one job of yours that is running.

    Args:
        worker: `unix:/path` or `host:port`.
        timeout: seconds for it to answer; None and 0: no limit.
        credentials: of gRPC, for TCP with TLS.

    Raises:
        TypeError, ValueError: `worker` is not an address, or `timeout` is negative.
        InvalidArgumentError: several jobs are running; the error lists them.
        UnavailableError: no worker answers, or none is known; the error shows what to type.
        UnimplementedError: the worker is on another host.
    """
    limit = seconds(timeout, "timeout") or math.inf
    found = address.find(worker)
    found.knock(min(limit, threading.TIMEOUT_MAX))

    from collectived.rpc import Worker  # late, for it imports grpc

    rpc = Worker(found, credentials)
    try:
        opened = rpc.open_session(min(limit, threading.TIMEOUT_MAX))
        if not opened.door:
            raise UnimplementedError(
                f"{rpc.name} offers no shared memory to this process: it must run on this host, under the same user"
            )
        sock = SessionSocket(door.enter(opened.door, opened.token, min(limit, _DOOR_WITHIN), rpc.name), rpc.name)
        try:
            sock.greet(min(limit, _DOOR_WITHIN))
            rpc.end_stream()
        except BaseException:
            sock.close()
            raise
    except BaseException:
        rpc.close()
        raise
    return Session(rpc, opened, sock)


class Session:
    """A connection to one worker; made by `connect`. Thread-safe. As a context manager it closes at the end.

    Attributes:
        worker: the worker's name, `/job:worker/task:0`.
        devices: its devices, in full.
        transport: how tensors get there: "shared memory".
    """

    transport = "shared memory"

    def __init__(self, rpc: Worker, opened: Opened, sock: SessionSocket) -> None:
        self.worker = opened.worker
        self.devices = opened.devices
        self._rpc = rpc
        self._token = opened.session
        self._socket = sock
        self._memory = Memory(sock)
        self._groups: list[Group] = []
        self._unusable = ""
        lifetime.opened(self)

    def join(
        self,
        name: str | None = None,
        size: int | tuple[int, int] | None = None,
        *,
        rank: int | None = None,
        device: str | None = None,
        options: CommunicationOptions | None = None,
        timeout: float | timedelta | None = None,
        settle: float = 5.0,
    ) -> Group:
        """Joins a group and waits until it is complete.

        Args:
            name: of the group, within the job; one that begins with "/" belongs to the cluster. Else COLLECTIVED_GROUP.
            size: how many ranks, or (least, most): complete at most, or `settle` seconds after least. Else WORLD_SIZE.
            rank: this process's; else RANK, else given by the coordinator.
            device: of this worker, such as "CPU:1"; else chosen by the worker.
            options: defaults for the group's collectives.
            timeout: seconds to wait for the others; None and 0: for ever, saying every 10 s who is here.

        Raises:
            ValueError: an argument is wrong, or missing from the environment too.
            DeadlineExceededError: not complete in time; the error says who was there.
            CollectiveError: the worker or the coordinator refuses.
        """
        self._check_usable()
        if options is not None and not isinstance(options, CommunicationOptions):
            raise TypeError(f"options must be CommunicationOptions or None, got {type(options).__name__}")
        default_timeout = environment.timeout()
        wish = self._wish(name, size, rank, device, settle, seconds(timeout, "timeout"))
        joined = self._rpc.join(self._token, wish, log.warning)
        group = self._seat(joined, options or CommunicationOptions(), default_timeout)
        self._groups.append(group)
        return group

    def _wish(
        self,
        name: str | None,
        size: int | tuple[int, int] | None,
        rank: int | None,
        device: str | None,
        settle: float,
        timeout: float | None,
    ) -> Wish:
        from collectived.rpc import Wish  # late, for it imports grpc

        name = environment.group_name() if name is None else name
        if not isinstance(name, str) or not name or name != sendable(name):
            raise ValueError(f"name must be a text that is not empty and fits in UTF-8, got {name!r}")
        least, most = _sizes(environment.group_size() if size is None else size)
        if rank is None:
            rank = environment.rank(most)
        if rank is not None:
            rank = whole(rank, "rank", 0, most - 1, f"from 0 to {most - 1} in a group of {most}")
        full = "" if device is None else str(self._device(device))
        if not (settle >= 0 and math.isfinite(settle)):
            raise ValueError(f"settle must be seconds, not negative, got {settle!r}")
        return Wish(name, (least, most), rank, full, float(settle), timeout)

    def _seat(self, joined: Joined, options: CommunicationOptions, default_timeout: float | None) -> Group:
        info, rank = joined.group, joined.rank
        name = f"{self.worker} ({self._rpc.name})"
        sock = door.enter(joined.door, joined.token, _DOOR_WITHIN, name)
        doorbell = Doorbell(sock, info, rank, name)
        signatures = Signatures(
            lambda collective, deadline: self._rpc.prepare(self._token, info.key, rank, collective, deadline),
            self._memory,
            rank,
        )
        return Group(self._groups.remove, info, rank, doorbell, signatures, options, default_timeout)

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, device: str | None = None) -> Array:
        """An uninitialised NumPy array in memory that the worker owns; collectives on it copy nothing in.

        Slices, reshapes and views of it count too. The memory is given back when the last of them is collected.

        Args:
            shape: lengths; dtype: any that collectives carry.
            device: a CPU device of the worker, or None.

        Raises:
            ValueError: a length is negative. TypeError: collectives do not carry that dtype.
            NotFoundError: the worker has no such device; the error lists those it has.
            ResourceExhaustedError: the worker refuses more memory.
        """
        self._check_usable()
        if device is not None and self._device(device).kind != "CPU":
            raise UnimplementedError(f"arrays on {device} are not offered: only on CPU devices")
        lengths = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        expected = f"a length that is not negative, or several (the shape is {shape!r})"
        lengths = tuple(whole(length, "shape", 0, sys.maxsize, expected) for length in lengths)
        return self._memory.empty(lengths, to_numpy(element_type(np.dtype(dtype), "the array")))

    def close(self) -> None:
        """Leaves all groups in the order in which they were joined and ends the session; idempotent."""
        if self._unusable:
            return
        self._unusable = f"the session with {self.worker} is closed; connect again"
        for group in list(self._groups):
            try:
                group.leave()
            except CollectiveError as error:
                log.error("on leaving group %r: %s", group.name, error)
        self._socket.close()
        self._memory.forget()
        self._rpc.close()
        lifetime.closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._unusable:
            for group in list(self._groups):
                group.__exit__(kind, error, traceback)
        self.close()

    def __repr__(self) -> str:
        return f"<Session with {self.worker} at {self._rpc.address.text}: {self.transport}>"

    def _device(self, device: str) -> DeviceName:
        if not isinstance(device, str):
            raise TypeError(f"device must be a name such as 'CPU:1' or None, got {device!r}")
        found = DeviceName.parse(device, _task(self.worker))
        if str(found) not in self.devices:
            shown = ", ".join(DeviceName.parse(known).short for known in self.devices)
            raise NotFoundError(f"{self.worker} has no device {device!r}: it has {shown}")
        return found

    def _check_usable(self) -> None:
        if self._unusable:
            raise FailedPreconditionError(self._unusable)

    def _after_fork(self) -> None:
        self._unusable = f"the session with {self.worker} is the parent's; connect again in the child itself"
        self._socket.close()
        for group in self._groups:
            group._after_fork()
        self._memory.forget()


def _sizes(size: int | tuple[int, int]) -> tuple[int, int]:
    expected = f"a whole number from 1 to {_MOST_RANKS}, or (least, most) of such"
    given = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
    least, most = (whole(number, "size", 1, _MOST_RANKS, expected) for number in given)
    if least > most:
        raise ValueError(f"size must be {expected}, got {size!r}")
    return least, most


def _task(worker: str) -> int:
    number = worker.rpartition(":")[2]
    return int(number) if number.isdigit() else 0
