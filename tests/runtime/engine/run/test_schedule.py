"""Plans over the in-memory network, through the real executor: right sums, the same bits, nobody blocked."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.fakes.loopback import LoopbackNetwork

from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.engine.run.schedule import Buffers, PlanTransport, Wait, execute
from collectived_runtime.plan import double_tree, one_shot, ring, tree
from collectived_runtime.plan.moves import RecvMove, Span
from collectived_runtime.plan.wide_moves import WidePlan
from collectived_runtime.transport.frame import FrameTemplate, parse
from collectived_runtime.transport.link import Link, LinkBroken, Stream

Array = NDArray[Any]
Algorithm = Callable[[Sequence[int], int, Span], WidePlan]

STAMP = FrameTemplate(key=1, generation=2, instance=3, pack=0, shard=0, plan=b"planplan", chain=b"chainchn")
SUM = Arithmetic(ReduceOp.SUM, DType.FLOAT32, DType.FLOAT32, 1)


def sums(source: Array, scratch: Array, output: Array) -> Buffers:
    return Buffers(source, scratch, output, SUM.fold, SUM.finish, SUM.finish_in_place)


def never(link: Link, expected: bytes, got: bytes) -> bool:
    raise AssertionError(f"{parse(expected)} expected, {parse(got)} came")


def run_all(generators: dict[int, Iterator[Wait]]) -> None:
    """Steps everybody in turn until all have ended; fails where nobody can go on."""
    idle = 0
    while generators:
        for name, generator in list(generators.items()):
            try:
                idle = 0 if not next(generator) else idle + 1
            except StopIteration:
                del generators[name]
                idle = 0
        assert idle <= 2 * len(generators) + 2, f"stuck: {sorted(generators)} wait forever"


def all_reduce(algorithm: Algorithm, inputs: list[Array], capacity: int = 1 << 16) -> list[Array]:
    members = range(len(inputs))
    links = LoopbackNetwork(capacity).links(members)
    outputs = [np.full_like(one, np.nan) for one in inputs]
    generators = {}
    for me in members:
        plan = algorithm(members, me, Span(0, len(inputs[me])))
        buffers = sums(inputs[me], outputs[me], outputs[me])
        generators[me] = execute(plan, buffers, PlanTransport(links[me], STAMP, never))
    run_all(generators)
    return outputs


@pytest.mark.parametrize("algorithm", [ring.all_reduce, tree.all_reduce], ids=["ring", "tree"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 1001, 70_003])
def test_every_participant_ends_with_the_same_bits_of_the_right_sum(
    algorithm: Algorithm, size: int, count: int
) -> None:
    random = np.random.default_rng(size * 7 + count)
    inputs = [random.standard_normal(count, np.float32) for _ in range(size)]
    kept = [one.copy() for one in inputs]
    outputs = all_reduce(algorithm, inputs)
    exact = np.sum([one.astype(np.float64) for one in inputs], axis=0)
    bound = 1e-6 * np.sum([np.abs(one) for one in inputs], axis=0) + 1e-30
    assert np.all(np.abs(outputs[0] - exact) <= bound)
    for output in outputs[1:]:
        assert output.tobytes() == outputs[0].tobytes()
    for before, after in zip(kept, inputs, strict=True):
        assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("is_in_place", [True, False], ids=["partial sums over the input", "apart"])
@pytest.mark.parametrize("size", range(1, 6))
def test_one_shot_folds_from_left_to_right_wherever_its_memory_lies(size: int, is_in_place: bool) -> None:
    random = np.random.default_rng(size)
    inputs = [random.standard_normal(1001, np.float32) for _ in range(size)]
    wanted = inputs[0].copy()
    for one in inputs[1:]:
        wanted = wanted + one
    given, links = [one.copy() for one in inputs], LoopbackNetwork().links(range(size))
    outputs = [one if is_in_place else np.full_like(one, np.nan) for one in given]
    run_all(
        {
            me: execute(
                one_shot.all_reduce(range(size), me, Span(0, 1001)),
                sums(given[me], outputs[me], outputs[me]),
                PlanTransport(links[me], STAMP, never),
            )
            for me in range(size)
        }
    )
    assert [output.tobytes() for output in outputs] == [wanted.tobytes()] * size
    if not is_in_place:
        assert [one.tobytes() for one in given] == [one.tobytes() for one in inputs]


class Stuttering:
    """A stream that has nothing at every other look, as if bytes came between two looks."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._looks = 0
        self.min_read_bytes, self.fileno, self.send = stream.min_read_bytes, stream.fileno, stream.send
        self.close = stream.close

    def recv_into(self, view: memoryview) -> int:
        self._looks += 1
        return 0 if self._looks % 2 else self._stream.recv_into(view)


