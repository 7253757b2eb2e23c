"""Tasks that carriers carry: for every algorithm the bits that the general executor computes."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.native.ranks import make_value
from tests.runtime.engine.compile.test_program import topology
from tests.runtime.engine.run.test_routes import compile_for, execute_generally
from tests.runtime.engine.run.test_schedule import Array
from tests.runtime.transport.test_link_streams import tcp_pair

from collectived_native import core
from collectived_proto.ipc import carrier_orders as orders
from collectived_proto.ipc.carrier_orders import Answer, AnswerKind
from collectived_proto.types import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Compression,
    DType,
    Leaf,
    Operation,
    Reduce,
    ReduceOp,
    Tier,
)
from collectived_runtime.engine.base.poller import Poller, Timers
from collectived_runtime.engine.clients.rank_carrier import Order, RankCarrier
from collectived_runtime.engine.compile.program import CompiledCollective, compile_program
from collectived_runtime.engine.run import lent_task
from collectived_runtime.engine.run.lent_task import can_carry
from collectived_runtime.engine.run.routes import make_template
from collectived_runtime.engine.run.schedule import PlanTransport, Wait
from collectived_runtime.engine.run.task import TaskContext
from collectived_runtime.plan.catalog import FLAT_ALGORITHMS
from collectived_runtime.transport.link import Link, LinkBroken, LinkRefused

INSTANCE, GENERATION = 7, 2  # the latter as `test_routes` has it
SUM = ReduceOp.SUM
CARRIED = ["ring", "halving_doubling", "tree", "double_tree", "shuffle"]


def refuse_frame(link: Link, expected: bytes, got: bytes) -> bool:
    raise AssertionError(f"a frame that is not expected: {got!r}")


class Places:
    """One worker with one rank each, in this process."""

    def __init__(self, programs: list[CompiledCollective]) -> None:
        self.programs = programs
        self.poller, self.timers = Poller(), Timers()
        self.faults: list[str] = []
        self.links: list[dict[int, Link]] = [{} for _ in programs]
        for one in range(len(programs)):
            for other in range(one):
                streams = tcp_pair()
                self.links[one][other], self.links[other][one] = Link(other, 0, streams[0]), Link(one, 0, streams[1])
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in programs]
        self.carriers = [core.carrier(theirs.detach()) for _, theirs in pairs]
        self.workers = [RankCarrier(ours, self.poller, self.faults.append) for ours, _ in pairs]

    def close(self) -> None:
        closing: list[Any] = [*self.carriers, *self.workers, self.poller]
        for one in closing:
            one.close()
        for links in self.links:
            for link in links.values():
                link.close()

    def start(self, place: int, *, keeps_own: bool = False) -> Iterator[Wait]:
        program = self.programs[place]
        task = program.tasks[0]
        stamp = replace(make_template(1, GENERATION, program), instance=INSTANCE)
        links = {peer: link for peer, link in self.links[place].items() if peer in task.peers}
        sources: Any = [SimpleNamespace(keeps_own=keeps_own)] if program.contributors else []
        tools: Any = SimpleNamespace(timers=self.timers)
        context = TaskContext(program, task, sources, None, tools, PlanTransport(links, stamp, refuse_frame))
        return lent_task.run(context, self.workers[place], INSTANCE, len(self.programs), lambda _: None)

    def run(self, tasks: dict[int, Iterator[Wait]]) -> None:
        waits: dict[int, Wait] = dict.fromkeys(tasks, ())
        while tasks:
            for place, task in list(tasks.items()):
                if waits[place] and not any(one.done for one, _ in waits[place] if not isinstance(one, Link)):
                    continue
                try:
                    waits[place] = next(task)
                except StopIteration:
                    del tasks[place]
            if tasks:
                self.poller.wait(self.timers.next_deadline)
        assert not self.faults


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def carry(places: Places, values: list[Array], *, in_place: bool) -> list[bytes]:
    results = []
    for place, (program, value) in enumerate(zip(places.programs, values, strict=True)):
        result = None
        if program.receivers:
            result = value.copy() if in_place else np.zeros(len(value), program.tasks[0].result_dtype)
        mine = None if not program.contributors else value if result is None or not in_place else result
        given, got = (None if one is None else one.view(np.uint8) for one in (mine, result))
        places.carriers[place].offer(INSTANCE, given, got, None)
        results.append(result)
    places.run({place: places.start(place) for place in range(len(values))})
    for carrier in places.carriers:
        carrier.withdraw(INSTANCE)
    return [b"" if result is None else result.tobytes() for result in results]


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("algorithm", CARRIED)
@pytest.mark.parametrize("operation", [AllReduce(SUM), AllReduce(ReduceOp.MEAN), Reduce(SUM, 1), Broadcast(1)], ids=str)
def test_the_bits_are_those_of_the_executor(
    closing: ExitStack, operation: Operation, algorithm: str, workers: int, in_place: bool
) -> None:
    programs = compile_for(workers, algorithm, operation, DType.FLOAT32)
    values = [make_value(DType.FLOAT32, len_of(programs), place) for place in range(workers)]
    places = Places(programs)
    closing.callback(places.close)
    assert all(map(can_carry, programs))
    expected = [value.tobytes() for value in values]
    if isinstance(operation, Broadcast):
        expected = [values[1].tobytes()] * workers
    else:
        expected = execute_generally(programs, values)
    before = [value.copy() for value in values]
    for _ in range(2):  # the links are used again
        assert carry(places, values, in_place=in_place) == expected
    assert all(np.array_equal(value, old) for value, old in zip(values, before, strict=True))


def len_of(programs: list[CompiledCollective]) -> int:
    return programs[0].tasks[0].pack.count


def make_program(operation: Operation, dtype: DType, algorithm: str = "ring", **terms: Any) -> CompiledCollective:
    collective = Collective(operation, "*", (Leaf("", dtype, (100_000,)),), **terms)
    here = topology(1, 1, 1)
    return compile_program(collective, replace(here, tuning_table=(Tier(algorithm),)), [(100_000,)] * 3)


def test_what_a_carrier_can_carry() -> None:
    assert can_carry(make_program(AllReduce(SUM), DType.FLOAT64))
    assert can_carry(make_program(Broadcast(0), DType.BFLOAT16))
    assert not can_carry(make_program(AllReduce(SUM), DType.BFLOAT16))  # it is folded in float32
    assert not can_carry(make_program(AllReduce(ReduceOp.MEAN), DType.INT32))
    assert not can_carry(make_program(AllGather(), DType.FLOAT32))
    assert not can_carry(make_program(AllReduce(SUM), DType.FLOAT32, compression=Compression.INT8))
    carried = {name for name in FLAT_ALGORITHMS if can_carry(make_program(AllReduce(SUM), DType.FLOAT32, name))}
    assert carried == {*CARRIED, "xring", "rechd", "psgpu"}


def test_bytes_that_the_worker_has_read_come_first_and_the_rest_is_left_to_it(closing: ExitStack) -> None:
    """Of a broadcast's frame the first bytes, and a header of what follows."""
    places = Places(compile_for(2, "ring", Broadcast(1), DType.FLOAT32))
    closing.callback(places.close)
    values = [make_value(DType.FLOAT32, len_of(places.programs), place) for place in range(2)]
    results = [np.zeros_like(values[0]), values[1].copy()]
    places.carriers[0].offer(INSTANCE, None, results[0].view(np.uint8), None)
    places.carriers[1].offer(INSTANCE, values[1].view(np.uint8), results[1].view(np.uint8), None)
    places.run({1: places.start(1)})
    following = b"H" * orders.HEADER_BYTES
    assert places.links[1][0].send([following]) == len(following)
    link = places.links[0][1]
    while len(link.unread_bytes) < 4 * len(values[0]) + 2 * orders.HEADER_BYTES:
        link._ahead[link._end : link._end] = b""
        received = link.stream.recv_into(link._view[link._end :])
        link._end += received
    places.run({0: places.start(0)})
    assert results[0].tobytes() == values[1].tobytes()
    assert link.read_header() == following


