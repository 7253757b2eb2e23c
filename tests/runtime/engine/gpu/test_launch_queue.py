"""Launch tickets: every worker launches what it shares with others in the same order, whoever submits first."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from collectived_runtime.engine.gpu.launch_queue import LamportTickets, LaunchQueue, TicketKey

A, B, C = TicketKey(1, 1, 0), TicketKey(2, 1, 0), TicketKey(3, 1, 0)


class Simulated:
    """Workers that tell each other their proposals over a network which delivers in any order."""

    def __init__(self, groups: Mapping[TicketKey, Sequence[int]], chance: random.Random) -> None:
        self.groups = groups
        self.chance = chance
        self.workers = {worker: LamportTickets() for members in groups.values() for worker in members}
        self.launched: dict[int, list[TicketKey]] = {worker: [] for worker in self.workers}
        self.proposals: dict[TicketKey, dict[int, int]] = {key: {} for key in groups}
        self.steps = [("propose", key, worker) for key, members in groups.items() for worker in members]

    def run(self) -> None:
        while self.steps:
            what, key, worker = self.steps.pop(self.chance.randrange(len(self.steps)))
            tickets, members = self.workers[worker], self.groups[key]
            if what == "propose":
                self.proposals[key][worker] = tickets.propose(key)
                if len(self.proposals[key]) == len(members):
                    self.steps += [("settle", key, member) for member in members]
            else:
                tickets.settle(key, max(self.proposals[key].values()))
                while (turn := tickets.next_ready()) is not None:
                    self.launched[worker].append(turn)
                    tickets.remove(turn)


@pytest.mark.parametrize("seed", range(200))
def test_any_two_workers_launch_what_they_share_in_the_same_order(seed: int) -> None:
    chance = random.Random(seed)
    workers = range(chance.randint(2, 6))
    groups = {
        TicketKey(number, 1, 0): sorted(chance.sample(workers, chance.randint(2, len(workers))))
        for number in range(chance.randint(2, 8))
    }
    world = Simulated(groups, chance)
    world.run()
    for one, other in itertools.combinations(world.launched, 2):
        shared = set(world.launched[one]) & set(world.launched[other])
        orders = [[key for key in world.launched[worker] if key in shared] for worker in (one, other)]
        assert orders[0] == orders[1]
    for worker, launched in world.launched.items():
        assert sorted(launched) == sorted(key for key, members in groups.items() if worker in members)


def test_two_groups_over_two_workers_in_opposite_orders_are_launched_in_one() -> None:
    one, other = LamportTickets(), LamportTickets()
    proposed = {A: [one.propose(A)], B: [one.propose(B)]}
    proposed[B].append(other.propose(B))
    proposed[A].append(other.propose(A))
    assert proposed == {A: [1, 2], B: [2, 1]}
    other.settle(B, max(proposed[B]))
    one.settle(B, max(proposed[B]))
    assert one.next_ready() is None and other.next_ready() is None  # A may still come before it
    one.settle(A, max(proposed[A]))
    other.settle(A, max(proposed[A]))
    assert one.next_ready() == other.next_ready() == A  # equal tickets: the lower key
    for worker in (one, other):
        worker.remove(A)
        assert worker.next_ready() == B


def test_what_is_proposed_waits_for_nothing_that_comes_later() -> None:
    tickets = LamportTickets()
    tickets.settle(A, max(tickets.propose(A), 7))
    assert tickets.propose(B) == 8
    assert tickets.next_ready() == A


def test_a_collective_that_failed_holds_up_nobody() -> None:
    tickets = LamportTickets()
    tickets.propose(A)
    tickets.settle(B, tickets.propose(B))
    assert tickets.next_ready() is None
    tickets.remove(A)
    assert tickets.next_ready() == B


def test_a_turn_wakes_its_group_loop_when_it_has_come_and_once() -> None:
    stile, woken = LaunchQueue(), []
    first = stile.propose(A)
    second = stile.propose(B)
    later = stile.settle(B, second, lambda: woken.append(B))
    assert not later.done
    now = stile.settle(A, first, lambda: woken.append(A))
    assert now.done and not later.done and woken == [A]
    stile.remove(A)
    assert later.done and woken == [A, B]
    stile.propose(C)
    stile.remove(C)
    assert woken == [A, B]
