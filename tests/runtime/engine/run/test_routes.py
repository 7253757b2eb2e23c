"""Routes carried by the native core: for every algorithm the bits that the general executor computes."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.fakes.loopback import LoopbackNetwork
from tests.native.ranks import LIMIT_SECONDS, TINY, make_geometry, make_plan, make_value
from tests.runtime.engine.compile.test_program import topology
from tests.runtime.engine.run.test_schedule import Array, never, run_all

from collectived_native import core, segment
from collectived_proto.across import LocalSeats, list_counts, make_shares, moves_across
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Compression,
    DType,
    Gather,
    Leaf,
    Operation,
    Reduce,
    ReduceOp,
    ReduceScatter,
    Scatter,
    Tier,
)
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile.negotiation import compile_announcement, compile_length_exchange
from collectived_runtime.engine.compile.program import CompiledCollective, compile_program
from collectived_runtime.engine.run.routes import (
    Prelude,
    announce,
    compile_route,
    exchange,
    has_route,
    make_template,
)
from collectived_runtime.engine.run.schedule import Buffers, PlanTransport, execute
from collectived_runtime.plan.moves import Buffer
from collectived_runtime.plan.packing import layout as pack
from collectived_runtime.transport.frame import next_chain

COUNT = 37
CONTRACT, CHAIN, GENERATION = b"contract", b"12345678", 2
TIMES = 5
KINDS = [
    (ReduceOp.SUM, DType.FLOAT32, DType.FLOAT32),
    (ReduceOp.MEAN, DType.FLOAT16, DType.FLOAT16),
    (ReduceOp.MEAN, DType.INT64, DType.FLOAT64),
    (ReduceOp.PRODUCT, DType.COMPLEX64, DType.COMPLEX64),
]
POLLED = struct.Struct("=ihh")


def compile_for(workers: int, algorithm: str, operation: Operation, dtype: DType) -> list[CompiledCollective]:
    collective = Collective(operation, "*", (Leaf("", dtype, (COUNT,)),))
    here = [replace(topology(*[1] * workers, me=me), tuning_table=(Tier(algorithm),)) for me in range(workers)]
    rows = [(COUNT,)] * workers if collective.lengths_differ else ()
    return [compile_program(collective, one, rows) for one in here]


def execute_generally(programs: list[CompiledCollective], values: list[Array]) -> list[bytes]:
    links = LoopbackNetwork().links(range(len(programs)))
    results, generators = [], {}
    for me, program in enumerate(programs):
        [task], [arithmetic] = program.tasks, program.arithmetic
        assert arithmetic is not None
        own, sums = (
            arithmetic.view_partials(np.zeros(COUNT * arithmetic.partial_bytes, np.uint8), COUNT) for _ in "12"
        )
        arithmetic.fold_all([values[me]], own)
        cut = task.partition
        result = np.zeros(COUNT if cut is None else cut.output_count, task.result_dtype)
        windows = None if cut is None else {Buffer.OUTPUT: cut.receive_window}
        buffers = Buffers(own, sums, result, arithmetic.fold, arithmetic.finish, arithmetic.finish_in_place, windows)
        stamp = make_template(1, GENERATION, program)
        generators[me] = execute(task.plan, buffers, PlanTransport(links[me], stamp, never))
        results.append(result)
    run_all(generators)
    return [result.tobytes() if program.receivers else b"" for program, result in zip(programs, results, strict=True)]


class Place:
    """One worker with one rank, each on a thread."""

    def __init__(self, program: CompiledCollective, links: dict[int, socket.socket], value: Array) -> None:
        self.program, self.links, self.value = program, links, value
        self.geometry = replace(make_geometry(2, TINY), operated=1, small=8192)
        self.descriptor = segment.create(self.geometry)
        self.knock, self.stop = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
        self.results: list[bytes] = []
        collective, self.local = program.collective, LocalSeats((self.me,), len(links) + 1)
        self.share = make_shares(collective, pack(collective, 0), self.local)[0]
        self.given = self.share.given[0]
        self.got = self.share.brought if program.receivers else 0
        self.told: tuple[object, ...] = ()
        self.threads = [threading.Thread(target=one) for one in (self.sum, self.carry)]

    def make(self, engine: core.Engine, leaves_in: tuple[int, ...], leaves_out: tuple[int, ...]) -> core.Plan:
        dtype, [arithmetic] = self.program.layout.packs[0].dtype, self.program.arithmetic
        counts = list_counts(self.share, self.me, self.local, not moves_across(self.program.collective))
        phase = int(dtype), counts, leaves_in, leaves_out
        return make_plan(engine, core.ACROSS, (phase,), reduce_op=arithmetic.number if arithmetic else 0, root=1)

    def sum(self) -> None:
        engine = segment.attach(self.descriptor, self.geometry, 0, knock=self.knock)
        gives, receives = bool(self.given), bool(self.got)
        plan = self.make(engine, (self.given,) if gives else (), (self.got,) if receives else ())
        for _ in range(TIMES):
            out = np.zeros(self.got, self.program.tasks[0].result_dtype)
            values = (self.value.view(np.uint8),) if gives else ()
            job = engine.run(plan, values, (out.view(np.uint8),) if receives else (), 0, None)
            while job is not None and job.wait(-1) == core.KNOCK:
                continue
            self.results.append(out.tobytes() if receives else b"")
        os.eventfd_write(self.stop, 1)
        engine.detach()

    def carry(self) -> None:
        worker = segment.attach(self.descriptor, self.geometry, 1, knock=self.knock, waiting=segment.OPERATED)
        gathers = self.make(worker, (), (self.given,))
        brings = self.make(worker, (self.got,) if self.got else (), ())
        template = make_template(1, GENERATION, self.program)
        crossings = core.crossings(worker, self.knock, int(LIMIT_SECONDS * 1e9), template.header(0, 0, 0))
        prelude, operation = Prelude(), self.program.collective.operation
        here = topology(*[1] * (len(self.links) + 1), me=self.me)
        if self.program.collective.lengths_differ:
            prelude = exchange(template, self.program.collective, here)
        elif isinstance(operation, (Broadcast, Scatter)):
            prelude = announce(template, compile_announcement(here, operation.root), b"what comes")
        route = compile_route(self.program, template, prelude, self.share)
        crossings.add(gathers, brings, CONTRACT, route.terms, route.moves, route.constants, b"", b"")
        watched = [self.knock, self.stop, *(link.fileno() for link in self.links.values())]
        polls = bytearray(b"".join(POLLED.pack(one, select.POLLIN, 0) for one in watched))
        wires = tuple((link.fileno(), b"") for _, link in sorted(self.links.items()))
        own = len([place for place in self.links if place < self.me])
        self.told = crossings.run(0, CHAIN, (*wires[:own], (-1, b""), *wires[own:]), polls, int(LIMIT_SECONDS * 1e9))
        worker.detach()

    @property
    def me(self) -> int:
        return next(place for place in range(len(self.links) + 1) if place not in self.links)


def carry_natively(programs: list[CompiledCollective], values: list[Array]) -> list[Place]:
    workers = range(len(programs))
    links: list[dict[int, socket.socket]] = [{} for _ in workers]
    for one in workers:
        for other in range(one):
            links[one][other], links[other][one] = socket.socketpair()
    places = [Place(*each) for each in zip(programs, links, values, strict=True)]
    for place in places:
        for thread in place.threads:
            thread.start()
    for place in places:
        for thread in place.threads:
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive(), "it hangs"
    for place in places:
        for link in place.links.values():
            link.close()
        for descriptor in (place.knock, place.stop, place.descriptor):
            os.close(descriptor)
    return places


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(
    "algorithm", ["one_shot", "tree", "ring", "halving_doubling", "double_tree", "reduce", "reduce_scatter"]
)
def test_a_route_gives_the_bits_of_the_general_executor(
    algorithm: str, workers: int, kind: tuple[ReduceOp, DType, DType]
) -> None:
    op, dtype, _ = kind
    operations: dict[str, Operation] = {"reduce": Reduce(op, root=workers - 1), "reduce_scatter": ReduceScatter(op)}
    operation = operations.get(algorithm, AllReduce(op))
    programs = compile_for(workers, algorithm if isinstance(operation, AllReduce) else "tree", operation, dtype)
    if any(len(program.tasks) > 1 for program in programs):
        assert not any(has_route(program, workers) for program in programs)
        return
    assert all(has_route(program, workers) for program in programs)
    values = [make_value(dtype, COUNT, rank) for rank in range(workers)]
    wanted = execute_generally(programs, values)
    chain = CHAIN
    for _ in range(TIMES):
        chain = next_chain(chain, CONTRACT)
    for place, result in zip(carry_natively(programs, values), wanted, strict=True):
        assert place.results == [result] * TIMES
        assert place.told[1:5] == (TIMES, chain, False, False)


def define(operation: Operation, values: list[Array]) -> list[bytes]:
    """What each rank gets."""
    size = len(values)
    cuts = np.cumsum([COUNT // size + (rank < COUNT % size) for rank in range(size)])[:-1]
    pieces = [np.split(value, cuts) for value in values]
    match operation:
        case Broadcast(root):
            found = [values[root]] * size
        case AllGather():
            found = [np.concatenate(values)] * size
        case Gather(root):
            found = [np.concatenate(values if rank == root else [values[0][:0]]) for rank in range(size)]
        case Scatter(root):
            found = pieces[root]
        case _:
            found = [np.concatenate([row[rank] for row in pieces]) for rank in range(size)]
    return [one.tobytes() for one in found]


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.COMPLEX128, DType.BOOL])
@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("operation", [Broadcast(1), AllGather(), Gather(1), Scatter(0), AllToAll()], ids=str)
def test_a_route_of_what_is_moved_brings_each_rank_its_own(workers: int, dtype: DType, operation: Operation) -> None:
    programs = compile_for(workers, "tree", operation, dtype)
    assert all(has_route(program, workers) for program in programs)
    values = [make_value(dtype, COUNT, rank) for rank in range(workers)]
    for place, wanted in zip(carry_natively(programs, values), define(operation, values), strict=True):
        assert place.results == [wanted] * TIMES
        assert place.told[1] == TIMES and place.told[3:5] == (False, False)


@pytest.mark.parametrize("algorithm", ["one_shot", "tree", "ring", "halving_doubling", "double_tree"])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 1, 1), (1, 3, 2, 1)], ids=str)
def test_what_is_told_of_lengths_is_what_the_general_executor_tells(algorithm: str, hosts: tuple[int, ...]) -> None:
    """Of all workers: frame by frame, and what each of them adds up to is the table of all ranks."""
    collective = Collective(AllGather(), "*", (Leaf("", DType.INT8, (COUNT, 3)),))
    size, template = sum(hosts), make_template(1, GENERATION, compile_for(2, "tree", AllGather(), DType.INT8)[0])
    places = [replace(topology(*hosts, me=me), tuning_table=(Tier(algorithm),)) for me in range(len(hosts))]
    found = [exchange(template, collective, place) for place in places]
    links = LoopbackNetwork().links(range(len(hosts)))
    generators, tables = {}, []
    for me, place in enumerate(places):
        program = compile_length_exchange(collective, place)
        [task], [arithmetic] = program.tasks, program.arithmetic
        assert arithmetic is not None
        own = np.zeros(size, np.int64)
        own[list(place.own_ranks)] = COUNT
        table = np.zeros_like(own)
        buffers = Buffers(own, own.copy(), table, arithmetic.fold, arithmetic.finish, arithmetic.finish_in_place)
        stamp = replace(template, pack=task.pack_number, shard=task.shard, plan=task.plan_hash)
        spied = {peer: Spy(link) for peer, link in links[me].items()}
        generators[me] = execute(task.plan, buffers, PlanTransport(spied, stamp, never))  # type: ignore[arg-type]
        tables.append((table, spied))
    run_all(generators)
    for me, (table, spied) in enumerate(tables):
        assert table.tolist() == [COUNT] * size
        for peer, spy in spied.items():
            told = [
                header + word
                for moves in found[me].rounds
                for to, is_sent, header, word in moves
                if is_sent and to == peer
            ]
            assert spy.sent == b"".join(told)
            heard = [
                header + word
                for moves in found[peer].rounds
                for to, is_sent, header, word in moves
                if not is_sent and to == me
            ]
            assert heard == told


class Spy:
    """A link that remembers what was sent."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.sent = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)

    def send(self, parts: list[Any]) -> int:
        taken = int(self.link.send(parts))
        self.sent += b"".join(map(bytes, parts))[:taken]
        return taken


