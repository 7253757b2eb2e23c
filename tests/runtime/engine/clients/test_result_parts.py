"""Parts of results: who is told of which bytes, counted in messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.runtime.engine.conftest import SLOT, World, wait_for

from collectived_proto.ipc import messages
from collectived_proto.types import AllGather, AllReduce, AllToAll, Broadcast, Operation, ReduceOp
from collectived_runtime.engine.clients import result_parts
from collectived_runtime.engine.loop import context

VALUES = np.arange(SLOT // 8, dtype=np.float32)  # 512 KiB
PART = 64 << 10


@pytest.fixture(autouse=True)
def short_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_parts, "PART_BYTES", PART)
    monkeypatch.setattr(context, "MIN_RESULT_BYTES", 4 * PART)


@pytest.mark.parametrize("operation", [Broadcast(0), AllGather(), AllToAll(), AllReduce(ReduceOp.SUM)])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 1), (1, 1, 1)])
def test_parts_are_final_lie_apart_and_cost_a_message_per_part_at_most(
    world: Callable[..., World], operation: Operation, hosts: tuple[int, ...]
) -> None:
    here = world(*hosts)
    for rank in here.ranks:
        rank.submit(VALUES[: len(VALUES) // 6 * 6] + rank.rank, operation=operation, takes_parts=True)
    for rank in here.ranks:
        done = rank.done()
        assert done.has_result
        result = here.group_loop_of(rank.rank)._results._slots[done.slot]
        ranges = [(part.start, part.stop) for part in rank.parts]
        assert all((part.offset, part.slot) == (done.offset, done.slot) for part in rank.parts)
        assert ranges == sorted(ranges) or hosts != (1, 1)
        assert sum(stop - start for start, stop in ranges) == len({at for r in ranges for at in range(*r)})
        assert len(ranges) <= result.size // PART
        for part in rank.parts:
            assert part.stop <= result.size - (done.offset - result.offset)
        assert all(PART <= stop - start < 2 * PART for start, stop in ranges)
        moved = VALUES.nbytes if isinstance(operation, Broadcast) else VALUES.nbytes // len(hosts)
        if rank.rank == len(here.ranks) - 1:
            assert sum(stop - start for start, stop in ranges) > moved - 2 * PART


def test_who_did_not_ask_hears_of_the_end_alone(world: Callable[..., World]) -> None:
    here = world(1, 1)
    for rank in here.ranks:
        rank.submit(VALUES, operation=Broadcast(0))
    for rank in here.ranks:
        assert np.array_equal(rank.result(rank.done(), count=len(VALUES)), VALUES)
        assert not rank.parts


def test_short_results_and_those_of_one_worker_come_whole(world: Callable[..., World]) -> None:
    for here in (world(1, 1), world(2)):
        values = VALUES[: PART // 4] if len(here.group_loops) > 1 else VALUES
        for rank in here.ranks:
            rank.submit(values, operation=Broadcast(0), takes_parts=True)
        for rank in here.ranks:
            rank.done()
            assert not rank.parts


def test_a_slot_of_which_parts_were_told_stays_until_its_rank_releases_it(world: Callable[..., World]) -> None:
    """The instance fails amid its result: the rank may be reading what it knows of."""
    here = world(1, 1, 1)
    receiver, group_loop = here.ranks[1], here.group_loops[1]
    for rank in here.ranks[:2]:
        rank.submit(VALUES, operation=AllToAll(), takes_parts=True)
    wait_for(lambda: group_loop.traffic()[1] > VALUES.nbytes // 3)
    here.rule(here.verdict(10))
    receiver.failed()
    (slot,) = {part.slot for part in receiver.parts}
    assert list(group_loop._results._slots) == [slot]
    receiver.doorbell.send(messages.encode_release((slot,)))
    wait_for(lambda: not group_loop._results._slots)
