"""A scripted far end: plays a worker for one rank over real sockets and real shared memory.

It answers as a group would in which every other rank gives the same value as this one, or as a test scripts it.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from collectived.calls.buffers import Description
from collectived.calls.prepare import PreparedCallCache
from collectived.connection.join_request import JoinRequest
from collectived.group import Group
from collectived.session_hooks import JoinedRank
from collectived.shared.doorbell import Doorbell
from collectived.shared.memory import SessionSocket, SharedMemory
from collectived.values import nest
from collectived_proto import codec
from collectived_proto.deadline import Deadline
from collectived_proto.errors import Code
from collectived_proto.ipc import arena, messages
from collectived_proto.ipc.free_list import FreeList
from collectived_proto.ipc.result_header import OWN_ROWS, ResultHeader
from collectived_proto.numpy_types import from_numpy, to_numpy
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import (
    AllGather,
    AllToAll,
    AxisOperation,
    Collective,
    DType,
    Gather,
    GroupInfo,
    Layout,
    Leaf,
    LeafPlacement,
    Member,
    Operation,
    Pack,
    Reduce,
    ReduceOp,
    ReduceScatter,
    Reduction,
    Scatter,
    Send,
    Verdict,
)
from collectived_proto.v1 import common_pb2, worker_pb2, worker_pb2_grpc

KEY = 7
GENERATION = 100
PER_PACK = 2  # leaves

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


class FarEnd:
    """The worker's side. `answer` says what a ring is answered with; None: as a healthy group would."""

    def __init__(
        self, size: int, rank: int, doorbell: socket.socket, session: socket.socket, result_bytes: int = 1 << 20
    ) -> None:
        self.size = size
        self.rank = rank
        self.rings: list[messages.Submit] = []
        self.released: list[int] = []
        self.texts: list[tuple[messages.MessageType, str]] = []
        self.ended: set[str] = set()  # which of "doorbell" and "session" the client has closed
        self.prepared: dict[int, tuple[Collective, Layout]] = {}
        self.refusals: deque[tuple[Code, str]] = deque()
        self.asked: list[int] = []
        self.answer: Callable[[messages.Submit], list[bytes] | None] = lambda ring: None
        self.pong = True
        self.comes: Any = None  # the root's or sender's value, for calls that take what comes
        self.apart = False  # whether every rank's rows lie by themselves
        self.leaves_own = False  # whether, where they do, those of a rank that keeps its value are left to it
        self.changed = threading.Condition()
        self.doorbell = doorbell
        self.session = session
        self.inputs: dict[int, arena.Arena] = {}
        self.results = arena.create(1000, result_bytes, readers_only=True)
        self.slots = FreeList(result_bytes)
        self.slot_at: dict[int, int] = {}
        self.slot_numbers = itertools.count(5000)  # instances of two generations may have one number
        socket.send_fds(
            self.doorbell,
            [messages.encode_arena(messages.MessageType.ARENA, 1000, result_bytes)],
            [self.results.descriptor],
        )
        self.stop_reader, self.stop = socket.socketpair()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def close(self) -> None:
        self.stop.close()
        self.thread.join()
        for sock in (self.doorbell, self.session, self.stop_reader):
            sock.close()
        for mapped in (*self.inputs.values(), self.results):
            mapped.close()

    # What the client is told

    def describe(self, collective: Collective, deadline: Deadline | None) -> Description:
        """Packs of at most PER_PACK leaves of one type, last leaves first."""
        packs: list[Pack] = []
        places: dict[int, LeafPlacement] = {}
        staging = result = 0
        mean = isinstance(collective.operation, Reduction) and collective.operation.reduce_op is ReduceOp.MEAN
        outlined = isinstance(collective.operation, AxisOperation)
        per_pack = 1 if outlined else PER_PACK
        for index in reversed(range(len(collective.leaves))):
            leaf = collective.leaves[index]
            got = DType.FLOAT64 if mean and leaf.dtype.is_integer else leaf.dtype
            members = [place for place in places.values() if place.pack == len(packs) - 1]
            if packs and packs[-1].dtype is leaf.dtype and len(members) < per_pack:
                last = packs[-1]
                places[index] = LeafPlacement(len(packs) - 1, last.count)
                packs[-1] = Pack(last.dtype, got, last.count + leaf.count, last.staging_offset, last.result_offset)
            else:
                places[index] = LeafPlacement(len(packs), 0)
                packs.append(Pack(leaf.dtype, got, leaf.count, staging, result))
            staging = packs[-1].staging_offset + -(-packs[-1].count * leaf.dtype.itemsize // 64) * 64
            result = packs[-1].result_offset + -(-packs[-1].count * got.itemsize // 64) * 64
        ordered = tuple(places[index] for index in range(len(collective.leaves)))
        layout = Layout(tuple(packs), ordered, staging, 0 if outlined else result)
        self.prepared[len(self.prepared) + 1] = collective, layout
        return Description(len(self.prepared), layout, b"", b"")

    def verdict(self, code: Code, message: str, instance: int, **more: Any) -> Verdict:
        return Verdict("train", KEY, GENERATION, code, message, instance, instance, "all_reduce(sum)", **more)

    def failed(self, instance: int, verdict: Verdict) -> bytes:
        return messages.encode_failed(instance, codec.verdict_to_proto(verdict).SerializeToString())

    # What the worker does

    def serve(self) -> None:
        poll = select.poll()
        for sock in (self.doorbell, self.session, self.stop_reader):
            poll.register(sock, select.POLLIN)
        names = {id(self.doorbell): "doorbell", id(self.session): "session"}
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self.stop_reader.fileno() in ready:
                return
            for sock, act in ((self.doorbell, self.on_doorbell), (self.session, self.on_session)):
                if sock.fileno() in ready:
                    message = sock.recv(messages.MAX_MESSAGE)
                    if message:
                        act(message)
                    else:
                        poll.unregister(sock)
                        self.ended.add(names[id(sock)])
                    with self.changed:
                        self.changed.notify_all()

    def until(self, fact: Callable[[], bool]) -> None:
        """Waits until `fact` holds, looking again after every message."""
        with self.changed:
            assert self.changed.wait_for(fact, 10)

    def on_session(self, message: bytes) -> None:
        kind = messages.parse_type(message)
        number, size = messages.parse_arena(message)
        if kind is messages.MessageType.ARENA_DROP:
            self.inputs.pop(number).close()
            return
        self.asked.append(size)
        if self.refusals:
            self.session.send(messages.encode_refused(*self.refusals.popleft()))
            return
        made = arena.create(len(self.asked), size, readers_only=False)
        self.inputs[made.number] = made
        socket.send_fds(
            self.session, [messages.encode_arena(messages.MessageType.ARENA, made.number, size)], [made.descriptor]
        )

    def on_doorbell(self, message: bytes) -> None:
        kind = messages.parse_type(message)
        if kind is messages.MessageType.SUBMIT:
            ring = messages.parse_submit(message)
            self.release(ring.released_slots)
            self.rings.append(ring)
            scripted = self.answer(ring)
            for answer in self.complete(ring) if scripted is None else scripted:
                self.doorbell.send(answer)
        elif kind is messages.MessageType.RELEASE:
            self.release(messages.parse_release(message))
        elif kind is messages.MessageType.PING:
            if self.pong:
                self.doorbell.send(messages.encode_bare(messages.MessageType.PONG))
        else:
            self.texts.append((kind, messages.parse_text(message)))

    def release(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self.slots.free(self.slot_at.pop(slot))
            self.released.append(slot)

    def given(self, ring: messages.Submit, index: int) -> Array:
        """A leaf of this rank, as it travels."""
        collective, layout = self.prepared[ring.prepared]
        leaf, place = collective.leaves[index], layout.places[index]
        pack = layout.packs[place.pack]
        if not ring.addresses:  # it has only said what is to come
            comes = np.zeros(leaf.shape) if self.comes is None else np.asarray(nest.flatten(self.comes)[1][index])
            return comes.astype(to_numpy(leaf.dtype))
        number, offset = ring.addresses[0 if ring.staged else index]
        if ring.staged:
            offset += pack.staging_offset + place.offset * pack.dtype.itemsize
        return np.ndarray(leaf.shape, to_numpy(leaf.dtype), self.inputs[number].view(), offset)

    def take_slot(self, ring: messages.Submit, nbytes: int) -> tuple[int, int]:
        start = self.slots.allocate(nbytes)
        assert start is not None, "the result arena is full"
        slot = next(self.slot_numbers)
        self.slot_at[slot] = start
        return start, slot

    def complete(self, ring: messages.Submit) -> list[bytes]:
        """Carries a ring out; one completion per pack."""
        collective, layout = self.prepared[ring.prepared]
        operation = collective.operation
        receives = bool(layout.packs) or collective.open
        if isinstance(operation, Send) or (isinstance(operation, (Reduce, Gather)) and operation.root != self.rank):
            receives = False
        is_kept = ring.keeps_own and not isinstance(operation, AxisOperation)
        if not receives or is_kept:
            packs = max(1, len(layout.packs)) if is_kept else 1
            return [messages.Completion(ring.instance, at, at == packs - 1, False).encode() for at in range(packs)]
        if collective.open or isinstance(operation, AxisOperation):
            return self.complete_outlined(ring)
        start, slot = self.take_slot(ring, layout.result_bytes)
        for index, (leaf, place) in enumerate(zip(collective.leaves, layout.places, strict=True)):
            pack = layout.packs[place.pack]
            at = start + pack.result_offset + place.offset * pack.result_dtype.itemsize
            got: Array = np.ndarray(leaf.shape, to_numpy(pack.result_dtype), self.results.view(), at)
            summed = isinstance(operation, Reduction) and operation.reduce_op is ReduceOp.SUM
            np.multiply(self.given(ring, index), self.size if summed else 1, out=got, casting="unsafe")
        return self.dones(ring, len(layout.packs), start, slot)

    def dones(self, ring: messages.Submit, packs: int, start: int, slot: int) -> list[bytes]:
        return [
            messages.Completion(ring.instance, number, number == packs - 1, True, 1000, start, slot).encode()
            for number in range(packs)
        ]

    def complete_outlined(self, ring: messages.Submit) -> list[bytes]:
        collective, layout = self.prepared[ring.prepared]
        description = b""
        if collective.open:
            description, parts = self.announced(collective.operation)
        else:
            parts = [
                self.parts(collective.operation, self.given(ring, index), layout.packs[place.pack].result_dtype)
                for index, place in enumerate(layout.places)
            ]
        pieces = [part if self.apart else [np.concatenate(part)] for part in parts]
        at = -(-ResultHeader(0, tuple(((0, 0),) * len(leaf) for leaf in pieces), description).nbytes // 64) * 64
        places, written = [], []
        for leaf in pieces:
            places.append([(at + sum(part.nbytes + 64 for part in leaf[:i]), len(part)) for i, part in enumerate(leaf)])
            written += [(place[0], part) for place, part in zip(places[-1], leaf, strict=True)]
            at += sum(part.nbytes + 64 for part in leaf)
        if self.leaves_own and ring.keeps_own:
            first = self.rank * len(pieces[0][0]) if isinstance(collective.operation, (Scatter, AllToAll)) else 0
            own = 0 if isinstance(collective.operation, Scatter) else self.rank
            for place in places:
                place[own] = OWN_ROWS + first, place[own][1]
            written = [one for number, one in enumerate(written) if number % len(pieces[0]) != own]
        outline = ResultHeader(at, tuple(map(tuple, places)), description).encode()
        start, slot = self.take_slot(ring, at)
        memory = self.results.view()
        for offset, data in ((0, outline), *((offset, part.tobytes()) for offset, part in written)):
            memory[start + offset : start + offset + len(data)] = data
        return self.dones(ring, 2 if collective.open else len(layout.packs), start, slot)

    def parts(self, operation: Operation, given: Array, dtype: DType) -> list[Array]:
        """This rank's result by sender, if every rank gives the same, rows first."""
        if isinstance(operation, (AllGather, Gather)):
            return [given] * self.size
        assert isinstance(operation, (Scatter, ReduceScatter, AllToAll))
        cuts = np.cumsum(operation.sizes)[:-1] if operation.sizes else self.size
        mine = np.array_split(given, cuts)[self.rank]
        if isinstance(operation, ReduceScatter):
            summed = operation.reduce_op is ReduceOp.SUM
            return [np.multiply(mine, self.size if summed else 1).astype(to_numpy(dtype))]
        return [mine] * (self.size if isinstance(operation, AllToAll) else 1)

    def announced(self, operation: Operation) -> tuple[bytes, list[list[Array]]]:
        """The description of what comes, and its leaves as pieces."""
        spec, values = nest.flatten(self.comes)
        arrays = [np.asarray(value) for value in values]
        if isinstance(operation, Scatter):
            arrays = [np.moveaxis(array, operation.axis, 0) for array in arrays]
        kinds = [from_numpy(array.dtype) for array in arrays]
        leaves = [
            Leaf(path, kind, array.shape)
            for path, kind, array in zip(nest.paths(spec), kinds, arrays, strict=True)
            if kind is not None
        ]
        described = Collective(operation, nest.structure(spec), tuple(leaves))
        if isinstance(operation, Scatter):
            arrays = [np.array_split(array, self.size)[self.rank] for array in arrays]
        data = codec.collective_to_proto(described).SerializeToString()
        return data, [[np.ascontiguousarray(np.atleast_1d(array))] for array in arrays]


class Setting:
    """A group of this process whose worker is a far end."""

    def __init__(
        self, size: int, rank: int, options: CommunicationOptions, timeout: float | None, result_bytes: int
    ) -> None:
        client_doorbell, doorbell = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client_session, session = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client_sockets = (client_doorbell, client_session)
        self.far = FarEnd(size, rank, doorbell, session, result_bytes)
        members = tuple(
            Member(r, f"/job:worker/replica:0/task:{r // 2}/device:CPU:{r % 2}", r // 2, "here", 10 + r)
            for r in range(size)
        )
        info = GroupInfo("train", KEY, GENERATION, members)
        client_doorbell.setblocking(False)
        self.memory = SharedMemory(SessionSocket(client_session, "/job:worker/task:0"))
        self.doorbell = Doorbell(client_doorbell, info, rank, "/job:worker/task:0")
        local_rank = JoinedRank(info, rank, self.doorbell, PreparedCallCache(self.far.describe, self.memory, rank))
        self.group = Group(
            Nowhere(), JoinRequest("train", (size, size), rank, "", 0.0, None), local_rank, options, timeout
        )


class Nowhere:
    """A group's home that has no other groups."""

    def _unregister_group(self, group: Group) -> None:
        pass

    def _register_group(self, group: Group) -> None:
        pass

    def _join_group(self, wish: JoinRequest, enter: Callable[[JoinedRank], Group]) -> Group:
        raise AssertionError("nobody joins here")


Make = Callable[..., Setting]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a group of this process with a far end; `make(size=2, rank=0, options=…, timeout=…)`."""
    made: list[Setting] = []

    def build(
        size: int = 2,
        rank: int = 0,
        options: CommunicationOptions | None = None,
        timeout: float | None = None,
        result_bytes: int = 1 << 20,
    ) -> Setting:
        made.append(Setting(size, rank, options or CommunicationOptions(), timeout, result_bytes))
        return made[-1]

    yield build
    for setting in made:
        setting.far.close()
        for sock in setting.client_sockets:
            sock.close()


class FarWorker(worker_pb2_grpc.WorkerServicer):
    """A worker of one rank, over real gRPC and a real door. The other ranks of a group exist only on paper."""

    def __init__(self, folder: Path) -> None:
        self.path = f"{folder}/w"
        self.address = f"unix:{self.path}"
        self.far: FarEnd | None = None
        self.joins: list[worker_pb2.JoinRequest] = []
        self.progress: list[str] = []
        self.seated = threading.Event()
        self.mute = False  # whether collectives are never answered
        self.preparing, self.withdrawn = threading.Semaphore(0), threading.Semaphore(0)  # while mute
        self.refuses = False  # whether no more collectives are taken
        self.opened: list[worker_pb2.OpenSessionRequest] = []
        self.never = False  # whether joins stay incomplete
        self.late = 0.0  # seconds after which it answers who opens a session
        self.attaches = True  # whether it says that a session socket has come
        self.greeting = messages.encode_bare(messages.MessageType.PONG)  # what it says then
        self.speaks: common_pb2.Protocol | None = None  # what it says of its versions
        self.streams_ended = threading.Semaphore(0)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"{folder}/d")
        self.listener.listen()
        self.server = grpc.server(ThreadPoolExecutor(8))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server)
        self.server.add_insecure_port(self.address)
        self.server.start()
        self.accepting = threading.Thread(target=self.accept)
        self.accepting.start()

    def close(self) -> None:
        self.server.stop(None).wait()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.accepting.join()
        self.listener.close()
        if self.far is not None:
            self.far.close()

    def accept(self) -> None:
        found: list[socket.socket] = []
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                break
            if messages.parse_hello(sock.recv(100))[0] == b"s" * 16:
                found.append(sock)
                if self.attaches:
                    sock.send(self.greeting)
            else:
                self.far = FarEnd(self.joins[-1].max_size, self.joins[-1].rank, sock, found.pop())
                self.seated.set()
        for sock in found:
            sock.close()

    def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.SessionEvent]:
        self.opened.append(request)
        ended = threading.Event()
        context.add_callback(ended.set)
        if not context.add_callback(self.streams_ended.release):  # it has ended already
            self.streams_ended.release()
        ended.wait(self.late)
        opened = worker_pb2.SessionOpened(
            session=b"secret",
            worker="/job:worker/task:3",
            devices=[f"/job:worker/replica:0/task:3/device:{name}" for name in ("CPU:0", "CPU:1", "GPU:0")],
            door=f"{self.path[:-1]}d",
            token=b"s" * 16,
            protocol=self.speaks,
        )
        yield worker_pb2.SessionEvent(opened=opened)
        ended.wait()

    def Join(self, request: worker_pb2.JoinRequest, context: grpc.ServicerContext) -> Iterator[worker_pb2.JoinEvent]:
        self.joins.append(request)
        self.seated.clear()
        for text in self.progress:
            yield worker_pb2.JoinEvent(progress=worker_pb2.JoinProgress(text=text))
        if self.never:
            ended = threading.Event()
            context.add_callback(ended.set)
            ended.wait()
        members = tuple(
            Member(r, f"/job:worker/replica:0/task:3/device:CPU:{r}", 3, "here", 10 + r)
            for r in range(request.max_size)
        )
        group = codec.group_to_proto(GroupInfo(request.name, KEY, GENERATION, members))
        joined = worker_pb2.Joined(group=group, rank=request.rank, door=f"{self.path[:-1]}d", token=b"b" * 16)
        yield worker_pb2.JoinEvent(joined=joined)

    def Leave(self, request: worker_pb2.LeaveRequest, context: grpc.ServicerContext) -> worker_pb2.LeaveReply:
        return worker_pb2.LeaveReply()

    def Prepare(self, request: worker_pb2.PrepareRequest, context: grpc.ServicerContext) -> worker_pb2.PrepareReply:
        if self.mute:
            ended = threading.Event()
            context.add_callback(ended.set)
            self.preparing.release()
            ended.wait()
            self.withdrawn.release()
        if self.refuses:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more")
        assert self.seated.wait(10)
        assert self.far is not None
        number, layout, _, _ = self.far.describe(codec.collective_from_proto(request.collective), None)
        return worker_pb2.PrepareReply(id=number, layout=codec.layout_to_proto(layout))


@pytest.fixture
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarWorker]:
    """A worker of one rank, over real gRPC."""
    far = FarWorker(tmp_path_factory.mktemp("w"))
    yield far
    far.close()
