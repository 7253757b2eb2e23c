"""Memory of results and scratch memory: reused, bounded, and given back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.runtime.engine.conftest import World, wait_for

from collectived_proto.ipc import messages
from collectived_proto.ipc.arena import Arena
from collectived_runtime.engine.base.arenas import KEPT_BYTES, ResultArenas, ResultSlot, Workspace
from collectived_runtime.engine.base.lent import MemoryHolder
from collectived_runtime.engine.base.memory_budget import MemoryBudget, MemoryExhausted

LARGE = 4 * KEPT_BYTES


class Readers:
    """Those who are told where results may lie."""

    def __init__(self) -> None:
        self.arenas: set[int] = set()

    def list_holders(self) -> list[MemoryHolder]:
        return []

    def add_arena(self, arena: Arena) -> None:
        self.arenas.add(arena.number)

    def remove_arena(self, arena: Arena) -> None:
        self.arenas.remove(arena.number)


@pytest.fixture
def make() -> Iterator[Callable[[int], tuple[ResultArenas, MemoryBudget, Readers]]]:
    made: list[ResultArenas] = []

    def results(limit: int) -> tuple[ResultArenas, MemoryBudget, Readers]:
        budget, readers = MemoryBudget(limit), Readers()
        made.append(ResultArenas(budget, readers, lambda: None))
        return made[-1], budget, readers

    yield results
    for one in made:
        one.close()


def free(results: ResultArenas, slot: ResultSlot) -> None:
    for rank in list(slot.holders):
        results.release(slot.number, rank)


def test_a_slot_that_is_free_again_is_taken_by_the_next_of_its_size(make: Any) -> None:
    results, budget, _ = make(1 << 30)
    first = results.acquire(LARGE, (0, 1))
    free(results, first)
    used = budget.used
    for _ in range(20):
        slot = results.acquire(LARGE, (0, 1))
        assert slot.memory.ctypes.data == first.memory.ctypes.data
        free(results, slot)
    assert budget.used == used


def test_a_late_release_of_a_slot_does_not_concern_its_next_use(make: Any) -> None:
    results, _, _ = make(1 << 30)
    slot = results.acquire(LARGE, (0, 1))
    old = slot.number
    assert results.is_held(old, 0) and not results.is_held(old, 2)
    free(results, slot)
    again = results.acquire(LARGE, (0,))
    assert again.offset == slot.offset and not results.is_held(old, 0)
    results.release(old, 0)
    assert results.is_held(again.number, 0)


def test_slots_of_ever_changing_sizes_do_not_use_more_and_more_memory(make: Any) -> None:
    results, budget, _ = make(1 << 30)
    for size in range(1, 300):
        free(results, results.acquire(size * 4096, (0,)))
    assert budget.used <= 64 << 20  # the first arena


def test_idle_memory_is_given_back_and_what_somebody_holds_is_not(make: Any) -> None:
    results, budget, readers = make(1 << 30)
    held = results.acquire(LARGE, (0,))
    assert results.trim() and readers.arenas == {held.arena.number}
    held.memory[:] = 1
    free(results, held)
    assert not results.trim()
    assert budget.used == 0 and readers.arenas == set()


def test_memory_that_lies_idle_is_given_back_before_anybody_is_refused(make: Any) -> None:
    results, budget, readers = make(40 << 20)
    small = results.acquire(30 << 20, (0,))  # its arena cannot hold the next one
    free(results, small)
    slot = results.acquire(39 << 20, (0,))
    assert readers.arenas == {slot.arena.number} and budget.used == 39 << 20
    with pytest.raises(MemoryExhausted):
        results.acquire(39 << 20, (0,))


def test_a_limit_that_idle_memory_mends_was_met_by_nobody_and_one_that_it_does_not_by_one() -> None:
    refused: list[int] = []
    results = ResultArenas(MemoryBudget(40 << 20, lambda: refused.append(1)), Readers(), lambda: None)
    free(results, results.acquire(30 << 20, (0,)))  # its arena cannot hold the next one
    results.acquire(39 << 20, (0,))
    assert not refused
    with pytest.raises(MemoryExhausted):
        results.acquire(39 << 20, (0,))
    assert refused == [1]
    results.close()


def test_scratch_memory_is_shared_under_a_name_and_reused_after_it() -> None:
    grown: list[int] = []
    workspace = Workspace(lambda: grown.append(1))
    workspace.acquire("a")
    workspace.acquire("a")
    one, same = workspace.get_buffer("a", 5000), workspace.get_buffer("a", 5000)
    assert one.ctypes.data == same.ctypes.data
    workspace.release("a")
    workspace.acquire("b")
    assert workspace.get_buffer("b", 5000).ctypes.data != one.ctypes.data  # somebody uses the first one still
    workspace.release("a")
    workspace.release("b")
    for name in range(100):
        workspace.acquire(name)
        workspace.get_buffer(name, 4000 + name)
        workspace.release(name)
    assert len(grown) == 2


def test_a_group_loop_that_is_idle_gives_its_memory_back_and_goes_on(world: Callable[..., World]) -> None:
    here = world(1, idle_after=0.02)
    rank, group_loop = here.ranks[0], here.group_loops[0]
    budget = group_loop._worker.resources.budget
    values = np.ones(KEPT_BYTES // 4, np.float32)  # two of them are worth giving back
    for _ in range(2):
        rank.submit(values)
        rank.submit(values)
        for done in (rank.done(), rank.done()):
            rank.doorbell.send(messages.encode_release((done.slot,)))
        wait_for(lambda: not budget.used)


def test_a_client_lets_go_of_an_arena_that_is_withdrawn() -> None:
    from collectived.shared.results import MappedResults as ClientResults
    from collectived_proto.ipc import arena as arenas

    made = arenas.create(7, 1 << 20, readers_only=True)
    results = ClientResults()
    try:
        results.add_arena(messages.encode_arena(messages.MessageType.ARENA, 7, 1 << 20), os.dup(made.descriptor))
        inode = os.fstat(made.descriptor).st_ino
        assert _maps(inode) == 2
        results.drop_arena(messages.encode_arena(messages.MessageType.ARENA_RETIRED, 7, 0))
        assert _maps(inode) == 1
    finally:
        made.close()


def _maps(inode: int) -> int:
    with open("/proc/self/maps") as maps:
        return sum(f" {inode} " in line for line in maps)


def test_a_large_result_lies_where_ranks_may_keep_it_and_the_one_before(make: Any) -> None:
    """Of the arena in which it lies a rank may keep a quarter."""
    results, _, _ = make(1 << 40)
    for megabytes in (1, 16, 64, 100):
        slot = results.acquire(megabytes << 20, (0,))
        assert 2 * slot.size <= slot.arena.size // 4
