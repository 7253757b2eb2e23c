"""Memory that a client lends: what its session may reach by it, and who may lend at all."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.cuda import PAGE, FakeCuda
from tests.fakes.ipc_exporter import SIZE
from tests.fuzz.parsers import TOPOLOGY

from collectived_proto.devices import DeviceName
from collectived_proto.ipc import messages
from collectived_proto.types import AllReduce, Collective, CommunicationImplementation, DType, Leaf, ReduceOp
from collectived_runtime.auth.callers import Caller
from collectived_runtime.auth.credentials import AccessLevel
from collectived_runtime.auth.peers import UnixPeer
from collectived_runtime.device.gpus import ClearTimeout, Gpu, Region, select_gpus
from collectived_runtime.engine.base.memory_budget import MemoryBudget, MemoryExhausted, SessionBudget
from collectived_runtime.engine.clients.local_rank import InputBuffers
from collectived_runtime.engine.compile.negotiation import prepare
from collectived_runtime.limits.quota_settings import Quotas
from collectived_runtime.worker.devices import DeviceOffer
from collectived_runtime.worker.sessions import Client, Session, Sessions

MOST = 2
MOST_BYTES = 64 * PAGE
CLIENT = Client("h", os.getpid(), "", "job")
DEVICES = (DeviceName(0, "GPU", 0),)


@pytest.fixture
def handle() -> Iterator[bytes]:
    line = [sys.executable, "-m", "tests.fakes.ipc_exporter", "fake"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield bytes.fromhex(process.stdout.readline())
        process.kill()


class Scene:
    """A session on a GPU, and the client's end of its socket."""

    def __init__(self, cuda: FakeCuda | None = None, gpus: tuple[Gpu, ...] = ()) -> None:
        self.cuda = cuda or FakeCuda(2)
        self.gpus = gpus or select_gpus(self.cuda, None, lambda why: None)
        self.wholes = {gpu: MemoryBudget(1 << 30) for gpu in self.gpus}
        kept_by = "kept after they were given back"
        self.budgets = {gpu: SessionBudget(self.wholes[gpu], MOST_BYTES, kept_by=kept_by) for gpu in self.gpus}
        mine, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client.setblocking(False)
        self.session = Session(
            CLIENT,
            SessionBudget(MemoryBudget(1 << 30), 1 << 30),
            lambda session: None,
            devices=DEVICES,
            gpu_budgets=self.budgets,
            max_open_allocations=MOST,
        )
        self.session.attach(mine)

    async def ask(self, kind: messages.MessageType, number: int, size: int) -> messages.MessageType:
        """What answers, when it does."""
        self.client.send(messages.encode_arena(kind, number, size))
        return messages.parse_type(await self.hear())

    async def hear(self) -> bytes:
        """What the session says next."""
        loop = asyncio.get_running_loop()
        while True:
            data = await asyncio.wait_for(loop.sock_recv(self.client, messages.MAX_MESSAGE), 30)
            if messages.parse_type(data) is not messages.MessageType.PONG:
                return data

    @property
    def used(self) -> tuple[int, int, int]:
        """Bytes of the first GPU that count of the worker, of the session, and of its user when that has ended."""
        budget = self.budgets[self.gpus[0]]
        self.wholes[self.gpus[0]].lent.settle()
        return self.wholes[self.gpus[0]].used, budget.used + budget.lent_bytes, budget.user.orphaned_bytes

    async def lend(self, handle: bytes, identity: int = 7, gpu: int = 0) -> messages.IpcOpenResult:
        self.client.send(messages.IpcOpen(gpu, identity, handle).encode())
        return messages.parse_ipc_open_result(await self.hear())

    async def drop(self, number: int) -> None:
        self.client.send(messages.encode_arena(messages.MessageType.ARENA_DROP, number, 0))
        await self.lend(bytes(64))  # when this is answered the session has read it


def played(play: Callable[[Scene], Awaitable[None]], cuda: FakeCuda | None = None) -> None:
    async def run() -> None:
        scene = Scene(cuda)
        try:
            await play(scene)
        finally:
            scene.session.end("the test is over")
            scene.client.close()
        assert not scene.cuda.lent, "all is closed with the session"

    asyncio.run(run())


def test_no_byte_beyond_what_the_driver_has_opened_is_reached(handle: bytes) -> None:
    async def play(scene: Scene) -> None:
        lending = await scene.lend(handle)
        assert lending.size == SIZE
        whole = scene.session.arenas.resolve_memory(lending.number, 0, SIZE)
        assert isinstance(whole, Region) and whole.gpu is scene.gpus[0]
        for offset, length in ((0, SIZE + 1), (SIZE, 1), (1 << 62, 8)):
            with pytest.raises(messages.MalformedMessage, match=f"of shared memory {lending.number}, which has {SIZE}"):
                scene.session.arenas.resolve_memory(lending.number, offset, length)
        await scene.drop(lending.number)
        with pytest.raises(messages.MalformedMessage, match="not of this session"):
            scene.session.arenas.resolve_memory(lending.number, 0, 1)
        assert scene.cuda.lent, "somebody looks into it"
        del whole
        assert not scene.cuda.lent

    played(play)


