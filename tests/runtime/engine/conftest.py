"""Group loops with real sockets but without daemons: doorbells are socket pairs, links are TCP pairs made on demand."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.waiting import is_readable

from collectived_proto.codec import verdict_from_proto
from collectived_proto.devices import DeviceName
from collectived_proto.ipc import messages
from collectived_proto.ipc.parts import ResultPart, parse_result_part
from collectived_proto.ipc.rank_messages import (
    Delivery,
    LinkOffer,
    encode_matching,
    parse_delivery,
    parse_link_offer,
)
from collectived_proto.ipc.result_header import ResultHeader, parse_header
from collectived_proto.numpy_types import from_numpy
from collectived_proto.types import (
    AllReduce,
    Collective,
    GroupInfo,
    Leaf,
    Member,
    Operation,
    Peer,
    Recv,
    ReduceOp,
    Report,
    ReportKind,
    Tier,
    Verdict,
)
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.compile.negotiation import prepare
from collectived_runtime.engine.failure.reporter import CoordinatorAccess
from collectived_runtime.engine.gpu.communicator import NcclContext
from collectived_runtime.engine.loop.context import WorkerContext, WorkerResources
from collectived_runtime.engine.loop.group_loop import GroupLoop
from collectived_runtime.engine.run.fold_pool import FoldPool
from collectived_runtime.transport.connections import ConnectionServer, LinkKey
from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.link import Link, TcpStream

SLOT = 1 << 20  # bytes of client memory per rank
TABLE = (Tier("tree", limit=32 << 10), Tier("ring"))


class Switchboard:
    """Connects group loops of one process: a dial of one worker meets the expectation of the other."""

    def __init__(self) -> None:
        self.expected: dict[tuple[int, LinkKey], Callable[[Link], None]] = {}
        self.dialled: dict[tuple[int, LinkKey], socket.socket] = {}  # by the worker that was dialled
        self.connections: list[socket.socket] = []
        self.lock = threading.Lock()  # group loops dial and expect from their threads


class Exchange:
    """The switchboard as one worker uses it."""

    def __init__(self, task: int, board: Switchboard) -> None:
        self._task = task
        self._board = board

    def dial(self, call: DialRequest) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            mine = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        hello, board = call.hello, self._board
        key = (hello.acceptor, (hello.key, hello.generation, hello.dialler, hello.channel))
        with board.lock:
            board.connections += [mine, theirs]
            arrived = board.expected.pop(key, None)
            if arrived is None:
                board.dialled[key] = theirs
        if arrived is not None:
            arrived(Link(hello.dialler, hello.channel, TcpStream(theirs)))
        call.on_link(Link(hello.acceptor, hello.channel, TcpStream(mine)))

    def expect_links(self, keys: Sequence[LinkKey], arrived: Callable[[Link], None]) -> None:
        for key in keys:
            with self._board.lock:
                early = self._board.dialled.pop((self._task, key), None)
                if early is None:
                    self._board.expected[self._task, key] = arrived
            if early is not None:
                arrived(Link(key[2], key[3], TcpStream(early)))

    def discard_generation(self, key: int, generation: int) -> None:
        pass

    def release_link(self, link: Link, farewell: bytes) -> None:
        link.close()


class Rank:
    """The client's end of one rank."""

    def __init__(
        self, world: World, rank: int, doorbell: socket.socket, local_rank: LocalRank, memory: NDArray[np.uint8]
    ) -> None:
        self.world = world
        self.rank = rank
        self.doorbell = doorbell
        self.local_rank = local_rank
        self.memory = memory
        self.next = 0
        self.posted = messages.P2P_BASE
        self.waiting = 0  # who wait to join, as told
        self.launched: list[messages.Launched] = []
        self.in_use = False  # its memory, as the last failure said
        self.freed: list[tuple[int, int]] = []
        self.parts: list[ResultPart] = []
        self.links: list[tuple[LinkOffer, socket.socket]] = []  # offered, and not asked for

    def submit(
        self,
        values: NDArray[Any] | None = None,
        *,
        operation: Operation | None = None,
        remaining: float = 0.0,
        instance: int | None = None,
        generation: int | None = None,
        shape: tuple[int, ...] | None = None,
        keeps_own: bool = False,
        omitted: bool = False,
        takes_parts: bool = False,
        watched: bool = False,
        **fields: Any,
    ) -> None:
        """`omitted`: it does not say where its value lies."""
        values = np.ones(4, np.float32) if values is None else values
        taking = bool(fields.get("open"))  # what comes
        leaves = () if taking else (Leaf("", _kind(values), values.shape if shape is None else shape),)
        raw = b"" if taking else values.tobytes()
        self.memory[: len(raw)] = np.frombuffer(raw, np.uint8)
        collective = Collective(
            operation or AllReduce(ReduceOp.SUM), "" if taking else "*", leaves, site="test.py:1", **fields
        )
        prepared = prepare(collective, self.rank, self.world.group_loop_of(self.rank).topology)
        number = int.from_bytes(prepared.contract, "little") >> 1
        self.local_rank.prepared[number] = prepared
        instance = self.next if instance is None else instance
        self.next = instance + 1
        generation = self.world.group.generation if generation is None else generation
        addresses = () if taking or omitted else ((1, 0),)
        told = messages.Submit(generation, number, instance, remaining, bool(addresses), addresses)
        self.doorbell.send(told._replace(keeps_own=keeps_own, takes_parts=takes_parts, watched=watched).encode())

    def post(self, operation: Operation, values: NDArray[Any] | None = None, **options: Any) -> int:
        """Submits a send or recv; its number."""
        number, following = self.posted, self.next
        self.posted += 1
        if isinstance(operation, Recv):
            options["open"] = True
        self.submit(values, operation=operation, instance=number, **options)
        self.next = following
        return number

    def match(self, generation: int | None = None) -> None:
        """Says that it matches by itself."""
        self.doorbell.send(encode_matching(self.world.group.generation if generation is None else generation))

    def delivered(self) -> Delivery:
        """The next message that is handed over."""
        heard = self.hear()
        assert isinstance(heard, Delivery), heard
        return heard

    def offered(self) -> tuple[LinkOffer, socket.socket]:
        """The next link that it is lent; nothing else comes before it."""
        while not self.links:
            self._hear_one(10.0)
        return self.links.pop(0)

    def release(self, slot: int) -> None:
        self.doorbell.send(messages.encode_release((slot,)))

    def hear(self, timeout: float = 10.0) -> Delivery | messages.Completion | messages.Withdrawal | tuple[int, Verdict]:
        """The next completion, withdrawal, message or failure; arenas and links are taken in passing."""
        while (heard := self._hear_one(timeout)) is None:
            pass
        return heard

    def _hear_one(
        self, timeout: float
    ) -> Delivery | messages.Completion | messages.Withdrawal | tuple[int, Verdict] | None:
        assert is_readable(self.doorbell, timeout), f"rank {self.rank} heard nothing for {timeout} s"
        data, descriptors, _, _ = socket.recv_fds(self.doorbell, messages.MAX_MESSAGE, 1)
        match kind := messages.parse_type(data):
            case messages.MessageType.NO_SEGMENT:
                pass
            case messages.MessageType.ARENA:
                self.world.arenas[messages.parse_arena(data)[0]] = descriptors[0]
            case messages.MessageType.WAITING_JOINERS:
                self.waiting = messages.parse_waiting(data)
            case messages.MessageType.LAUNCHED:
                self.launched.append(messages.parse_launched(data))
            case messages.MessageType.FREED:
                self.freed.append(messages.parse_freed(data))
            case messages.MessageType.ARENA_RETIRED:
                os.close(self.world.arenas.pop(messages.parse_arena(data)[0]))
            case messages.MessageType.RESULT_PART:
                self.parts.append(parse_result_part(data))
            case messages.MessageType.RANK_LINK:
                self.links.append((parse_link_offer(data), socket.socket(fileno=descriptors[0])))
                self.world.board.connections.append(self.links[-1][1])
            case messages.MessageType.MESSAGE:
                return parse_delivery(data)
            case messages.MessageType.DONE:
                return messages.parse_done(data)
            case messages.MessageType.WITHDRAWN:
                return messages.parse_withdrawal(data)
            case _:
                assert kind is messages.MessageType.FAILED, kind
                instance, raw = messages.parse_failed(data)
                self.in_use = messages.is_in_use(data)
                return instance, verdict_from_proto(common_pb2.Verdict.FromString(raw))
        return None

    def done(self) -> messages.Completion:
        heard = self.hear()
        assert isinstance(heard, messages.Completion), heard
        return heard

    def failed(self) -> tuple[int, Verdict]:
        heard = self.hear()
        assert not isinstance(heard, Delivery | messages.Completion | messages.Withdrawal), heard
        return heard

    def cancel(self, number: int) -> None:
        """Takes a recv back, unless a message is there for it."""
        self.doorbell.send(messages.Withdrawal(self.world.group.generation, number).encode())

    def withdrawn(self) -> messages.Withdrawal:
        """What it hears of a recv that has ended alone."""
        heard = self.hear()
        assert isinstance(heard, messages.Withdrawal), heard
        return heard

    def pong(self) -> bool:
        """Whether it says that memory is in use."""
        return messages.is_in_use(self._next(messages.MessageType.PONG))

    def hear_launched(self) -> messages.Launched:
        return messages.parse_launched(self._next(messages.MessageType.LAUNCHED))

    def hear_freed(self) -> tuple[int, int]:
        return messages.parse_freed(self._next(messages.MessageType.FREED))

    def _next(self, kind: messages.MessageType) -> bytes:
        while True:
            assert is_readable(self.doorbell, 10.0), f"rank {self.rank} did not hear {kind.name}"
            data = self.doorbell.recv(messages.MAX_MESSAGE)
            if messages.parse_type(data) is not messages.MessageType.NO_SEGMENT:
                assert messages.parse_type(data) is kind
                return data

    def result(self, done: messages.Completion, dtype: Any = np.float32, count: int = 4) -> NDArray[Any]:
        group_loop = self.world.group_loop_of(self.rank)
        slot = group_loop._results._slots[done.slot]
        values: NDArray[Any] = slot.memory.view(dtype)[:count].copy()
        return values

    def outlined(
        self, done: messages.Completion | Delivery, dtype: Any = np.float32, width: int = 1
    ) -> list[NDArray[Any]]:
        """The leaves of a result that has an outline, in rows of `width` elements."""
        memory, outline = self.outline(done)
        row = np.dtype(dtype).itemsize * width
        return [
            np.frombuffer(b"".join(memory[at : at + rows * row] for at, rows in leaf), dtype).reshape(-1, width)
            for leaf in outline.leaves
        ]

    def outline(self, done: messages.Completion | Delivery) -> tuple[memoryview, ResultHeader]:
        """What lies where a completion points, and the outline there."""
        slot = self.world.group_loop_of(self.rank)._results._slots[done.slot]
        memory = slot.memory.data[done.offset - slot.offset :]
        return memory, parse_header(memory)