def test_of_several_transfers_on_a_link_in_a_round_each_waits_for_the_one_before() -> None:
    members, span = range(2), Span(0, 70_003)
    plans = [double_tree.all_reduce(members, me, span) for me in members]
    received = [[move.peer for move in moves if isinstance(move, RecvMove)] for moves in plans[0]]
    assert any(len(peers) > len(set(peers)) for peers in received), "a plan that has several"
    inputs = [np.arange(70_003, dtype=np.float32) % 97 + rank for rank in members]
    outputs = [np.full_like(one, np.nan) for one in inputs]
    links = LoopbackNetwork().links(members)
    for link in (link for theirs in links.values() for link in theirs.values()):
        link.stream = Stuttering(link.stream)
    run_all(
        {
            me: execute(plans[me], sums(inputs[me], outputs[me], outputs[me]), PlanTransport(links[me], STAMP, never))
            for me in members
        }
    )
    for output in outputs:
        assert np.array_equal(output, inputs[0] + inputs[1])


def test_buffers_of_a_few_bytes_in_between_do_not_dead_lock_full_duplex() -> None:
    inputs = [np.arange(10_000, dtype=np.float32) for _ in range(3)]
    outputs = all_reduce(ring.all_reduce, inputs, capacity=100)
    assert np.array_equal(outputs[2], 3 * inputs[0])


def test_a_missing_partner_is_waited_for_without_spinning() -> None:
    links = LoopbackNetwork().links(range(2))
    data = np.ones(4, np.float32)
    plan = ring.all_reduce(range(2), 0, Span(0, 4))
    generator = execute(plan, sums(data, data.copy(), data.copy()), PlanTransport(links[0], STAMP, never))
    waits = [next(generator) for _ in range(4)]
    assert waits[-1] == [(links[0][1], select.POLLIN)]


def test_a_peer_that_ends_breaks_the_plan_and_is_named() -> None:
    links = LoopbackNetwork().links(range(2))
    links[1][0].close()
    data = np.ones(4, np.float32)
    plan = tree.all_reduce(range(2), 0, Span(0, 4))
    generator = execute(plan, sums(data, data.copy(), data.copy()), PlanTransport(links[0], STAMP, never))
    with pytest.raises(LinkBroken) as caught:
        list(generator)
    assert caught.value.peer == 1


def test_a_frame_of_another_contract_is_judged_before_anything_is_folded() -> None:
    links = LoopbackNetwork().links(range(2))
    data = np.ones(4, np.float32)
    output = np.zeros(4, np.float32)
    other = FrameTemplate(1, 2, 3, 0, 0, b"planplan", b"DIFFERS!")
    links[1][0].send([other.header(0, 0, 16), data.tobytes()])
    seen = []

    def judge(link: Link, expected: bytes, got: bytes) -> bool:
        seen.append((parse(expected).chain, parse(got).chain))
        return True

    plan = tree.all_reduce(range(2), 0, Span(0, 4))
    generator = execute(plan, sums(data, output, output), PlanTransport(links[0], STAMP, judge))
    wait = next(generator)
    assert wait == [(links[0][1], select.POLLIN)]
    assert seen == [(b"chainchn", b"DIFFERS!")]
    assert not output.any()


def test_a_send_that_stands_midway_marks_its_link() -> None:
    links = LoopbackNetwork(capacity=80).links(range(2))
    data = np.ones(100, np.float32)
    plan = tree.all_reduce(range(2), 1, Span(0, 100))
    generator = execute(plan, sums(data, data.copy(), data.copy()), PlanTransport(links[1], STAMP, never))
    next(generator)
    assert links[1][0].is_mid_send
