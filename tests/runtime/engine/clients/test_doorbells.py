"""Doorbells of local ranks, and ranks without one."""

from __future__ import annotations

import socket
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from collectived_proto.ipc import messages
from collectived_proto.ipc.arena import Arena
from collectived_proto.types import Member
from collectived_runtime.engine.base.arenas import new_arena
from collectived_runtime.engine.base.memory_budget import MemoryBudget, SessionBudget
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.limits.rejections import RejectionCounters


class Sink:
    """A rank's client without a doorbell."""

    def __init__(self) -> None:
        self.arenas: set[int] = set()

    def add_arena(self, arena: Arena) -> None:
        self.arenas.add(arena.number)

    def remove_arena(self, arena: Arena) -> None:
        self.arenas.discard(arena.number)

    def send(self, message: bytes) -> None:
        pass

    def close(self) -> None:
        pass


def no_memory(arena: int, offset: int, length: int) -> NDArray[np.uint8]:
    raise messages.MalformedMessage(f"arena {arena}")


def test_a_rank_without_a_doorbell_that_comes_later_knows_the_arenas_that_others_were_served_from() -> None:
    """Its first result may lie in one of them: ranks of a group join one after another."""
    poller, sink = Poller(), Sink()
    arenas = [new_arena(4096, readers_only=True) for _ in range(2)]
    doorbells = Doorbells(poller, lambda _rank, _message: None, lambda _rank, _why: None, RejectionCounters())
    try:
        doorbells.add(LocalRank(0, Member(0, "CPU:0", 0, "host0", 1), no_memory, -1, outlet=sink), arenas)
        assert sink.arenas == {arena.number for arena in arenas}
    finally:
        doorbells.close()
        poller.close()
        for arena in arenas:
            arena.close()


def test_sessions_that_have_ended_still_answer_for_arenas_that_they_were_handed() -> None:
    """They may end before their group gives its results back, and their processes keep them."""
    poller, budget = Poller(), SessionBudget(MemoryBudget(1 << 20), 1 << 20)
    doorbells = Doorbells(poller, lambda _rank, _message: None, lambda _rank, _why: None, RejectionCounters())
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(poller), closing(doorbells), there:
        doorbells.expect(LocalRank(0, Member(0, "CPU:0", 0, "host0", 1), no_memory, -1, holder=budget))
        doorbells.attach(0, here, [])
        budget.close()
        assert doorbells.list_holders() == [budget]