def test_what_is_large_or_compressed_has_no_route() -> None:
    def compile_sum(count: int, **fields: Any) -> CompiledCollective:
        leaves = (Leaf("", DType.FLOAT32, (count,)),)
        here = replace(topology(1, 1), tuning_table=(Tier("one_shot"),))
        return compile_program(Collective(AllReduce(ReduceOp.SUM), "*", leaves, **fields), here)

    assert has_route(compile_sum(100), 2) and has_route(compile_sum(4096), 2)
    assert has_route(compile_sum(1 << 22), 2) and not has_route(compile_sum((1 << 22) + 1), 2)
    assert not has_route(compile_sum(4096, compression=Compression.INT8), 2)
    assert not has_route(compile_sum(100), core.MOST_WIRES + 1)


@pytest.mark.parametrize("operation", [AllToAll(), Scatter(0)], ids=str)
def test_what_counts_is_what_a_worker_has_of_it(operation: Operation) -> None:
    """Not what all send to each other."""
    places = [replace(topology(1, 1, 1, 1, me=me), tuning_table=(Tier("tree"),)) for me in range(4)]

    def compile_at(here: GroupTopology, count: int) -> CompiledCollective:
        return compile_program(Collective(operation, "*", (Leaf("", DType.FLOAT32, (count,)),)), here)

    assert all(has_route(compile_at(here, 1 << 22), 4) for here in places)
    assert not has_route(compile_at(places[0], (1 << 22) + 4), 4)


def test_what_counts_is_also_what_comes_from_all_peers() -> None:
    places = topology(1, 1, 1, 1, 1, 1, 1, 1)

    def compile_sum(algorithm: str) -> CompiledCollective:
        here = replace(places, tuning_table=(Tier(algorithm),))
        leaves = (Leaf("", DType.FLOAT32, (1 << 20,)),)
        return compile_program(Collective(AllReduce(ReduceOp.SUM), "*", leaves), here)

    assert has_route(compile_sum("ring"), 8)  # seven MiB
    assert not has_route(compile_sum("one_shot"), 8)  # 28 MiB
