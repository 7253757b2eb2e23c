"""The two ways to a worker: shared memory and doorbells on its own host, gRPC alone from anywhere."""

from __future__ import annotations

import logging
import os
import select
import socket
from typing import TYPE_CHECKING, Protocol

from collectived.calls.limit import Limit
from collectived.calls.places import Describe
from collectived.calls.route import Route
from collectived.errors import NotFoundError, UnavailableError, UnimplementedError
from collectived.gpu.driver import Cuda, CudaError, binding
from collectived.grpc_alone.heap import Heap
from collectived.shared import door
from collectived.shared.device_memory import DeviceMemory
from collectived.shared.doorbell import Doorbell
from collectived.shared.memory import Memory, SessionSocket

if TYPE_CHECKING:
    from collectived.connection.rpc import Joined, Opened, Worker

log = logging.getLogger("collectived")

VARIABLE = "COLLECTIVED_TRANSPORT"
_DOOR_WITHIN = 10.0  # seconds


class Transport(Protocol):
    """What a session needs of a way to its worker.

    Attributes:
        name: as users see it.
        memory: where `Session.empty` makes arrays, and where calls are staged.
    """

    @property
    def name(self) -> str: ...

    @property
    def memory(self) -> Memory | Heap: ...

    def seat(self, joined: Joined) -> tuple[Route, Describe]:
        """The way of a rank that was joined, and how its collectives are described."""

    def on_gpu(self, index: int) -> DeviceMemory | None:
        """Memory of that GPU of the worker; None where it cannot be shared.

        Raises:
            NotFoundError: this process may not use that GPU. UnavailableError: it can use none.
            UnimplementedError: the worker does not say which GPU that is.
        """

    def lost(self) -> bool:
        """Whether the worker has ended the session."""

    def withdraw(self, why: str) -> None:
        """The session is being closed: who waits for the worker gets a CancelledError."""

    def close(self) -> None:
        """Lets go of everything."""

    def sever(self) -> None:
        """In a forked child: lets go of what is its own. Takes no locks, which threads of the parent's may hold."""


class SharedMemory:
    """A worker of this host."""

    name = "shared memory"

    def __init__(self, rpc: Worker, opened: Opened, entered: socket.socket, limit: Limit) -> None:
        """Attaches the session socket, which from here on is the session.

        Raises:
            UnavailableError: nobody answers there.
        """
        self._rpc = rpc
        self._session = opened.session
        self.socket = SessionSocket(entered, rpc.name)
        try:
            self.socket.greet(limit)
            rpc.end_stream()
        except BaseException:
            self.socket.close()
            raise
        self.memory = Memory(self.socket)
        self._gpus = opened.gpus
        self._openings = opened.openings
        self._on_gpus: dict[int, DeviceMemory] = {}

    def on_gpu(self, index: int) -> DeviceMemory | None:
        if index >= len(self._gpus):
            raise UnimplementedError(f"arrays on GPU:{index} are not offered: {self._rpc.name} does not name its UUID")
        if index not in self._on_gpus:
            cuda, device = _own_number(self._gpus[index], index)
            self._on_gpus.setdefault(index, DeviceMemory(self.memory, index, cuda, device, self._openings))
        return self._on_gpus[index]

    def seat(self, joined: Joined) -> tuple[Route, Describe]:
        info, rank = joined.group, joined.rank
        name = self._rpc.name
        doorbell = Doorbell(door.enter(joined.door, joined.token, _DOOR_WITHIN, name), info, rank, name)
        return doorbell, lambda collective, deadline: self._rpc.prepare(
            self._session, info.key, rank, collective, deadline
        )

    def lost(self) -> bool:
        poll = select.poll()
        poll.register(self.socket.socket, 0)  # that the other side has hung up is told unasked
        return bool(poll.poll(0))

    def withdraw(self, why: str) -> None:
        self.socket.withdraw(why)

    def close(self) -> None:
        self.socket.close()
        self.memory.forget()
        while self._on_gpus:
            self._on_gpus.popitem()[1].forget()

    def sever(self) -> None:
        self.socket.close()
        self.memory.forget()  # not that on GPUs, which only the parent may speak to


class Grpc:
    """A worker of any host. The session lasts as long as the stream that opened it."""

    name = "grpc"

    def __init__(self, rpc: Worker, opened: Opened) -> None:
        self._rpc = rpc
        self._session = opened.session
        self.memory = Heap()

    def on_gpu(self, index: int) -> DeviceMemory | None:
        return None

    def seat(self, joined: Joined) -> tuple[Route, Describe]:
        from collectived.grpc_alone.remote import Remote  # late, for it imports grpc

        name = self._rpc.name
        route = Remote(self._rpc, self._session, joined.group, joined.rank, name)
        return route, route.describe

    def lost(self) -> bool:
        return self._rpc.ended

    def withdraw(self, why: str) -> None:
        """Nobody waits here but for RPCs."""

    def close(self) -> None:
        self.memory.forget()

    def sever(self) -> None:
        self.memory.forget()


def _own_number(uuid: str, index: int) -> tuple[Cuda, int]:
    """What this process calls a GPU of the worker, and what it speaks to it by."""
    try:
        cuda = binding()
    except CudaError as error:
        raise UnavailableError(f"GPU:{index} of the worker cannot be used by this process: {error}") from None
    own = list(cuda.devices())
    if uuid not in own:
        raise NotFoundError(
            f"GPU:{index} of the worker is {uuid}, and this process may use {', '.join(own) or 'no GPU'}: is "
            "CUDA_VISIBLE_DEVICES set?"
        )
    return cuda, own.index(uuid)


def choose(rpc: Worker, limit: Limit, alone: bool) -> tuple[Opened, Transport]:
    """Opens a session the fastest way there is.

    Args:
        limit: for all of it. alone: do not ask for shared memory.

    Raises:
        CollectiveError: the worker refuses, or does not answer.
    """
    opened = rpc.open_session(limit, local=not alone)
    if opened.door and not alone:
        at_door = limit.at_most(_DOOR_WITHIN)
        try:
            entered = door.enter(opened.door, opened.token, at_door.remaining, rpc.name)
        except UnavailableError as error:  # of another user, or of another host behind a tunnel
            log.warning("%s; arrays travel over gRPC instead", error)
            rpc.end_stream()
            opened = rpc.open_session(limit, local=False)
        else:
            return opened, SharedMemory(rpc, opened, entered, at_door)
    return opened, Grpc(rpc, opened)


def grpc_alone() -> bool:
    """Whether the environment asks for gRPC even where memory could be shared.

    Raises:
        ValueError: it asks for something else.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", Grpc.name):
        raise ValueError(f"{VARIABLE} must be 'grpc', or not set for the fastest way there is: it is {wanted!r}")
    return wanted == Grpc.name
