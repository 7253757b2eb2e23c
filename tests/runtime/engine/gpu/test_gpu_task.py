"""Values in the memory of GPUs, through real group loops on fake devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.fakes.cuda import FakeCuda, view_host_memory
from tests.runtime.engine.conftest import wait_for

from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.numpy_types import from_numpy
from collectived_proto.types import (
    AllReduce,
    Broadcast,
    Collective,
    DType,
    Gather,
    GroupInfo,
    Leaf,
    Member,
    Operation,
    Peer,
    Reduce,
    ReduceOp,
    ReportKind,
    Tier,
)
from collectived_runtime.device.cuda.driver import CudaError
from collectived_runtime.device.gpus import DeviceArena, Gpu, select_gpus
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients.local_rank import HostOrGpuBytes
from collectived_runtime.engine.compile.negotiation import prepare
from collectived_runtime.engine.compile.program import compile_program
from collectived_runtime.engine.compile.selection import SEGMENT_BYTES

ARENA_BYTES = 4 << 20
HOST, GPU = 1, 2  # arenas
OUTPUT = 2 << 20  # where results are to be written


class Party:
    """The ranks of a world, each on the host (-1) or on one of its worker's GPUs."""

    def __init__(self, world: Any, places: tuple[int, ...], cudas: list[FakeCuda]) -> None:
        self.world = world
        self.places = places
        self.cudas = cudas
        self.lost: list[str] = []
        gpus = [select_gpus(cuda, None, self.lost.append) for cuda in cudas]
        self.gpus: list[Gpu] = [gpu for some in gpus for gpu in some]
        self.arenas: dict[int, DeviceArena] = {}
        for rank, place in enumerate(places):
            if place >= 0:
                task = next(task for task, local in enumerate(world.layout) if rank in local)
                self._local_rank(rank, gpus[task][place].create_arena(GPU, ARENA_BYTES))

    def _local_rank(self, rank: int, arena: DeviceArena) -> None:
        local_rank, host = self.world.ranks[rank].local_rank, self.world.ranks[rank].local_rank.resolve_memory
        self.arenas[rank] = arena

        def memory(number: int, offset: int, length: int) -> HostOrGpuBytes:
            if number != GPU:
                found: NDArray[np.uint8] = host(number, offset, length)
                return found
            if offset + length > arena.size:
                raise messages.MalformedMessage(f"{offset + length} bytes of {arena.size}")
            return arena.region(offset, length)

        local_rank.resolve_memory = memory

    def memory(self, rank: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """What a client of this rank sees of its arena."""
        return view_host_memory(self.arenas[rank].region(offset, nbytes).address, nbytes)

    def submit(
        self,
        rank: int,
        leaves: list[NDArray[Any]],
        operation: Operation,
        receives: bool = True,
        ordered: bool = False,
        event: int = 0,
        remaining: float = 0.0,
        **described_as: Any,
    ) -> None:
        one = self.world.ranks[rank]
        described = tuple(
            Leaf(f"[{number}]", from_numpy(leaf.dtype) or pytest.fail(), leaf.shape)
            for number, leaf in enumerate(leaves)
        )
        collective = Collective(operation, "[*]", described, site="test.py:1", **described_as)
        prepared = prepare(collective, rank, self.world.group_loop_of(rank).topology)
        one.local_rank.prepared[5] = prepared
        there, addresses, at = self.places[rank] >= 0, [], 0
        for leaf in leaves:
            into = self.memory(rank, at, leaf.nbytes) if there else one.memory[at : at + leaf.nbytes]
            into[:] = np.frombuffer(leaf.tobytes(), np.uint8)
            addresses.append((GPU if there else HOST, at))
            at += -(-leaf.nbytes // 64) * 64 + 64
        output = (GPU, OUTPUT) if there and receives else None
        where = tuple(addresses)
        ring = messages.Submit(
            self.world.group.generation,
            5,
            one.next,
            remaining,
            False,
            where,
            output=output,
            ordered=ordered,
            event=event,
        )
        one.next += 1
        one.doorbell.send(ring.encode())

    def rows(self, rank: int, dtype: Any, done: messages.Completion) -> NDArray[Any]:
        """The only leaf of a result of rows, flat, wherever it is."""
        one = self.world.ranks[rank]
        if done.has_result:
            (found,) = one.outlined(done, dtype)
            return np.ravel(found)
        rows = one.local_rank.prepared[5].device_rows
        assert rows is not None
        return self.memory(rank, OUTPUT, rows.ends[0]).view(dtype)

    def result(self, rank: int, dtype: Any, count: int, done: messages.Completion) -> NDArray[Any]:
        kind = np.dtype(dtype)
        if self.places[rank] < 0:
            found: NDArray[Any] = self.world.ranks[rank].result(done, kind, count)
            return found
        assert not done.has_result
        return self.memory(rank, OUTPUT, count * kind.itemsize).view(kind)

    def let_go(self) -> None:
        """Of what its clients look into."""
        for arena in self.arenas.values():
            arena.close()

    def close(self) -> None:
        for gpu in self.gpus:
            gpu.close()
        self.let_go()
        for cuda in self.cudas:
            cuda.close()


Make = Callable[..., Party]


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    return tmp_path / "hold"


@pytest.fixture
def party(world: Callable[..., Any], hold: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[Party] = []

    def make(hosts: tuple[int, ...], places: tuple[int, ...], gpus: int = 2) -> Party:
        cudas = [FakeCuda(gpus, hold, tmp_path / "broken") for _ in hosts]
        made.append(Party(world(*hosts), places, cudas))
        return made[-1]

    yield make
    hold.unlink(missing_ok=True)
    for one in made:
        one.close()


LAYOUTS = {
    "one rank alone": ((1,), (0,)),
    "two ranks on one GPU": ((2,), (0, 0)),
    "two GPUs of one worker": ((3,), (0, 1, 0)),
    "two workers": ((1, 1), (0, 0)),
    "two workers with two ranks each": ((2, 2), (0, 0, 1, 1)),
    "a rank on the CPU beside a GPU": ((2,), (-1, 0)),
    "a worker without GPUs": ((2, 1), (-1, -1, 1)),
}


@pytest.mark.parametrize(("hosts", "places"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN], ids=lambda op: op.value)
def test_all_reduce_gives_every_rank_the_same(
    party: Make, hosts: tuple[int, ...], places: tuple[int, ...], dtype: Any, op: ReduceOp
) -> None:
    ranks = party(hosts, places)
    values = [np.arange(1000).astype(dtype) % 50 + rank for rank in range(len(places))]
    for rank, value in enumerate(values):
        ranks.submit(rank, [value.astype(dtype)], AllReduce(op))
    expected = np.sum(values, axis=0, dtype=np.float64) / (len(places) if op is ReduceOp.MEAN else 1)
    kind = dtype if op is ReduceOp.SUM else {np.int64: np.float64, np.uint8: np.float32}.get(dtype, dtype)
    for rank in range(len(places)):
        got = ranks.result(rank, kind, 1000, ranks.world.ranks[rank].done())
        assert (got == expected.astype(kind)).all(), rank


@pytest.mark.parametrize(("hosts", "places"), LAYOUTS.values(), ids=LAYOUTS)
def test_several_leaves_lie_side_by_side_in_the_result(
    party: Make, hosts: tuple[int, ...], places: tuple[int, ...]
) -> None:
    ranks = party(hosts, places)
    for rank in range(len(places)):
        ranks.submit(rank, [np.full(10, rank, np.float32), np.full(20, 10 * rank, np.float32)], AllReduce(ReduceOp.SUM))
    total = sum(range(len(places)))
    for rank in range(len(places)):
        got = ranks.result(rank, np.float32, 30, ranks.world.ranks[rank].done())
        assert (got == [10 * total] * 20 + [total] * 10).all()  # a pack begins with the last leaf


@pytest.mark.parametrize("places", [(-1, -1, -1), (0, 0, 0), (0, 1, 0), (0, -1, 0), (-1, 0, 1)], ids=str)
def test_the_lower_rank_is_left_wherever_the_ranks_are(party: Make, places: tuple[int, ...]) -> None:
    ranks = party((3,), places)
    for rank, value in enumerate((1e8, 1.0, -1e8)):  # 1 is lost in 1e8, and found where 1e8 is taken from itself first
        ranks.submit(rank, [np.full(10, value, np.float32)], AllReduce(ReduceOp.SUM))
    for rank in range(3):
        assert (ranks.result(rank, np.float32, 10, ranks.world.ranks[rank].done()) == 0).all()


@pytest.mark.parametrize(("gpus", "pieces"), [((0, 1, 0), 3), ((0, 0, 0), 1)], ids=["two GPUs", "one GPU"])
def test_what_passes_between_gpus_of_one_worker_passes_in_pieces(
    world: Callable[..., Any], gpus: tuple[int, ...], pieces: int
) -> None:
    topology = world(3, gpus=gpus).group_loop_of(0).topology
    leaf = Leaf("", DType.FLOAT32, (SEGMENT_BYTES * 5 // 2 // 4,))
    for operation in (AllReduce(ReduceOp.SUM), Reduce(ReduceOp.SUM, 1), Broadcast(1)):
        spans = [
            one.span for one in compile_program(Collective(operation, "*", (leaf,), site="test.py:1"), topology).tasks
        ]
        assert len(spans) == pieces


@pytest.mark.parametrize(("hosts", "places"), LAYOUTS.values(), ids=LAYOUTS)
def test_broadcast_reaches_every_rank(party: Make, hosts: tuple[int, ...], places: tuple[int, ...]) -> None:
    ranks = party(hosts, places)
    root = len(places) - 1
    for rank in range(len(places)):
        ranks.submit(rank, [np.full(100, rank, np.int16)], Broadcast(root))
    for rank in range(len(places)):
        assert (ranks.result(rank, np.int16, 100, ranks.world.ranks[rank].done()) == root).all()


@pytest.mark.parametrize(("hosts", "places"), LAYOUTS.values(), ids=LAYOUTS)
def test_reduce_reaches_its_root_alone(party: Make, hosts: tuple[int, ...], places: tuple[int, ...]) -> None:
    ranks = party(hosts, places)
    for rank in range(len(places)):
        ranks.submit(rank, [np.full(100, rank + 1, np.int32)], Reduce(ReduceOp.MAX, 0), receives=rank == 0)
    for rank in range(len(places)):
        done = ranks.world.ranks[rank].done()
        if rank == 0:
            assert (ranks.result(0, np.int32, 100, done) == len(places)).all()
        else:
            assert not done.has_result


def test_what_meets_on_one_gpu_never_leaves_it(party: Make) -> None:
    ranks = party((3,), (0, 0, 0))
    for rank in range(3):
        ranks.submit(rank, [np.full(1000, rank, np.float32)], AllReduce(ReduceOp.SUM))
    for rank in range(3):
        assert (ranks.result(rank, np.float32, 1000, ranks.world.ranks[rank].done()) == 3).all()
    (cuda,) = ranks.cudas
    assert [sources for _, sources in cuda.folds] == [3], "all three are folded at once"
    assert cuda.copied_bytes == 0, "the kernel writes all three results"


@pytest.mark.parametrize(("device", "tasks"), [("GPU:0", 3), ("CPU:0", 1)])
def test_a_large_pack_is_cut_where_it_passes_between_gpus_and_hosts(device: str, tasks: int) -> None:
    members = tuple(
        Member(rank, f"/job:worker/replica:0/task:{rank}/device:{device}", rank, "h", 1) for rank in range(2)
    )
    peers = tuple(Peer(task, "i", "h", "127.0.0.1:1", (task,)) for task in range(2))
    topology = GroupTopology.from_peers(GroupInfo("g", 1, 1, members), peers, 0, (Tier("ring"),))
    leaf = Leaf("", DType.FLOAT32, ((2 * SEGMENT_BYTES) // 4 + 1,))
    program = compile_program(Collective(AllReduce(ReduceOp.SUM), "*", (leaf,)), topology)
    assert len(program.tasks) == tasks
    assert sum(len(task.span) for task in program.tasks) == leaf.count


def test_a_deadline_ends_what_a_gpu_holds_up_and_the_device_is_usable_afterwards(party: Make, hold: Path) -> None:
    ranks = party((2,), (0, 0))
    hold.touch()
    for rank in range(2):
        ranks.submit(rank, [np.full(100, rank, np.float32)], AllReduce(ReduceOp.SUM))
    group_loop = ranks.world.group_loops[0]
    wait_for(lambda: group_loop.execution is not None)
    ranks.world.rule(ranks.world.verdict(Code.DEADLINE_EXCEEDED, successor=101))
    hold.unlink()
    for rank in range(2):
        assert ranks.world.ranks[rank].failed()[1].code == Code.DEADLINE_EXCEEDED
        ranks.world.ranks[rank].next = 0
    ranks.world.group = replace(ranks.world.group, generation=101)
    for rank in range(2):
        ranks.submit(rank, [np.full(100, rank, np.float32)], AllReduce(ReduceOp.SUM))
    for rank in range(2):
        assert (ranks.result(rank, np.float32, 100, ranks.world.ranks[rank].done()) == 1).all()
    assert not ranks.lost


@pytest.mark.parametrize(("hosts", "places"), [((2,), (0, 0)), ((3,), (0, 1, 0)), ((1, 1), (0, 0))], ids=str)
def test_a_verdict_is_told_while_gpus_hang_and_their_memory_is_free_when_they_go_on(
    party: Make, hold: Path, hosts: tuple[int, ...], places: tuple[int, ...]
) -> None:
    ranks = party(hosts, places)
    size, value = len(places), np.ones(600_000, np.float16)  # which is widened: with scratch memory
    for rank in range(size):
        ranks.submit(rank, [value], AllReduce(ReduceOp.SUM))
    for rank in range(size):
        ranks.world.ranks[rank].done()
    idle = [(len(gpu.pinned._free), len(gpu.scratch._free)) for gpu in ranks.gpus]
    hold.touch()
    for rank in range(size):
        ranks.submit(rank, [value], AllReduce(ReduceOp.SUM))
    wait_for(lambda: all(any(stream for stream in cuda._streams.values()) for cuda in ranks.cudas))
    ranks.world.rule(ranks.world.verdict(Code.DEADLINE_EXCEEDED, 1))
    for one in ranks.world.ranks:
        assert one.failed()[1].code == Code.DEADLINE_EXCEEDED
        assert one.in_use and not one.freed
        one.doorbell.send(messages.encode_bare(messages.MessageType.PING))
        assert one.pong(), "whoever asks hears that its memory is in use"
    hold.unlink()
    for one in ranks.world.ranks:
        assert one.hear_freed() == (100, 1)
        one.doorbell.send(messages.encode_bare(messages.MessageType.PING))
        assert not one.pong()
    wait_for(lambda: [(len(gpu.pinned._free), len(gpu.scratch._free)) for gpu in ranks.gpus] == idle)
    assert not ranks.lost


def test_who_aborts_hears_that_its_memory_is_in_use_before_anybody_has_decided(party: Make, hold: Path) -> None:
    ranks = party((2,), (0, 0))
    one = ranks.world.ranks[0]
    hold.touch()
    for rank in range(2):
        ranks.submit(rank, [np.ones(10)], AllReduce(ReduceOp.SUM))
    wait_for(lambda: any(ranks.cudas[0]._streams.values()))
    one.doorbell.send(messages.encode_bare(messages.MessageType.ABORT, "enough"))
    one.doorbell.send(messages.encode_bare(messages.MessageType.PING))
    assert one.pong()
    hold.unlink()
    assert one.hear_freed() == (100, 0)


def test_a_gpu_that_does_not_end_what_nobody_wants_is_given_up(
    party: Make, hold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = party((2,), (0, 0))
    monkeypatch.setattr(ranks.gpus[0]._blocking_thread, "_within", 0.05)
    hold.touch()
    for rank in range(2):
        ranks.submit(rank, [np.ones(10)], AllReduce(ReduceOp.SUM))
    wait_for(lambda: any(ranks.cudas[0]._streams.values()))
    ranks.world.rule(ranks.world.verdict(Code.DEADLINE_EXCEEDED))
    assert [one.failed()[0] for one in ranks.world.ranks] == [0, 0]
    wait_for(lambda: ranks.lost)
    assert "a copy or fold has not ended within 0.05 s" in ranks.lost[0]


def test_a_gpu_that_fails_is_given_up_and_its_ranks_hear_of_it(party: Make, tmp_path: Path) -> None:
    ranks = party((1, 1), (0, -1))
    (tmp_path / "broken").touch()
    ranks.submit(0, [np.ones(100, np.float32)], AllReduce(ReduceOp.SUM))
    ranks.submit(1, [np.ones(100, np.float32)], AllReduce(ReduceOp.SUM))
    report = ranks.world.report(ReportKind.LOST)
    assert report.rank == 0 and "a GPU of its worker failed" in report.text
    assert len(ranks.lost) == 1 and "GPU:0 (Fake, GPU-fake-0) of this worker is lost" in ranks.lost[0]
    for one in ranks.world.ranks:  # nobody answers: the workers decide
        instance, verdict = one.failed()
        assert (instance, verdict.code, [member.rank for member in verdict.missing]) == (0, Code.UNAVAILABLE, [0])
    assert ranks.world.ended.empty(), "the group loop goes on until its worker ends"


def test_a_gpu_without_memory_for_what_lies_in_between_refuses_the_instance(party: Make) -> None:
    ranks = party((2, 1), (0, 0, 0))
    cuda = ranks.cudas[0]
    filled = []
    with pytest.raises(CudaError):
        while True:
            filled.append(cuda.allocate(0, 64 << 20))
    with pytest.raises(CudaError):
        while True:
            filled.append(cuda.allocate(0, 1))
    for rank in range(3):
        ranks.submit(rank, [np.ones(100, np.float16)], AllReduce(ReduceOp.SUM))
    report = ranks.world.report(ReportKind.EXHAUSTED)
    assert "out of memory" in report.text


def test_memory_is_freed_when_nobody_looks_into_it(party: Make) -> None:
    ranks = party((1,), (0,))
    (cuda,) = ranks.cudas
    arena = ranks.gpus[0].create_arena(9, 1 << 20)
    used = cuda.used_bytes
    region = arena.region(0, 100)
    arena.close()
    assert cuda.used_bytes == used, "somebody looks into it"
    del region
    assert cuda.used_bytes < used


@pytest.mark.parametrize(
    ("operation", "output", "event", "why"),
    [
        (Gather(), None, 0, "in the memory of a GPU"),
        (AllReduce(ReduceOp.SUM), (HOST, 0), 0, "into memory of the host"),
        (AllReduce(ReduceOp.SUM), (GPU, ARENA_BYTES), 0, "bytes of"),
        (AllReduce(ReduceOp.SUM), (GPU, 0), 3, "event 3, which was never named"),
        (AllReduce(ReduceOp.SUM), (GPU, 0), 1, "an event that cannot be waited for"),
        (AllReduce(ReduceOp.SUM), (HOST, 0), 1, "event 1, whose value does not lie on a GPU"),
    ],
)
def test_what_cannot_be_meant_ends_its_rank(
    party: Make, operation: Operation, output: tuple[int, int] | None, event: int, why: str
) -> None:
    ranks = party((1,), (0,))
    one = ranks.world.ranks[0]
    collective = Collective(operation, "*", (Leaf("", from_numpy(np.dtype(np.float32)) or pytest.fail(), (10,)),))
    one.local_rank.prepared[5] = prepare(collective, 0, ranks.world.group_loop_of(0).topology)
    one.doorbell.send(messages.encode_event(1, b"/nowhere".ljust(64, b"\0")))
    one.doorbell.send(messages.Submit(100, 5, 0, 0.0, False, ((GPU, 0),), output=output, event=event).encode())
    report = ranks.world.report(ReportKind.LOST)
    assert why in report.text
