"""Plans carried out on numbers: right sums, the same bits everywhere, and one memory is enough for three buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from collectived_proto.all_reduce_spec import ALGORITHMS
from collectived_runtime.plan import catalog
from collectived_runtime.plan.moves import Buffer, FinishMove, RecvMove, SendMove, Span
from collectived_runtime.plan.wide_moves import CollectMove, NativeKind, NativeMove, WidePlan, WideRound

Array = NDArray[np.float32]
Memory = dict[Buffer, Array]
Operator = Callable[[Array, Array], Array]
HOSTS = ((0, 1, 2), (3,), (4, 5))
NAMES = sorted({*ALGORITHMS, *catalog.FLAT_ALGORITHMS})


def separate(mine: Array) -> Memory:
    return {
        Buffer.INPUT: mine.copy(),
        Buffer.SCRATCH: np.full_like(mine, 7e33),
        Buffer.OUTPUT: np.full_like(mine, 7e33),
    }


def shared(mine: Array) -> Memory:
    one = mine.copy()
    return dict.fromkeys(Buffer, one)


def carry_out(plans: Mapping[int, WidePlan], memories: Mapping[int, Memory], operator: Operator) -> None:
    """Every round: first all that is read, then all that is received, in the order of the plans."""
    for number in range(max(len(plan) for plan in plans.values())):
        current = {me: plan[number] if number < len(plan) else () for me, plan in plans.items()}
        sent: dict[tuple[int, int], list[Array]] = {}
        for me, moves in current.items():
            _read(me, moves, memories[me], sent)
        for me, moves in current.items():
            _receive(me, moves, memories, sent, operator)


def _read(me: int, moves: WideRound, memory: Memory, sent: dict[tuple[int, int], list[Array]]) -> None:
    for move in moves:
        if isinstance(move, FinishMove):
            at = slice(move.span.start, move.span.stop)
            memory[Buffer.OUTPUT][at] = memory[move.source][at]
    for move in moves:
        if isinstance(move, SendMove):
            sent.setdefault((me, move.peer), []).append(memory[move.source][move.span.start : move.span.stop].copy())


def _receive(
    me: int,
    moves: WideRound,
    memories: Mapping[int, Memory],
    sent: dict[tuple[int, int], list[Array]],
    operator: Operator,
) -> None:
    memory = memories[me]
    for move in moves:
        at = slice(move.span.start, move.span.stop)
        match move:
            case RecvMove(peer, _, target, fold):
                value = sent[peer, me].pop(0)
                if fold is not None:
                    mine = memory[fold.mine][at]
                    value = operator(value, mine) if fold.received_left else operator(mine, value)
                memory[target][at] = value
            case CollectMove(order, _, source):
                values = [memory[source][at] if peer == me else sent[peer, me].pop(0) for peer in order]
                memory[Buffer.SCRATCH][at] = left_to_right(values, operator)
            case NativeMove(NativeKind.BROADCAST, _, _, root):
                memory[Buffer.OUTPUT][at] = memories[root][Buffer.OUTPUT][at]
            case NativeMove(NativeKind.REDUCE, members, _, root) if root == me:
                memory[Buffer.SCRATCH][at] = left_to_right([memories[m][Buffer.INPUT][at] for m in members], operator)
            case NativeMove(NativeKind.ALL_REDUCE, members, _, _):
                # INPUT of the others is still theirs: with one memory for all buffers, the last of them writes for all.
                if me == members[-1]:
                    folded = left_to_right([memories[m][Buffer.INPUT][at] for m in members], operator)
                    for member in members:
                        memories[member][Buffer.SCRATCH][at] = folded


def left_to_right(values: list[Array], operator: Operator) -> Array:
    folded = values[0]
    for value in values[1:]:
        folded = operator(folded, value)
    return folded.copy()


def all_reduce(name: str, inputs: list[Array], operator: Operator, memory: Callable[[Array], Memory]) -> list[Array]:
    span = Span(0, len(inputs[0]))
    plans = {me: catalog.all_reduce(name, HOSTS, me, span) for me in range(6)}
    memories = {me: memory(inputs[me]) for me in range(6)}
    carry_out(plans, memories, operator)
    return [memories[me][Buffer.OUTPUT] for me in range(6)]


@pytest.mark.parametrize("count", (0, 1, 5, 64, 1001))
@pytest.mark.parametrize("memory", (separate, shared))
@pytest.mark.parametrize("name", NAMES)
def test_sums_are_right_with_three_buffers_and_with_one(
    name: str, memory: Callable[[Array], Memory], count: int
) -> None:
    inputs = [np.random.default_rng(me).standard_normal(count).astype(np.float32) for me in range(6)]
    results = all_reduce(name, inputs, np.add, memory)
    for result in results:
        np.testing.assert_allclose(result, np.sum(inputs, axis=0), rtol=1e-5, atol=1e-5)
        assert result.tobytes() == results[0].tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_every_time(name: str) -> None:
    inputs = [np.random.default_rng(me).standard_normal(1001).astype(np.float32) for me in range(6)]
    first, again = (all_reduce(name, inputs, np.add, separate)[0] for _ in range(2))
    assert first.tobytes() == again.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_that_tells_left_from_right_gives_the_same_bits_on_all_ranks(name: str) -> None:
    """Zeros of both signs and NaNs of different payload: what `max` and `+` make of them depends on their order."""

    def left_wins(left: Array, right: Array) -> Array:
        return np.where(left >= right, left, np.where(np.isnan(left), left, right))

    bits = np.array([0x00000000, 0x80000000, 0x7FC00001, 0x7FC00002, 0xFFC00003, 0x3F800000], np.uint32)
    inputs = [np.resize(np.roll(bits, me), 65).view(np.float32) for me in range(6)]
    results = all_reduce(name, inputs, left_wins, separate)
    assert len({result.tobytes() for result in results}) == 1