class SilentCarrier:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.order = Order()
        self.is_answering, self.asked = True, 0
        self.given_up: list[str] = []

    def begin(self, instance: int, message: bytes) -> Order:
        return self.order

    def lend(self, place: int, link: Link, unread: bytes) -> None:
        pass

    def ask(self) -> None:
        self.asked += 1

    def give_up(self, why: str) -> None:
        self.given_up.append(why)

    def close(self) -> None:
        pass


def start_silent(places: Places, carrier: Any, on_answering: Any = lambda _: None) -> Iterator[Wait]:
    places.workers[0] = carrier
    program = places.programs[0]
    stamp = make_template(1, GENERATION, program)
    tools: Any = SimpleNamespace(timers=places.timers)
    sources: Any = [SimpleNamespace(keeps_own=False)]
    transport = PlanTransport(places.links[0], stamp, places.judge)  # type: ignore[attr-defined]
    context = TaskContext(program, program.tasks[0], sources, None, tools, transport)
    return lent_task.run(context, carrier, INSTANCE, 2, on_answering)


@pytest.fixture
def two(closing: ExitStack) -> Any:
    places: Any = Places(compile_for(2, "ring", AllReduce(SUM), DType.FLOAT32))
    places.judged = []
    places.judge = lambda link, expected, got: not places.judged.append(got)
    closing.callback(places.close)
    for worker in places.workers:
        closing.callback(worker.close)
    return places


