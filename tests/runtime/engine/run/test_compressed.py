"""Compressed plans through the real executor: the same bits everywhere, within the bound that is promised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.fakes.loopback import LoopbackNetwork
from tests.runtime.engine.run.test_schedule import STAMP, never, run_all

from collectived_native import core
from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.engine.run import compressed
from collectived_runtime.engine.run.compressed import CompressedBuffers
from collectived_runtime.engine.run.schedule import PlanTransport, execute
from collectived_runtime.plan import ring, tree
from collectived_runtime.plan.catalog import ACROSS_ALGORITHMS
from collectived_runtime.plan.moves import SendMove, Span
from collectived_runtime.plan.wide_moves import WideRound

Array = NDArray[Any]
Planner = Callable[[Sequence[int], int, Span], Iterable[WideRound]]

BFLOAT16, FLOAT8, INT8 = FORMATS = (1, 2, 3)
BLOCK = core.BLOCK_VALUES
ALGORITHMS = pytest.mark.parametrize("name", sorted(ACROSS_ALGORITHMS))


def bound(format: int, inputs: list[Array], roundings: int) -> Array:
    """The largest error of each element of a sum that is rounded so many times on its way."""
    magnitude = np.sum([np.abs(one, dtype=np.float64) for one in inputs], axis=0)
    largest = magnitude.max(axis=1, keepdims=True)
    each: Array = {
        BFLOAT16: magnitude / 256,
        FLOAT8: np.maximum(magnitude / 16, largest / 448 / 1024),
        INT8: np.broadcast_to(largest / 254, magnitude.shape),
    }[format]
    return each * roundings * (1 + roundings / 16)  # what is rounded has been rounded before


def carry(
    make: Planner, format: int, inputs: list[Array], op: ReduceOp = ReduceOp.SUM, alias: bool = False
) -> list[Array]:
    """SCRATCH of each participant after its plan; `alias`: it is the memory of INPUT."""
    members = range(len(inputs))
    links = LoopbackNetwork(1 << 16).links(members)
    arithmetic = Arithmetic(op, DType.FLOAT32, DType.FLOAT32, len(inputs))
    results, running = [], {}
    for me in members:
        plan = tuple(make(members, me, Span(0, len(inputs[me]))))
        mine = inputs[me].copy()
        scratch = mine if alias else np.full_like(mine, np.nan)
        output = None
        if compressed._passes_output_on(plan):
            output = np.empty((len(mine), core.block_bytes(format)), np.uint8)
        memory = CompressedBuffers(format, mine, scratch, output, arithmetic)
        running[me] = execute(plan, memory, PlanTransport(links[me], STAMP, never))
        results.append(scratch)
    run_all(running)
    return results


def draw(size: int, blocks: int) -> list[Array]:
    random = np.random.default_rng(size * 100 + blocks)
    return [random.standard_normal((blocks, BLOCK)).astype(np.float32) * 10.0 ** (one % 3) for one in range(size)]


@ALGORITHMS
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [2, 3, 5, 7])
@pytest.mark.parametrize(("blocks", "alias"), [(1, False), (7, True), (2 * compressed.STRETCH_BLOCKS + 5, True)])
def test_all_have_the_same_bits_within_the_bound(name: str, format: int, size: int, blocks: int, alias: bool) -> None:
    inputs = [one.astype(np.float32) for one in draw(size, blocks)]
    results = carry(ACROSS_ALGORITHMS[name], format, inputs, alias=alias)
    assert len({one.tobytes() for one in results}) == 1
    exact = np.sum([one.astype(np.float64) for one in inputs], axis=0)
    assert np.all(np.abs(results[0] - exact) <= bound(format, inputs, size))


@ALGORITHMS
def test_a_mean_is_divided_once(name: str) -> None:
    inputs = draw(3, 6)
    results = carry(ACROSS_ALGORITHMS[name], INT8, inputs, ReduceOp.MEAN)
    exact = np.mean([one.astype(np.float64) for one in inputs], axis=0)
    assert len({one.tobytes() for one in results}) == 1
    assert np.all(np.abs(results[0] - exact) <= bound(INT8, inputs, 3) / 3)


@pytest.mark.parametrize("name", ["ring", "tree", "one_shot"])
@pytest.mark.parametrize("format", FORMATS)
def test_values_that_are_not_finite_come_to_all_and_spare_the_others(name: str, format: int) -> None:
    inputs = draw(3, 2)
    inputs[0][0, 5], inputs[1][0, 9], inputs[2][1, 7] = np.inf, np.nan, -np.inf
    results = carry(ACROSS_ALGORITHMS[name], format, inputs)
    assert len({one.tobytes() for one in results}) == 1
    assert results[0][0, 5] == np.inf and np.isnan(results[0][0, 9]) and results[0][1, 7] == -np.inf
    assert np.isfinite(results[0]).sum() == results[0].size - 3


def test_a_result_that_nobody_passes_on_is_not_rounded_again() -> None:
    inputs = draw(2, 4)
    part = np.empty((4, core.block_bytes(INT8)), np.uint8)
    sent = np.empty_like(inputs[1])
    core.compress(INT8, part, inputs[1])
    core.expand(INT8, sent, part)
    reduced = carry(lambda members, me, span: tree.reduce(members, me, span, 0), INT8, inputs)
    np.testing.assert_array_equal(reduced[0], inputs[0] + sent)
    scattered = carry(lambda members, me, span: ring.reduce_scatter(members, me, span.split(2)), INT8, inputs)
    np.testing.assert_array_equal(scattered[0][:2], (inputs[0] + sent)[:2])


def test_a_plan_of_nothing_ends() -> None:
    assert [len(one) for one in carry(ring.all_reduce, INT8, draw(3, 0))] == [0, 0, 0]


def test_fewer_bytes_travel() -> None:
    first, second = draw(2, 10)
    arithmetic = Arithmetic(ReduceOp.SUM, DType.FLOAT32, DType.FLOAT32, 2)
    memory = CompressedBuffers(INT8, first, second, np.empty((10, 132), np.uint8), arithmetic)
    sends = [
        move for moves in ring.all_reduce(range(2), 0, Span(0, 10)) for move in moves if isinstance(move, SendMove)
    ]
    sent = 0
    for move in sends:
        for batch in memory.read(move, [(b"", len(move.span) * memory.row_bytes(move.source))]):
            sent += sum(map(len, batch))
    assert sent == 10 * 132