def test_elements_at_an_address_that_is_no_multiple_of_theirs_are_refused(handle: bytes) -> None:
    """A kernel that reads them would end the context of the GPU, and with it the worker."""

    async def play(scene: Scene) -> None:
        number = (await scene.lend(handle)).number
        described = Collective(
            AllReduce(ReduceOp.SUM),
            "*",
            (Leaf("", DType.FLOAT32, (8,)),),
            0,
            CommunicationImplementation.AUTO,
            "a.py:1",
        )
        prepared = prepare(described, 0, TOPOLOGY)
        InputBuffers(
            scene.session.arenas.resolve_memory, prepared, messages.Submit(1, 1, 0, 0.0, False, ((number, 4),))
        )
        for staged, offset in ((False, 2), (True, 8)):
            with pytest.raises(messages.MalformedMessage, match="at an address that is no multiple"):
                InputBuffers(
                    scene.session.arenas.resolve_memory,
                    prepared,
                    messages.Submit(1, 1, 0, 0.0, staged, ((number, offset),)),
                )

    played(play)


def test_what_cannot_be_opened_is_said_and_the_session_goes_on(handle: bytes) -> None:
    async def play(scene: Scene) -> None:
        assert "cuIpcOpenMemHandle failed" in (await scene.lend(bytes(64))).reason
        assert "no device GPU:1" in (await scene.lend(handle, gpu=1)).reason, "which the session may not use"
        assert (await scene.lend(handle)).number

    played(play)


def test_one_session_has_only_so_many_open(handle: bytes) -> None:
    async def play(scene: Scene) -> None:
        numbers = [(await scene.lend(handle)).number for _ in range(MOST)]
        refused = await scene.lend(handle)
        assert refused.number == 0 and f"may have {MOST} allocations" in refused.reason
        await scene.drop(numbers[0])
        assert (await scene.lend(handle)).number

    played(play)


def test_a_handle_that_has_become_another_allocations_waits_until_that_is_closed(handle: bytes) -> None:
    async def play(scene: Scene) -> None:
        first = await scene.lend(handle, identity=7)
        assert "still open" in (await scene.lend(handle, identity=8)).reason
        await scene.drop(first.number)
        assert (await scene.lend(handle, identity=8)).number

    played(play)


def test_it_is_opened_once_however_many_lend_it(handle: bytes) -> None:
    cuda = FakeCuda()
    (gpu,) = select_gpus(cuda, None, lambda why: None)
    arenas = [gpu.import_arena(number, 7, handle) for number in (1, 2)]
    assert list(cuda.lent.values()) == [1]
    arenas.pop().close()
    assert cuda.lent, "the other has it"
    arenas.pop().close()
    assert not cuda.lent


@pytest.mark.parametrize(
    ("caller", "openings"),
    [
        (Caller(AccessLevel.ALL, unix_peer=UnixPeer(1, os.geteuid())), MOST),
        (Caller(AccessLevel.ALL, unix_peer=UnixPeer(1, os.geteuid() + 1)), 0),
        (Caller(AccessLevel.ALL, unix_peer=UnixPeer(0, os.geteuid())), 0),
        (Caller(AccessLevel.ALL), 0),
    ],
    ids=["own", "another user", "another PID namespace", "over TCP"],
)
def test_only_processes_of_the_workers_own_user_and_namespace_lend(caller: Caller, openings: int) -> None:
    offer = DeviceOffer(1, (Gpu(0, FakeCuda().devices()[0], FakeCuda(), lambda why: None),))
    sessions = Sessions(MemoryBudget(1 << 30), most=Quotas(open_allocations=MOST), offer=offer)

    async def open_one() -> int:
        return sessions.open(CLIENT, caller, (), remote=caller.unix_peer is None).max_open_allocations

    assert asyncio.run(open_one()) == openings


