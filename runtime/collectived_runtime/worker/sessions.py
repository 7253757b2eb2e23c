"""Sessions: the clients of this worker, their memory, and the ranks they hold.

A session lives as long as its `OpenSession` stream; its socket's end and its process' end are the same thing, whichever
is noticed first. Everything here runs in the worker's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from collectived_proto.devices import DeviceName
from collectived_proto.errors import (
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from collectived_proto.ipc import messages
from collectived_proto.version import FIRST_VERSIONS, VersionRange
from collectived_runtime.auth.callers import Caller
from collectived_runtime.auth.credentials import AccessLevel
from collectived_runtime.auth.peers import get_unix_peer
from collectived_runtime.device.gpus import Gpu
from collectived_runtime.engine.base.lent import MemoryUser
from collectived_runtime.engine.base.memory_budget import MemoryBudget, SessionBudget
from collectived_runtime.engine.clients.doorbells import DOORBELL_GRACE_SECONDS
from collectived_runtime.engine.loop.group_loop import GroupLoop
from collectived_runtime.heap import HeapTrimmer
from collectived_runtime.limits.descriptors import TARGET_DESCRIPTORS
from collectived_runtime.limits.quota_settings import Quotas
from collectived_runtime.limits.rejections import Limit, MessageSource, RejectionCounters, format_limit_error
from collectived_runtime.worker.arenas import ArenaLimits, SessionArenas
from collectived_runtime.worker.devices import DeviceOffer
from collectived_runtime.worker.remote_ranks.submit import RemoteRank
from collectived_runtime.worker.stacks import StackSampler, StackTaker

log = logging.getLogger("collectived.worker")

SESSION_ID_BYTES = 16
_SO_PEERPIDFD = 77  # Linux 6.5; not named by Python's socket module
_MAX_ENDED_SESSIONS = 1024  # sessions that have ended, and why
_RETAINED_DIVISOR = 16  # memory that a session keeps may take one part in so many of the worker's descriptors
MAX_VERSIONS = 16  # of clients that are reported


@dataclass(frozen=True, slots=True)
class Client:
    """The client that opened a session, in its own words; pid and uid are the kernel's where there is a socket."""

    host: str
    pid: int
    label: str
    job: str
    versions: VersionRange = FIRST_VERSIONS


@dataclass(slots=True)
class HeldRank:
    """A rank that a session holds; `remote_rank` is where it submits over gRPC, None where it has a doorbell."""

    group_loop: GroupLoop
    rank: int
    join: bytes = b""  # the token of the join by which it came; empty: it had none
    remote_rank: RemoteRank | None = None


