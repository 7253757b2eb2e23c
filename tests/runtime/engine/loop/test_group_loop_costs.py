"""What a collective costs, counted rather than timed: messages, waits, bytes moved and copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.runtime.engine.conftest import SLOT, World

from collectived_proto.ipc import messages
from collectived_proto.types import AllGather, Broadcast, Tier
from collectived_runtime.engine.loop.group_loop import GroupLoop
from collectived_runtime.transport.frame import HEADER_BYTES

ROUNDS = 50


class CountingPoll:
    """A poll that counts how often its group loop has gone to sleep, or looked without anything being there."""

    def __init__(self, poll: Any) -> None:
        self._poll = poll
        self.waits = 0

    def poll(self, timeout: float | None = None) -> Any:
        self.waits += 1
        return self._poll.poll(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poll, name)


def counted(group_loop: GroupLoop) -> CountingPoll:
    counting = CountingPoll(group_loop._poller._poll)
    group_loop._poller._poll = counting  # type: ignore[assignment]
    group_loop._poller._spin.budget = 0.0  # looking again and again would be counted too
    return counting


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_small_all_reduce_on_one_worker_costs_one_message_each_way_and_at_most_one_wait_per_rank(
    world: Callable[..., World], ranks: int
) -> None:
    here = world(ranks)
    for rank in here.ranks:
        rank.submit()
    for rank in here.ranks:
        rank.done()
    waits = counted(here.group_loops[0])
    heard = 0
    for _ in range(ROUNDS):
        for rank in here.ranks:
            rank.submit()
        for rank in here.ranks:
            message = rank.doorbell.recv(messages.MAX_MESSAGE)
            heard += 1
            assert messages.parse_done(message).is_last
            rank.doorbell.send(messages.encode_release((messages.parse_done(message).slot,)))
    assert heard == ROUNDS * ranks
    assert waits.waits <= ROUNDS * 2 * ranks + 2  # a wait per ring and one per release, which here come apart


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_large_all_reduce_on_one_worker_reads_each_byte_once_and_copies_none(
    world: Callable[..., World], ranks: int
) -> None:
    here = world(ranks)
    values = np.ones(SLOT // 4, np.float32)
    for _ in range(3):
        for rank in here.ranks:
            rank.submit(values)
        for rank in here.ranks:
            rank.doorbell.send(messages.encode_release((rank.done().slot,)))
    counters = here.group_loops[0].counters
    assert counters.folded_bytes == 3 * ranks * values.nbytes
    assert counters.copied_bytes == 0


def test_what_is_gathered_is_copied_once(world: Callable[..., World]) -> None:
    here = world(2)
    for rank in here.ranks:
        rank.submit(np.ones(1000, np.float32), operation=AllGather())
    for rank in here.ranks:
        rank.done()
    assert here.group_loops[0].counters.copied_bytes == 2 * 4000


def test_results_of_one_size_need_no_new_memory(world: Callable[..., World]) -> None:
    here = world(2)
    budget = here.group_loops[0]._worker.resources.budget
    used = set()
    for _ in range(ROUNDS):
        for rank in here.ranks:
            rank.submit()
        for rank in here.ranks:
            rank.doorbell.send(messages.encode_release((rank.done().slot,)))
        used.add(budget.used)
    assert len(used) == 1


@pytest.mark.parametrize(("workers", "algorithm"), [(2, "ring"), (3, "ring"), (4, "halving_doubling"), (4, "tree")])
def test_an_all_reduce_between_workers_moves_what_its_algorithm_promises(
    world: Callable[..., World], workers: int, algorithm: str
) -> None:
    here = world(*[1] * workers, table=(Tier(algorithm),))
    values = np.ones(12_000, np.float32)
    for rank in here.ranks:
        rank.submit(values)
    for rank in here.ranks:
        rank.done()
    sent = [group_loop.traffic()[0] for group_loop in here.group_loops]
    if algorithm == "tree":  # up and down, in all
        assert sum(sent) == 2 * (workers - 1) * (values.nbytes + HEADER_BYTES)
        return
    share = 2 * (workers - 1) * values.nbytes // workers
    rounds = 2 * (workers - 1) if algorithm == "ring" else 2 * (workers - 1).bit_length()
    assert sent == [share + rounds * HEADER_BYTES] * workers


def test_a_broadcast_between_workers_sends_its_value_to_each_once(world: Callable[..., World]) -> None:
    here = world(1, 1, 1)
    values = np.ones(12_000, np.float32)
    for rank in here.ranks:
        rank.submit(values, operation=Broadcast(0))
    for rank in here.ranks:
        rank.done()
    assert (
        2 * values.nbytes
        <= sum(group_loop.traffic()[0] for group_loop in here.group_loops)
        <= 2 * (values.nbytes + 1024)
    )