def test_memory_that_a_busy_gpu_does_not_clear_in_time_is_refused_and_given_back_later(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    cuda, freed = FakeCuda(1, hold), threading.Event()
    (gpu,) = select_gpus(cuda, None, lambda why: None)
    gpu.create_arena(1, SIZE).close()
    before = cuda.used_bytes
    hold.touch()
    with pytest.raises(ClearTimeout, match=r"under way on GPU:0 has kept new memory from being cleared within 0\.05 s"):
        gpu.create_arena(2, SIZE, freed.set, within=0.05)
    assert cuda.used_bytes > before and not freed.is_set(), "the device may still write it"
    hold.unlink()
    assert freed.wait(10)
    assert cuda.used_bytes == before
    gpu.close()


def test_memory_of_the_host_and_of_other_gpus_does_not_wait_for_a_busy_one(tmp_path: Path) -> None:
    busy = [FakeCuda(1, tmp_path / "hold"), FakeCuda(1)]

    async def play() -> None:
        gpus = [select_gpus(cuda, None, lambda why: None) for cuda in busy]
        scenes = [Scene(busy[0], gpus[0]) for _ in range(4)]
        idle = Scene(busy[1], gpus[1])
        (tmp_path / "hold").touch()
        waiting = [asyncio.create_task(one.ask(messages.MessageType.DEVICE_REQUEST, 0, SIZE)) for one in scenes[1:]]
        try:
            while busy[0].used_bytes < 2 * PAGE:  # until two of them wait for the device
                await asyncio.sleep(0.001)
            assert await scenes[0].ask(messages.MessageType.ARENA_REQUEST, 0, 4 << 20) is messages.MessageType.ARENA
            assert await idle.ask(messages.MessageType.DEVICE_REQUEST, 0, SIZE) is messages.MessageType.DEVICE_ARENA
            assert not any(one.done() for one in waiting)
        finally:
            (tmp_path / "hold").unlink()
        assert set(await asyncio.gather(*waiting)) == {messages.MessageType.DEVICE_ARENA}
        for one in (*scenes, idle):
            one.session.end("the test is over")
            one.client.close()

    asyncio.run(play())


class PollableCuda(FakeCuda):
    """Hands its memory out by files that can be polled, as the driver does."""

    def export(self, address: int) -> int:
        return os.eventfd(0)


async def take(scene: Scene, size: int) -> tuple[int, int, int]:
    """Memory of the GPU: its number, its size, and the descriptor."""
    scene.client.send(messages.encode_arena(messages.MessageType.DEVICE_REQUEST, 0, size))
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(scene.client, messages.MAX_MESSAGE, 1)
        except BlockingIOError:
            await asyncio.sleep(0.001)
            continue
        if messages.parse_type(data) is messages.MessageType.DEVICE_ARENA:
            return *messages.parse_arena(data), descriptors[0]


def test_memory_of_a_gpu_that_was_given_back_counts_as_long_as_its_file_is_kept() -> None:
    async def play(scene: Scene) -> None:
        number, size, descriptor = await take(scene, 4 * PAGE)
        assert scene.used == (size, size, 0)
        await scene.drop(number)
        assert scene.used == (size, size, 0), "the client has its file"
        os.close(descriptor)
        assert scene.used == (0, 0, 0)
        number, size, descriptor = await take(scene, 4 * PAGE)
        os.close(descriptor)
        assert scene.used == (size, size, 0), "it is the session's, be it mapped or not"
        await scene.drop(number)
        assert scene.used == (0, 0, 0)

    played(play, PollableCuda(1))


def test_it_counts_too_as_long_as_anything_of_the_worker_looks_into_it() -> None:
    async def play(scene: Scene) -> None:
        number, size, descriptor = await take(scene, 4 * PAGE)
        os.close(descriptor)
        region = scene.session.arenas.resolve_memory(number, 0, size)
        await scene.drop(number)
        assert scene.used == (size, size, 0)
        del region
        assert scene.used == (0, 0, 0)

    played(play, PollableCuda(1))


def test_who_asks_keeps_and_gives_back_gets_no_more_of_a_gpu_than_it_may_have() -> None:
    async def play(scene: Scene) -> None:
        kept = []
        for _ in range(MOST_BYTES // (4 * PAGE)):
            number, _, descriptor = await take(scene, 4 * PAGE)
            kept.append(descriptor)
            await scene.drop(number)
        scene.client.send(messages.encode_arena(messages.MessageType.DEVICE_REQUEST, 0, 4 * PAGE))
        assert f"of which 0 are in use and {MOST_BYTES} kept after" in messages.parse_refused(await scene.hear())[1]
        for descriptor in kept:
            os.close(descriptor)
        assert scene.used == (0, 0, 0)
        os.close((await take(scene, 4 * PAGE))[2])

    played(play, PollableCuda(1))


def test_what_a_process_keeps_after_its_session_counts_of_its_user() -> None:
    async def play(scene: Scene) -> None:
        _, size, descriptor = await take(scene, 4 * PAGE)
        scene.session.end("the test ends it")
        assert scene.used == (size, 0, size)
        user = scene.budgets[scene.gpus[0]].user
        again = SessionBudget(MemoryBudget(1 << 30), MOST_BYTES, user=user)
        with pytest.raises(MemoryExhausted, match=f"0 are in use and {size} by its groups"):
            again.acquire(MOST_BYTES)
        os.close(descriptor)
        assert scene.used == (0, 0, 0)
        again.acquire(MOST_BYTES)

    played(play, PollableCuda(1))
