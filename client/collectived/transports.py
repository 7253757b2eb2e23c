"""The two ways to a worker: shared memory and doorbells on its own host, gRPC alone from anywhere."""

from __future__ import annotations

import logging
import os
import select
import socket
from typing import TYPE_CHECKING, Protocol

from collectived.calls.buffers import Describe
from collectived.calls.channel import RankChannel
from collectived.calls.timeout import Timeout
from collectived.errors import NotFoundError, UnavailableError, UnimplementedError
from collectived.gpu.driver import Cuda, CudaError, get_cuda
from collectived.grpc_alone.heap import Heap
from collectived.shared import seqpacket
from collectived.shared.device_memory import DeviceMemory
from collectived.shared.doorbell import Doorbell
from collectived.shared.memory import SessionSocket, SharedMemory
from collectived.shared.stack_answers import StackAnswers

if TYPE_CHECKING:
    from collectived.connection.rpc import JoinedGroup, OpenedSession, WorkerClient
from collectived_proto.types import GroupInfo

log = logging.getLogger("collectived")

TRANSPORT_VARIABLE = "COLLECTIVED_TRANSPORT"
_CONNECT_TIMEOUT = 10.0  # seconds


class Transport(Protocol):
    """The connection of a session to its worker.

    Attributes:
        name: as users see it.
        memory: where `Session.empty` makes arrays, and where calls are staged.
    """

    @property
    def name(self) -> str: ...

    @property
    def memory(self) -> SharedMemory | Heap: ...

    def open_channel(self, joined: JoinedGroup) -> tuple[RankChannel, Describe]:
        """The way of a rank that was joined, and how its collectives are described."""

    def get_device_memory(self, index: int) -> DeviceMemory | None:
        """Memory of that GPU of the worker; None where it cannot be shared.

        Raises:
            NotFoundError: this process may not use that GPU. UnavailableError: it can use none.
            UnimplementedError: the worker does not say which GPU that is.
        """

    def is_lost(self) -> bool:
        """Whether the worker has ended the session."""

    def cancel(self, why: str) -> None:
        """End all waits for the worker with CancelledError, because the session is being closed."""

    def close(self) -> None:
        """Lets go of everything."""

    def invalidate_after_fork(self) -> None:
        """In a forked child: lets go of what is its own. Takes no locks, which threads of the parent's may hold."""


class SharedMemoryTransport:
    """A session with a worker of this host, over memory of both."""

    name = "shared memory"

    def __init__(self, rpc: WorkerClient, opened: OpenedSession, entered: socket.socket, limit: Timeout) -> None:
        """Attaches the session socket, which from here on is the session.

        Raises:
            UnavailableError: no worker answers there.
        """
        self._rpc = rpc
        self._session = opened.session
        self.socket = SessionSocket(entered, rpc.name)
        try:
            self.socket.await_attached(limit)
            rpc.end_stream()
        except BaseException:
            self.socket.close()
            raise
        self.memory = SharedMemory(self.socket)
        self._stack_answers = StackAnswers(opened.socket_path, opened.stack_token, rpc.name)
        self._gpus = opened.gpus
        self._max_open_allocations = opened.max_open_allocations
        self._device_memories: dict[int, DeviceMemory] = {}

    def get_device_memory(self, index: int) -> DeviceMemory | None:
        if index >= len(self._gpus):
            raise UnimplementedError(f"arrays on GPU:{index} are not offered: {self._rpc.name} does not name its UUID")
        if index not in self._device_memories:
            cuda, device = _find_local_gpu(self._gpus[index], index)
            self._device_memories.setdefault(
                index, DeviceMemory(self.memory, index, cuda, device, self._max_open_allocations)
            )
        return self._device_memories[index]

    def open_channel(self, joined: JoinedGroup) -> tuple[RankChannel, Describe]:
        key, rank = joined.group.key, joined.rank
        return open_doorbell(joined, self._rpc.name), lambda collective, deadline: self._rpc.prepare(
            self._session, key, rank, collective, deadline
        )

    def is_lost(self) -> bool:
        poll = select.poll()
        poll.register(self.socket.socket, 0)  # poll reports a closed peer without being asked
        return bool(poll.poll(0))

    def cancel(self, why: str) -> None:
        self.socket.cancel(why)

    def close(self) -> None:
        self._stack_answers.close()
        self.socket.close()
        self.memory.clear()
        while self._device_memories:
            self._device_memories.popitem()[1].clear()

    def invalidate_after_fork(self) -> None:
        self._stack_answers.invalidate_after_fork()
        self.socket.close()
        self.memory.clear()  # not that on GPUs, which only the parent may speak to