def device_of(rank: int, task: int, gpus: tuple[int, ...]) -> DeviceName:
    return DeviceName(task, "GPU", gpus[rank]) if gpus else DeviceName(task, "CPU", 0)


class World:
    """A group over group loops in this process. `hosts` are numbers of ranks per worker, or the ranks themselves.

    Where `gpus` says so each rank is on one; `natives` are what the workers have of NCCL. Links come from
    `connection_servers` where there are any. `connected` is what group loops are told of a coordinator, whose part is
    played by the test. Ranks that come `late` are left to `add`.
    """

    def __init__(
        self,
        hosts: tuple[int | tuple[int, ...], ...],
        stall_after: float = 60.0,
        table: tuple[Tier, ...] = (),
        idle: bool = False,
        idle_after: float = 60.0,
        gpus: tuple[int, ...] = (),
        natives: Sequence[NcclContext] = (),
        key: int = 7,
        generation: int = 100,
        connection_servers: Sequence[ConnectionServer] = (),
        lost_after: float = 60.0,
        connected: bool = True,
        late: Collection[int] = (),
    ) -> None:
        ranks = itertools.count()
        self.layout = [host if isinstance(host, tuple) else tuple(next(ranks) for _ in range(host)) for host in hosts]
        nccl = 22809 if natives else 0
        members = tuple(
            sorted(
                (
                    Member(rank, str(device_of(rank, task, gpus)), task, f"host{task}", 1000 + rank)
                    for task, local in enumerate(self.layout)
                    for rank in local
                ),
                key=lambda member: member.rank,
            )
        )
        self.group = GroupInfo("world", key, generation, members)
        ports = [connection_server.link_port for connection_server in connection_servers] or [1] * len(hosts)
        peers = tuple(
            Peer(task, "i", f"host{task}", f"127.0.0.1:{port}", local, nccl)
            for task, (local, port) in enumerate(zip(self.layout, ports, strict=True))
        )
        self.board = Switchboard()
        self.reports: queue.Queue[Report] = queue.Queue()
        self.ended: queue.Queue[GroupLoop] = queue.Queue()
        self.arenas: dict[int, int] = {}
        self.group_loops: list[GroupLoop] = []
        self.fold_pool = FoldPool(2)
        self.ranks: list[Rank] = []
        for task, local in enumerate(self.layout):
            around = WorkerContext(
                f"worker {task}",
                WorkerResources(
                    connection_servers[task] if connection_servers else Exchange(task, self.board),
                    MemoryBudget(1 << 30),
                    self.fold_pool,
                    nccl=natives[task] if natives else None,
                ),
                CoordinatorAccess(self.reports.put, lost_after, lambda: connected),
                stall_after,
                idle_after,
                self.ended.put,
            )
            group_loop = GroupLoop(GroupTopology.from_peers(self.group, peers, task, table or TABLE, idle), around)
            self.group_loops.append(group_loop)
            self.ranks += [self._rank(group_loop, members[rank]) for rank in local if rank not in late]
        self.ranks.sort(key=lambda rank: rank.rank)

    def add(self, rank: int, uid: int | None = None) -> Rank:
        """One that came late, in a process of this user."""
        self.ranks.append(self._rank(self.group_loop_of(rank), self.group.members[rank], uid))
        return self.ranks[-1]

    def _rank(self, group_loop: GroupLoop, member: Member, uid: int | None = None) -> Rank:
        theirs, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = np.zeros(SLOT, np.uint8)

        def resolve(arena: int, offset: int, length: int) -> NDArray[np.uint8]:
            if arena != 1 or offset + length > SLOT:
                raise messages.MalformedMessage(f"bytes {offset} to {offset + length} of arena {arena}")
            return memory[offset : offset + length]

        local_rank = LocalRank(member.rank, member, resolve, -1)
        local_rank.uid = uid
        group_loop.add_local_rank(local_rank)
        group_loop.attach_doorbell(member.rank, theirs)
        return Rank(self, member.rank, mine, local_rank, memory)

    def group_loop_of(self, rank: int) -> GroupLoop:
        return next(group_loop for group_loop in self.group_loops if rank in group_loop.topology.own_ranks)

    def report(self, *kinds: ReportKind) -> Report:
        """The next report of one of these kinds; others are passed over."""
        while True:
            report = self.reports.get(timeout=10)
            if report.kind in kinds:
                return report

    def rule(self, verdict: Verdict) -> None:
        for group_loop in self.group_loops:
            group_loop.apply_verdict(verdict)

    def verdict(self, code: int, from_instance: int = 0, successor: int = 0, message: str = "decided") -> Verdict:
        group = self.group
        return Verdict(
            group.name,
            group.key,
            group.generation,
            code,
            message,
            from_instance,
            successor=successor,
            members=group.members,
        )

    def close(self) -> None:
        for group_loop in self.group_loops:
            group_loop.stop()
        for group_loop in self.group_loops:
            group_loop.join()
        self.fold_pool.close()
        for rank in self.ranks:
            rank.doorbell.close()
        for connection in self.board.connections:
            connection.close()
        for descriptor in self.arenas.values():
            os.close(descriptor)


def wait_for(fact: Callable[[], object]) -> None:
    """Looks until the fact holds; the test's own time limit ends it otherwise."""
    while not fact():
        threading.Event().wait(0.001)


def _kind(values: NDArray[Any]) -> Any:
    kind = from_numpy(values.dtype)
    assert kind is not None
    return kind


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    """Makes worlds and closes them."""
    made: list[World] = []

    def make(*hosts: int | tuple[int, ...], **options: Any) -> World:
        made.append(World(hosts, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
