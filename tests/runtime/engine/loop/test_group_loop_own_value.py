"""Ranks that need no result, or have said only what is to come: what is copied for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.runtime.engine.conftest import World

from collectived_proto.ipc import messages
from collectived_proto.ipc.result_header import OWN_ROWS
from collectived_proto.types import AllGather, AllReduce, AllToAll, Broadcast, Gather, Operation, ReduceOp, Scatter

VALUES = np.arange(3000, dtype=np.float32)


def slots_of(here: World, worker: int) -> int:
    return len(here.group_loops[worker]._results._slots)


@pytest.mark.parametrize("hosts", [(1, 1), (1, 1, 1), (1,)])
def test_the_root_of_a_broadcast_needs_no_result(world: Callable[..., World], hosts: tuple[int, ...]) -> None:
    here = world(*hosts)
    root, *others = here.ranks
    root.submit(VALUES, operation=Broadcast(0), keeps_own=True)
    for rank in others:
        rank.submit(VALUES, operation=Broadcast(0), omitted=True)
    done = root.done()
    assert done.is_last and not done.has_result
    for rank in others:
        assert np.array_equal(rank.result(rank.done(), count=3000), VALUES)
    assert slots_of(here, 0) == 0
    assert all(group_loop.counters.copied_bytes == 0 for group_loop in here.group_loops)


def test_others_of_its_worker_read_the_result_all_the_same(world: Callable[..., World]) -> None:
    here = world(2, 1)
    root, neighbour, far = here.ranks
    root.submit(VALUES, operation=Broadcast(0), keeps_own=True)
    for rank in (neighbour, far):
        rank.submit(np.zeros_like(VALUES), operation=Broadcast(0), omitted=True)
    assert not root.done().has_result
    for rank in (neighbour, far):
        done = rank.done()
        assert np.array_equal(rank.result(done, count=3000), VALUES)
        rank.doorbell.send(messages.encode_release((done.slot,)))
    root.submit(VALUES, operation=Broadcast(1), omitted=True)
    neighbour.submit(VALUES, operation=Broadcast(1))
    far.submit(VALUES, operation=Broadcast(1), omitted=True)
    assert all(np.array_equal(rank.result(rank.done(), count=3000), VALUES) for rank in here.ranks)
    assert slots_of(here, 0) == slots_of(here, 1) == 1, "nobody held the first result any more"


def test_only_the_root_can_do_without(world: Callable[..., World]) -> None:
    here = world(1, 1)
    root, other = here.ranks
    root.submit(VALUES, operation=Broadcast(0))
    other.submit(VALUES, operation=Broadcast(0), keeps_own=True)
    assert root.done().has_result and other.done().has_result
    for rank in here.ranks:
        rank.submit(VALUES, operation=AllReduce(ReduceOp.SUM), keeps_own=True)
    assert all(rank.done().has_result for rank in here.ranks)


def test_who_gets_a_piece_need_not_say_where_its_template_lies(world: Callable[..., World]) -> None:
    here = world(1, 1)
    root, other = here.ranks
    root.submit(VALUES, operation=Scatter(0))
    other.submit(VALUES, operation=Scatter(0), omitted=True)
    assert [leaf.ravel().tolist() for leaf in other.outlined(other.done())] == [VALUES[1500:].tolist()]
    root.done()


def test_who_contributes_has_to_say_where(world: Callable[..., World]) -> None:
    here = world(1, 1)
    here.ranks[0].submit(VALUES, operation=Broadcast(0), omitted=True)
    report = here.reports.get(timeout=10)
    assert "0 addresses for 1 leaves" in report.text


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("operation", [AllGather(0), Gather(1), Scatter(1), AllToAll(0)], ids=str)
def test_rows_that_are_a_ranks_own_are_not_copied_for_it(
    world: Callable[..., World], operation: Operation, size: int
) -> None:
    here = world(*[1] * size)
    values = [VALUES + 10000 * rank for rank in range(size)]
    results = []
    for keeps in (False, True):
        for rank, value in zip(here.ranks, values, strict=True):
            rank.submit(value, operation=operation, keeps_own=keeps)
        done = [rank.done() for rank in here.ranks]
        copied = sum(group_loop.counters.copied_bytes for group_loop in here.group_loops)
        results.append([complete(here, *one) for one in zip(here.ranks, done, values, strict=True)])
        if not keeps:
            before = copied
    assert results[0] == results[1] and any(results[0])
    assert copied == before, "the rows that stay are left to the ranks"


def complete(here: World, rank: Any, done: messages.Completion, value: Any) -> list[float]:
    """A result with the rows of the rank's own value in it."""
    if not done.has_result:
        return []
    memory, outline = rank.outline(done)
    (pieces,) = outline.leaves
    found: list[float] = []
    for at, rows in pieces:
        data = value[at - OWN_ROWS :] if at & OWN_ROWS else np.frombuffer(memory[at : at + 4 * rows], np.float32)
        found += data[:rows].tolist()
    return found


def test_a_worker_of_several_ranks_copies_their_rows(world: Callable[..., World]) -> None:
    here = world(2, 1)
    for rank in here.ranks:
        rank.submit(VALUES, operation=AllGather(0), keeps_own=True)
    for rank, group_loop in zip(here.ranks[1:], here.group_loops, strict=True):
        _, outline = rank.outline(rank.done())
        assert bool(outline.leaves[0][-1][0] & OWN_ROWS) == (group_loop is here.group_loops[1])