@dataclass(slots=True)
class Session:
    client: Client
    budget: SessionBudget
    on_end: Callable[[Session], None]  # called when it has ended
    is_remote: bool = False  # its client shares no memory with this worker
    caller: Caller = field(default_factory=lambda: Caller(AccessLevel.NONE))  # that opened it
    devices: tuple[DeviceName, ...] = ()  # that it may join on
    rejections: RejectionCounters = field(default_factory=RejectionCounters)
    max_ranks: int = 0  # that it may hold or be joining; 0: any number
    descriptor_limit: int = TARGET_DESCRIPTORS  # that this process may have
    pending_joins: int = 0
    gpu_budgets: Mapping[Gpu, SessionBudget] = field(default_factory=dict)  # its share of each GPU's memory
    session_id: bytes = field(default_factory=lambda: secrets.token_bytes(SESSION_ID_BYTES))
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    held_ranks: list[HeldRank] = field(default_factory=list)
    pidfd: int = -1
    max_open_allocations: int = 0  # allocations of its client's own that may be open at a time, on each GPU
    arenas: SessionArenas = field(init=False)
    stacks: StackSampler = field(init=False)  # where the threads of its client are
    _socket: socket.socket | None = None
    _memory_users: int = 0  # in group loops, which may read its memory
    _end_reason: str = "its session ended"

    def __post_init__(self) -> None:
        limits = ArenaLimits(self.budget, self.gpu_budgets, self.descriptor_limit, self.max_open_allocations)
        self.arenas = SessionArenas(limits, self.devices, self.rejections, self._send, self.ended.is_set)
        pid = self.caller.unix_peer.pid if self.caller.unix_peer else 0
        self.stacks = StackSampler(pid, lambda: self.rejections.count_malformed(MessageSource.SESSION, self.uid))

    @property
    def arena_bytes(self) -> int:
        return self.arenas.host_bytes

    @property
    def uid(self) -> int | None:
        """The uid of its user, which alone may show its tokens; None: not known."""
        return self.caller.unix_peer.uid if self.caller.unix_peer else None

    @property
    def has_socket(self) -> bool:
        """Whether it lives by its socket, rather than by the stream that opened it."""
        return self._socket is not None

    def attach(self, connected: socket.socket) -> None:
        """The session socket has arrived: watch it, and the process behind it."""
        loop = asyncio.get_running_loop()
        if self.ended.is_set() or self._socket is not None:
            connected.close()
            return
        connected.setblocking(False)
        self._socket = connected
        self.pidfd = _open_pidfd(connected)
        loop.add_reader(connected.fileno(), self._on_readable)
        self._send(
            messages.encode_bare(messages.MessageType.PONG)
        )  # from here on the socket's end is the session's end
        if self.pidfd >= 0:
            loop.add_reader(self.pidfd, self.end, "its process ended")

    def sample_stack(self, loop: asyncio.AbstractEventLoop, take: StackTaker) -> None:
        """Have `take` called, in the event loop's thread, with the places of the client's threads. From any thread."""
        call_soon_threadsafe(loop, lambda: self.stacks.sample(take))

    @property
    def ended_error(self) -> UnavailableError:
        """The error of a call that comes when the session has ended."""
        return _ended_error(self._end_reason)

    @property
    def end_reason(self) -> str:
        return self._end_reason

    def end(self, why: str) -> None:
        """End the session once; its ranks are lost to their groups."""
        if self.ended.is_set():
            return
        self._end_reason = why
        self.ended.set()
        loop = asyncio.get_running_loop()
        for holding in self.held_ranks:
            disconnect_rank(holding, why)
            if holding.remote_rank is not None:
                holding.remote_rank.prepared_cache.clear()
        if self._socket is not None:
            loop.remove_reader(self._socket.fileno())
            self._socket.close()
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
        self.stacks.close()
        self._drop_unused_arenas()
        for budget in (self.budget, *self.gpu_budgets.values()):
            budget.close()
        self.on_end(self)

    def end_for_memory(self) -> None:
        """End a session that has more than it may have."""
        if not self.ended.is_set():
            self.rejections.count_limit(Limit.SESSION_MEMORY)
        self.end("it has written more into shared memory of its groups than it may have (max_session_memory)")

    def acquire_memory(self) -> Callable[[], None]:
        """Keep this session's memory for a group loop. It calls the result when it needs the memory no more."""
        self._memory_users += 1
        loop = asyncio.get_running_loop()
        return lambda: call_soon_threadsafe(loop, self._release_memory)

    def _release_memory(self) -> None:
        self._memory_users -= 1
        self._drop_unused_arenas()

    def _drop_unused_arenas(self) -> None:
        """Free the memory of an ended session once no group loop needs it.

        Collectives that a client had fully submitted complete after its end.
        """
        if self.ended.is_set() and not self._memory_users:
            self.arenas.drop_all()

    @contextlib.contextmanager
    def acquire_join_slot(self) -> Iterator[None]:
        """As long as it is joining a group.

        Raises:
            ResourceExhaustedError: it is in as many as it may be.
        """
        held = sum(not holding.group_loop.local_ranks[holding.rank].closed for holding in self.held_ranks)
        if self.max_ranks and held + self.pending_joins >= self.max_ranks:
            self.rejections.count_limit(Limit.SESSION_RANKS)
            what = f"this session holds {held} ranks and is joining {self.pending_joins} groups"
            raise ResourceExhaustedError(
                format_limit_error(what, self.max_ranks, "max_session_ranks", "leave some groups")
            )
        if self.budget.is_used_up_by_groups():
            self.rejections.count_limit(Limit.SESSION_MEMORY)
            what = f"this session has {self.budget.kept_bytes} bytes of its groups, also of those that are over"
            raise ResourceExhaustedError(
                format_limit_error(what, self.budget.limit, "max_session_memory", "let go of them, or copy them")
            )
        most = self.descriptor_limit // _RETAINED_DIVISOR
        kept = self.budget.retained_count + self.budget.user.orphaned_count
        if kept >= most:
            self.rejections.count_limit(Limit.DESCRIPTORS)
            raise ResourceExhaustedError(
                f"this session, and those of its user that have ended, keep memory of {kept} groups that are over, and "
                f"may keep that of {most}: let go of some, or raise LimitNOFILE of the worker"
            )
        self.pending_joins += 1
        try:
            yield
        finally:
            self.pending_joins -= 1

    def add_held_rank(self, held: HeldRank) -> None:
        """The session has become a rank; if it has ended meanwhile, that is reported to the others at once."""
        self.held_ranks = [known for known in self.held_ranks if not known.group_loop.local_ranks[known.rank].closed]
        self.held_ranks.append(held)
        if self.ended.is_set():
            disconnect_rank(held, self._end_reason)

    def find_rank_of_join(self, token: bytes) -> HeldRank | None:
        """The rank that came by the join of that token."""
        return next((holding for holding in self.held_ranks if holding.join == token), None)

    def find_held_rank(self, key: int, rank: int) -> HeldRank:
        """The latest place of that rank that it holds; raises NotFoundError where it does not hold the rank."""
        for holding in reversed(self.held_ranks):
            if holding.rank == rank and holding.group_loop.topology.group.key == key:
                return holding
        raise NotFoundError(f"this session is not rank {rank} of that group; join it first")

    def find_remote_rank(self, key: int, rank: int) -> RemoteRank:
        """Where that rank submits over gRPC.

        Raises:
            NotFoundError: this session does not hold that rank. FailedPreconditionError: it has a doorbell.
        """
        found = self.find_held_rank(key, rank).remote_rank
        if found is None:
            raise FailedPreconditionError(
                f"rank {rank} was joined by a session with shared memory, and submits through that; open a "
                "session without `local` to submit over gRPC"
            )
        return found

    def _on_readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(messages.MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.end("its process ended or closed its session")
            return
        try:
            match messages.parse_type(data):
                case messages.MessageType.ARENA_REQUEST:
                    self.arenas.request_arena(messages.parse_arena(data)[1])
                case messages.MessageType.DEVICE_REQUEST:
                    self.arenas.request_device_arena(*messages.parse_arena(data))
                case messages.MessageType.DEVICE_OPEN:
                    self.arenas.request_open(messages.parse_ipc_open(data))
                case messages.MessageType.ARENA_DROP:
                    self.arenas.drop(messages.parse_arena(data)[0])
                case kind:
                    raise messages.MalformedMessage(f"a session socket does not carry {kind.name}")
        except messages.MalformedMessage as error:
            self.rejections.count_malformed(MessageSource.SESSION, self.uid)
            self.end(f"it sent something malformed: {error}")

    def _send(self, message: bytes, descriptor: int = -1) -> None:
        assert self._socket is not None
        try:
            if descriptor >= 0:
                socket.send_fds(self._socket, [message], [descriptor])
            else:
                self._socket.send(message)
        except OSError as error:  # it asks for more than it reads, or has gone
            self.end(f"its session socket takes nothing more: {error}")


def _ended_error(why: str) -> UnavailableError:
    return UnavailableError(f"this session has ended: {why}; connect again")


def _can_lend_memory(caller: Caller) -> bool:
    """Whether handles of its memory are opened: where it is of this process's user and PID namespace.

    A handle opens what the opener may open: for others a worker would read memory that they could not read themselves.
    """
    return caller.unix_peer is not None and caller.unix_peer.uid == os.geteuid() and caller.unix_peer.pid > 0


def disconnect_rank(holding: HeldRank, why: str) -> None:
    """Let a rank go whose session has ended, or which gives its place up."""
    if holding.remote_rank is not None:
        holding.remote_rank.remote.end(why)
        return
    holding.group_loop.disconnect(holding.rank, why)
    # And for good, if its doorbell has not arrived with its last words by then.
    asyncio.get_running_loop().call_later(2 * DOORBELL_GRACE_SECONDS, holding.group_loop.disconnect, holding.rank, why)


def call_soon_threadsafe(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    """Have the loop call it, unless the loop has ended."""
    with contextlib.suppress(RuntimeError):  # the loop has closed, and the worker with it
        loop.call_soon_threadsafe(what)


def _open_pidfd(connected: socket.socket) -> int:
    """A descriptor of the process at the other end; -1 where the kernel gives none."""
    try:
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        with contextlib.suppress(OSError):
            return os.pidfd_open(get_unix_peer(connected).pid)
    return -1


class Sessions:
    """All sessions of the worker, by their secret names."""

    def __init__(
        self,
        budget: MemoryBudget,
        refusals: RejectionCounters | None = None,
        most: Quotas | None = None,
        offer: DeviceOffer | None = None,
    ) -> None:
        self._budget = budget
        self._rejections = refusals or RejectionCounters()
        self._quotas = most or Quotas()
        self._device_offer = offer or DeviceOffer(0)
        self._sessions: dict[bytes, Session] = {}
        self._users: WeakValueDictionary[tuple[int, int], MemoryUser] = WeakValueDictionary()  # by uid and GPU, or -1
        self._end_reasons: OrderedDict[bytes, str] = OrderedDict()  # the latest, and why
        self._heap_trimmer = HeapTrimmer()
        self.opened_count = 0  # in all

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._sessions

    @property
    def versions(self) -> list[VersionRange]:
        """The versions that clients speak, each once. Of clients that invent many, not all."""
        return sorted({session.client.versions for session in self._sessions.values()})[:MAX_VERSIONS]

    @property
    def gpus(self) -> list[str]:
        """UUIDs of the GPUs that this worker offers, in order of their indices."""
        return [gpu.device.uuid for gpu in self._device_offer.gpus]

    @property
    def arena_bytes(self) -> int:
        return sum(session.arena_bytes for session in self._sessions.values())

    def open(self, client: Client, caller: Caller, devices: tuple[DeviceName, ...], *, remote: bool) -> Session:
        """A new session on some devices; `remote` where its client shares no memory with this worker.

        Raises:
            ResourceExhaustedError: there are as many as there may be.
        """
        most, refusals = self._quotas, self._rejections
        if most.sessions and len(self._sessions) >= most.sessions:
            refusals.count_limit(Limit.SESSIONS)
            what = f"this worker has {len(self._sessions)} sessions"
            raise ResourceExhaustedError(format_limit_error(what, most.sessions, "max_sessions", "close some"))
        share = SessionBudget(
            self._budget,
            most.memory or self._budget.limit,
            lambda: refusals.count_limit(Limit.SESSION_MEMORY),
            user=self._find_user(caller),
        )
        session = Session(
            client,
            share,
            self._on_session_end,
            remote,
            caller,
            devices,
            refusals,
            most.ranks,
            descriptor_limit=most.descriptors,
            max_open_allocations=most.open_allocations
            if self._device_offer.gpus and not remote and _can_lend_memory(caller)
            else 0,
            gpu_budgets=self._device_offer.create_session_budgets(
                most.gpu_memory,
                lambda: refusals.count_limit(Limit.SESSION_GPU_MEMORY),
                lambda gpu: self._find_user(caller, gpu.index),
            ),
        )
        loop = asyncio.get_running_loop()
        share.expel = lambda: call_soon_threadsafe(loop, session.end_for_memory)
        self.opened_count += 1
        self._sessions[session.session_id] = session
        return session

    def _find_user(self, caller: Caller, gpu: int = -1) -> MemoryUser:
        """The user whose processes share memory with this worker, of the host or of a GPU; of others, which share none,
        each is one.
        """
        if caller.unix_peer is None:
            return MemoryUser()
        return self._users.setdefault((caller.unix_peer.uid, gpu), MemoryUser())

    def find(self, identity: bytes) -> Session:
        """The session of that name.

        Raises:
            UnavailableError: it has ended, or was opened by a worker before this one.
        """
        session = self._sessions.get(identity)
        if session is not None and not session.ended.is_set():
            return session
        if session is not None:
            raise session.ended_error
        if identity in self._end_reasons:
            raise _ended_error(self._end_reasons[identity])
        raise UnavailableError(
            "this worker does not know the session: it was restarted after the session was opened; connect again"
        )

    def _on_session_end(self, session: Session) -> None:
        if self._sessions.pop(session.session_id, None) is not None:
            self._end_reasons[session.session_id] = session.end_reason
            if len(self._end_reasons) > _MAX_ENDED_SESSIONS:
                self._end_reasons.popitem(last=False)
            self._heap_trimmer.schedule()

    def close_all(self, why: str) -> None:
        for session in list(self._sessions.values()):
            session.end(why)