class GrpcTransport:
    """A worker of any host. The session lasts as long as the stream that opened it."""

    name = "grpc"

    def __init__(self, rpc: WorkerClient, opened: OpenedSession) -> None:
        self._rpc = rpc
        self._session = opened.session
        self.memory = Heap()

    def get_device_memory(self, index: int) -> DeviceMemory | None:
        return None

    def open_channel(self, joined: JoinedGroup) -> tuple[RankChannel, Describe]:
        from collectived.grpc_alone.channel import GrpcChannel  # late, for it imports grpc

        name = self._rpc.name
        route = GrpcChannel(self._rpc, self._session, joined.group, joined.rank, name)
        return route, route.describe

    def is_lost(self) -> bool:
        return self._rpc.has_stream_ended

    def cancel(self, why: str) -> None:
        """Nothing to do: threads wait only for RPCs."""

    def close(self) -> None:
        self.memory.clear()

    def invalidate_after_fork(self) -> None:
        self.memory.clear()


def open_doorbell(joined: JoinedGroup, worker: str) -> Doorbell:
    """Connect a rank that has joined to its worker.

    Raises:
        UnavailableError: the worker does not answer. Nothing stays open then.
    """
    info, rank = joined.group, joined.rank
    sock = seqpacket.connect(joined.socket_path, joined.token, _CONNECT_TIMEOUT, worker)
    try:
        if not joined.has_segment:
            return Doorbell(sock, info, rank, worker)
        return _open_in_segment(sock, info, rank, worker, joined.may_match)
    except BaseException:
        sock.close()
        raise


def _open_in_segment(sock: socket.socket, info: GroupInfo, rank: int, name: str, may_match: bool) -> Doorbell:
    # Imported late, for they need the native core, and so Linux.
    from collectived.shared.matching_channel import MatchingChannel
    from collectived.shared.segment_channel import SegmentChannel
    from collectived.shared.spanning_channel import SpanningChannel

    kind = SegmentChannel
    if len({member.worker for member in info.members}) > 1:
        kind = MatchingChannel if may_match else SpanningChannel
    channel = kind(sock, info, rank, name)
    try:
        channel.await_segment(_CONNECT_TIMEOUT)
    except BaseException:
        channel.detach()
        raise
    return channel


def _find_local_gpu(uuid: str, index: int) -> tuple[Cuda, int]:
    """Find a GPU of the worker in this process: the interface to it, and its number here."""
    try:
        cuda = get_cuda()
    except CudaError as error:
        raise UnavailableError(f"GPU:{index} of the worker cannot be used by this process: {error}") from None
    own = list(cuda.device_uuids())
    if uuid not in own:
        raise NotFoundError(
            f"GPU:{index} of the worker is {uuid}, and this process may use {', '.join(own) or 'no GPU'}: is "
            "CUDA_VISIBLE_DEVICES set?"
        )
    return cuda, own.index(uuid)


def open_transport(rpc: WorkerClient, limit: Timeout, alone: bool) -> tuple[OpenedSession, Transport]:
    """Opens a session the fastest way there is.

    Args:
        limit: for all of it. alone: do not ask for shared memory.

    Raises:
        CollectiveError: the worker refuses, or does not answer.
    """
    opened = rpc.open_session(limit, local=not alone)
    if opened.socket_path and not alone:
        at_door = limit.at_most(_CONNECT_TIMEOUT)
        try:
            entered = seqpacket.connect(opened.socket_path, opened.token, at_door.remaining, rpc.name)
        except UnavailableError as error:  # of another user, or of another host behind a tunnel
            log.warning("%s; arrays travel over gRPC instead", error)
            rpc.end_stream()
            opened = rpc.open_session(limit, local=False)
        else:
            return opened, SharedMemoryTransport(rpc, opened, entered, at_door)
    return opened, GrpcTransport(rpc, opened)


def is_grpc_forced() -> bool:
    """Whether the environment asks for gRPC even where memory could be shared.

    Raises:
        ValueError: it asks for something else.
    """
    wanted = os.environ.get(TRANSPORT_VARIABLE, "")
    if wanted not in ("", GrpcTransport.name):
        raise ValueError(
            f"{TRANSPORT_VARIABLE} must be 'grpc', or not set for the fastest way there is: it is {wanted!r}"
        )
    return wanted == GrpcTransport.name
