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

from collectived_proto.devices import DeviceName
from collectived_proto.errors import (
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from collectived_proto.local import wire
from collectived_proto.protocol import FIRST, Versions
from collectived_runtime.credentials import Right
from collectived_runtime.device.gpus import Gpu
from collectived_runtime.engine.bells import LAST_WORDS_SECONDS
from collectived_runtime.engine.lane import Lane
from collectived_runtime.engine.results import Budget, Share
from collectived_runtime.guests.callers import Caller
from collectived_runtime.guests.peers import peer_of
from collectived_runtime.limits.descriptors import WANTED
from collectived_runtime.limits.most import Most
from collectived_runtime.limits.refusals import Limit, Refusals, Where, too_many
from collectived_runtime.worker.arenas import Arenas
from collectived_runtime.worker.devices import Offer
from collectived_runtime.worker.grpc_alone.submit import RemoteRank

log = logging.getLogger("collectived.worker")

SESSION_BYTES = 16
_SO_PEERPIDFD = 77  # Linux 6.5; not named by Python's socket module
_MOST_REMEMBERED = 1024  # sessions that have ended, and why
MOST_VERSIONS = 16  # of clients that are told


@dataclass(frozen=True, slots=True)
class Client:
    """Who opened a session, in its own words; the kernel's word on pid and uid is taken where there is a socket."""

    host: str
    pid: int
    label: str
    job: str
    versions: Versions = FIRST


@dataclass(slots=True)
class Holding:
    """A rank that a session holds; `remote_rank` is where it submits over gRPC, None where it has a doorbell."""

    lane: Lane
    rank: int
    remote_rank: RemoteRank | None = None


@dataclass(slots=True)
class Session:
    client: Client
    budget: Budget
    over: Callable[[Session], None]  # called when it has ended
    remote: bool = False  # its client shares no memory with this worker
    caller: Caller = field(default_factory=lambda: Caller(Right.NOTHING))  # who opened it
    devices: tuple[DeviceName, ...] = ()  # that it may join on
    refusals: Refusals = field(default_factory=Refusals)
    most_ranks: int = 0  # that it may hold or be joining; 0: any number
    descriptors: int = WANTED  # that this process may have
    joining: int = 0
    gpu_budgets: Mapping[Gpu, Budget] = field(default_factory=dict)  # its share of each GPU's memory
    identity: bytes = field(default_factory=lambda: secrets.token_bytes(SESSION_BYTES))
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    holdings: list[Holding] = field(default_factory=list)
    pidfd: int = -1
    openings: int = 0  # allocations of its client's own that may be open at a time, on each GPU
    arenas: Arenas = field(init=False)
    _socket: socket.socket | None = None
    _seats: int = 0  # in lanes, which may read its memory
    _why: str = "its session ended"

    def __post_init__(self) -> None:
        self.arenas = Arenas(
            self.budget,
            self.gpu_budgets,
            self.devices,
            self.refusals,
            self.descriptors,
            self.openings,
            self._send,
            self.ended.is_set,
        )

    @property
    def arena_bytes(self) -> int:
        return self.arenas.host_bytes

    @property
    def uid(self) -> int | None:
        """Of its user, who alone may show its tokens; None: not known."""
        return self.caller.local.uid if self.caller.local else None

    @property
    def attached(self) -> bool:
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
        self.pidfd = _pidfd(connected)
        loop.add_reader(connected.fileno(), self._read)
        self._send(wire.bare(wire.Kind.PONG))  # from here on the socket's end is the session's end
        if self.pidfd >= 0:
            loop.add_reader(self.pidfd, self.end, "its process ended")

    @property
    def gone(self) -> UnavailableError:
        """What a call is told that comes when the session has ended."""
        return _gone(self._why)

    @property
    def why(self) -> str:
        """Why it has ended."""
        return self._why

    def end(self, why: str) -> None:
        """Ends the session once; its ranks are lost to their groups."""
        if self.ended.is_set():
            return
        self._why = why
        self.ended.set()
        loop = asyncio.get_running_loop()
        for holding in self.holdings:
            _let_go(holding, why)
        if self._socket is not None:
            loop.remove_reader(self._socket.fileno())
            self._socket.close()
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
        self._drop_unused()
        self.over(self)

    def seated(self) -> Callable[[], None]:
        """A lane is about to look into this session's memory; what it calls when it will do so no more."""
        self._seats += 1
        loop = asyncio.get_running_loop()
        return lambda: _soon(loop, self._unseated)

    def _unseated(self) -> None:
        self._seats -= 1
        self._drop_unused()

    def _drop_unused(self) -> None:
        """What a client had fully submitted completes after its end: its memory stays until no lane looks into it."""
        if self.ended.is_set() and not self._seats:
            self.arenas.drop_all()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """As long as it is joining a group.

        Raises:
            ResourceExhaustedError: it is in as many as it may be.
        """
        held = sum(not holding.lane.seats[holding.rank].gone for holding in self.holdings)
        if self.most_ranks and held + self.joining >= self.most_ranks:
            self.refusals.limit(Limit.SESSION_RANKS)
            what = f"this session holds {held} ranks and is joining {self.joining} groups"
            raise ResourceExhaustedError(too_many(what, self.most_ranks, "max_session_ranks", "leave some groups"))
        self.joining += 1
        try:
            yield
        finally:
            self.joining -= 1

    def hold(self, lane: Lane, rank: int, remote_rank: RemoteRank | None = None) -> None:
        """The session has become a rank; if it has ended meanwhile, the others hear of it at once."""
        self.holdings = [known for known in self.holdings if not known.lane.seats[known.rank].gone]
        self.holdings.append(Holding(lane, rank, remote_rank))
        if self.ended.is_set():
            _let_go(self.holdings[-1], self._why)

    def holding(self, key: int, rank: int) -> Holding:
        """What it holds of that rank of a group, the latest; raises NotFoundError where it does not hold it."""
        for holding in reversed(self.holdings):
            if holding.rank == rank and holding.lane.topology.group.key == key:
                return holding
        raise NotFoundError(f"this session is not rank {rank} of a group with key {key}; join it first")

    def remote_rank(self, key: int, rank: int) -> RemoteRank:
        """Where that rank submits over gRPC.

        Raises:
            NotFoundError: this session does not hold that rank. FailedPreconditionError: it has a doorbell.
        """
        found = self.holding(key, rank).remote_rank
        if found is None:
            raise FailedPreconditionError(
                f"rank {rank} was joined by a session with shared memory, and submits through its doorbell; open a "
                "session without `local` to submit over gRPC"
            )
        return found

    def _read(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(wire.MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.end("its process ended or closed its session")
            return
        try:
            match wire.kind_of(data):
                case wire.Kind.ARENA_ASK:
                    self.arenas.ask(wire.parse_arena(data)[1])
                case wire.Kind.DEVICE_ASK:
                    self.arenas.ask_on(*wire.parse_arena(data))
                case wire.Kind.DEVICE_OPEN:
                    self.arenas.lend(wire.parse_lent(data))
                case wire.Kind.ARENA_DROP:
                    self.arenas.drop(wire.parse_arena(data)[0])
                case kind:
                    raise wire.Malformed(f"a session socket does not carry {kind.name}")
        except wire.Malformed as error:
            self.refusals.bad(Where.SESSION)
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


def _gone(why: str) -> UnavailableError:
    return UnavailableError(f"this session has ended: {why}; connect again")


def _may_lend(caller: Caller) -> bool:
    """Whether handles of its memory are opened: where it is of this process's user and PID namespace.

    A handle opens what the opener may open: for others a worker would read memory that they could not read themselves.
    """
    return caller.local is not None and caller.local.uid == os.geteuid() and caller.local.pid > 0


def _let_go(holding: Holding, why: str) -> None:
    if holding.remote_rank is not None:
        holding.remote_rank.remote.end(why)
        return
    holding.lane.hang_up(holding.rank, why)
    # And for good, if its doorbell has not arrived with its last words by then.
    asyncio.get_running_loop().call_later(2 * LAST_WORDS_SECONDS, holding.lane.hang_up, holding.rank, why)


def _soon(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed, and the worker with it
        loop.call_soon_threadsafe(what)


def _pidfd(connected: socket.socket) -> int:
    """A descriptor of the process at the other end; -1 where the kernel gives none."""
    try:
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        with contextlib.suppress(OSError):
            return os.pidfd_open(peer_of(connected).pid)
    return -1


class Sessions:
    """All sessions of the worker, by their secret names."""

    def __init__(
        self,
        budget: Budget,
        refusals: Refusals | None = None,
        most: Most | None = None,
        offer: Offer | None = None,
    ) -> None:
        self._budget = budget
        self._refusals = refusals or Refusals()
        self._most = most or Most()
        self._offer = offer or Offer(0)
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, str] = OrderedDict()  # the latest, and why
        self.opened = 0  # in all

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._sessions

    @property
    def versions(self) -> list[Versions]:
        """What the clients speak, each once; of clients that make them up, not all."""
        return sorted({session.client.versions for session in self._sessions.values()})[:MOST_VERSIONS]

    @property
    def gpus(self) -> list[str]:
        """UUIDs of the GPUs that this worker offers, in order of their indices."""
        return [gpu.device.uuid for gpu in self._offer.gpus]

    @property
    def arena_bytes(self) -> int:
        return sum(session.arena_bytes for session in self._sessions.values())

    def open(self, client: Client, caller: Caller, devices: tuple[DeviceName, ...], *, remote: bool) -> Session:
        """A new session on some devices; `remote` where its client shares no memory with this worker.

        Raises:
            ResourceExhaustedError: there are as many as there may be.
        """
        most, refusals = self._most, self._refusals
        if most.sessions and len(self._sessions) >= most.sessions:
            refusals.limit(Limit.SESSIONS)
            what = f"this worker has {len(self._sessions)} sessions"
            raise ResourceExhaustedError(too_many(what, most.sessions, "max_sessions", "close some"))
        share = Share(self._budget, most.memory or self._budget.limit, lambda: refusals.limit(Limit.SESSION_MEMORY))
        session = Session(
            client,
            share,
            self._over,
            remote,
            caller,
            devices,
            refusals,
            most.ranks,
            descriptors=most.descriptors,
            openings=most.openings if self._offer.gpus and not remote and _may_lend(caller) else 0,
            gpu_budgets=self._offer.shares(most.gpu_memory, lambda: refusals.limit(Limit.SESSION_GPU_MEMORY)),
        )
        self.opened += 1
        self._sessions[session.identity] = session
        return session

    def find(self, identity: bytes) -> Session:
        """The session of that name.

        Raises:
            UnavailableError: it has ended, or was opened by a worker before this one.
        """
        session = self._sessions.get(identity)
        if session is not None and not session.ended.is_set():
            return session
        if session is not None:
            raise session.gone
        if identity in self._ended:
            raise _gone(self._ended[identity])
        raise UnavailableError(
            "this worker does not know the session: it was restarted after the session was opened; connect again"
        )

    def _over(self, session: Session) -> None:
        if self._sessions.pop(session.identity, None) is not None:
            self._ended[session.identity] = session.why
            if len(self._ended) > _MOST_REMEMBERED:
                self._ended.popitem(last=False)

    def close_all(self, why: str) -> None:
        for session in list(self._sessions.values()):
            session.end(why)
