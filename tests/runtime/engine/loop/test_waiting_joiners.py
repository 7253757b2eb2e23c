"""How many wait to join: all ranks hear of it with the same instance."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np

GENERATION = 100


def promises(here: Any) -> list[int]:
    """What each group loop promises, in order of group loops."""
    answers: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in here.group_loops]
    for group_loop, answer in zip(here.group_loops, answers, strict=True):
        group_loop.promise(GENERATION, answer.put)
    return [answer.get(timeout=10) for answer in answers]


def together(here: Any) -> list[int]:
    """One all-reduce of all ranks; how many wait as each of them knows then."""
    for rank in here.ranks:
        rank.submit(np.ones(4, np.float32))
    for rank in here.ranks:
        rank.done()
    return [rank.waiting for rank in here.ranks]


def test_the_number_changes_with_the_agreed_instance_on_all_ranks(world: Any) -> None:
    here = world(2, 1)
    together(here)
    agreed = max(promises(here))
    assert agreed == 1
    for group_loop in here.group_loops:
        group_loop.set_waiting_joiners(GENERATION, agreed + 1, 3)
    assert together(here) == [0, 0, 0]
    assert together(here) == [3, 3, 3]
    assert together(here) == [3, 3, 3]


def test_nothing_starts_beyond_a_promise_until_it_is_settled(world: Any) -> None:
    here = world(1, 1)
    assert promises(here) == [0, 0]
    for rank in here.ranks:
        rank.submit(np.ones(4, np.float32))
    here.group_loops[0].set_waiting_joiners(GENERATION, 0, 1)
    here.group_loops[1].set_waiting_joiners(GENERATION, 0, 1)
    for rank in here.ranks:
        rank.done()
        assert rank.waiting == 1


def test_a_promise_that_nobody_settles_is_kept_for_a_moment_only(world: Any) -> None:
    here = world(1, 1)
    promises(here)
    assert together(here) == [0, 0]


def test_one_that_is_withdrawn_changes_nothing(world: Any) -> None:
    here = world(1, 1)
    promises(here)
    for group_loop in here.group_loops:
        group_loop.set_waiting_joiners(GENERATION, -1, 7)
    assert together(here) == [0, 0]