@pytest.mark.parametrize(
    "error, kind", [(0, LinkBroken), (errno.ECONNRESET, LinkBroken), (errno.ETIMEDOUT, LinkRefused)]
)
def test_a_link_that_breaks_is_the_peers(two: Any, error: int, kind: type[LinkBroken]) -> None:
    carrier = SilentCarrier()
    task = start_silent(two, carrier)
    next(task)
    assert two.links[0][1].is_lent
    carrier.order.answer = Answer(AnswerKind.BROKEN, 1, error, INSTANCE, bytes(64))
    with pytest.raises(kind) as caught:
        next(task)
    assert caught.value.peer == two.links[0][1].peer


def test_another_header_is_judged_and_left_on_the_link(two: Any) -> None:
    carrier, header = SilentCarrier(), bytes(range(64))
    task = start_silent(two, carrier)
    next(task)
    carrier.order.answer = Answer(AnswerKind.BROKEN, 1, errno.EPROTO, INSTANCE, header)
    [(never, _)] = next(task)
    assert not never.done  # type: ignore[union-attr]
    assert two.judged == [header] and two.links[0][1].read_header() == header


def test_a_carrier_that_does_not_answer_is_noticed_and_when_it_answers_again(two: Any) -> None:
    carrier = SilentCarrier()
    said: list[bool] = []
    task = start_silent(two, carrier, said.append)
    turns = [(True, True), *[(False, True)] * (lent_task.MOST_MISSED - 1), (False, False), (False, False), (True, True)]
    for is_answering, expected in turns:
        _, (later, _), (awaited, _) = next(task)
        assert awaited is two.links[0][1]
        two.poller.wait(two.timers.next_deadline)
        while not later.done:  # type: ignore[union-attr]
            two.poller.wait(two.timers.next_deadline)
        carrier.is_answering = is_answering
        next(task)
        assert said[-1] == expected


def test_a_rank_whose_carrier_refuses_is_let_go_after_a_while(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_task, "REFUSAL_SECONDS", 0.01)
    carrier = SilentCarrier()
    task = start_silent(two, carrier)
    next(task)
    carrier.order.answer = Answer(AnswerKind.REFUSED, 0, errno.EINVAL, INSTANCE, bytes(64))
    [(later, _)] = next(task)
    while not later.done:  # type: ignore[union-attr]
        two.poller.wait(two.timers.next_deadline)
    next(task)
    assert carrier.given_up == ["refused an order: EINVAL"]
