"""Arenas of results that clients keep: they count until the kernel says that nobody has them any more."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable

import pytest

from collectived_proto.ipc.arena import Arena
from collectived_runtime.engine.base.arenas import ResultArenas, new_arena
from collectived_runtime.engine.base.lent import LentMemory, MemoryHolder, MemoryUser
from collectived_runtime.engine.base.memory_budget import MemoryBudget, MemoryExhausted, SessionBudget

SIZE = 8 << 20
LIMIT = 1 << 30


class Clients:
    """Two sessions, and what was handed to them."""

    def __init__(self) -> None:
        self.worker = MemoryBudget(LIMIT)
        self.user = MemoryUser()
        self.sessions = [SessionBudget(self.worker, 2 * SIZE, user=self.user) for _ in range(2)]
        self.descriptors: list[int] = []
        self.results = ResultArenas(self.worker, self, lambda: None)

    def list_holders(self) -> list[MemoryHolder]:
        return list(self.sessions)

    def add_arena(self, arena: Arena) -> None:
        self.descriptors.append(os.dup(arena.shared_descriptor))

    def remove_arena(self, arena: Arena) -> None: ...

    def end_group(self) -> None:
        self.results.acquire(SIZE, [0])
        self.results.close()

    @property
    def retained(self) -> list[int]:
        self.worker.lent.settle()
        return [self.worker.used, *(session.lent_bytes for session in self.sessions)]


def keep_descriptor(descriptor: int) -> Callable[[], None]:
    return lambda: os.close(descriptor)


def keep_mapping(descriptor: int) -> Callable[[], None]:
    mapped = mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(descriptor)
    return mapped.close


def keep_unread_message(descriptor: int) -> Callable[[], None]:
    one, other = socket.socketpair(socket.AF_UNIX)
    socket.send_fds(one, [b"x"], [descriptor])
    os.close(descriptor)

    def drop() -> None:
        one.close()
        other.close()

    return drop


def keep_opened_again(descriptor: int) -> Callable[[], None]:
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    os.close(descriptor)
    return lambda: os.close(again)


@pytest.mark.parametrize("keep", [keep_descriptor, keep_mapping, keep_unread_message, keep_opened_again])
def test_what_clients_keep_counts_of_their_sessions_until_they_let_go(
    keep: Callable[[int], Callable[[], None]],
) -> None:
    clients = Clients()
    clients.results.acquire(SIZE, [0])
    drop = keep(clients.descriptors.pop())
    clients.results.close()
    assert clients.retained == [SIZE, SIZE // 2, SIZE // 2] and clients.worker.lent.retained_bytes == SIZE
    drop()
    assert clients.retained == [0] * 3 and clients.worker.lent.retained_bytes == 0


def test_what_nobody_keeps_is_given_back_at_once() -> None:
    clients = Clients()
    clients.results.acquire(SIZE, [0])
    os.close(clients.descriptors.pop())
    clients.results.close()
    assert clients.worker.used == 0


def test_what_processes_keep_after_their_sessions_counts_of_their_user() -> None:
    clients = Clients()
    clients.end_group()
    clients.sessions[0].close()
    assert clients.retained == [SIZE, 0, SIZE] and clients.user.orphaned_bytes == 0, "the other session may have it"
    clients.sessions[1].close()
    assert clients.retained == [SIZE, 0, 0]
    assert (clients.user.orphaned_bytes, clients.user.orphaned_count) == (SIZE, 1)
    again = SessionBudget(clients.worker, SIZE, user=clients.user)
    stranger = SessionBudget(clients.worker, SIZE, user=MemoryUser())
    stranger.acquire(SIZE)
    assert again.is_used_up_by_groups() and not stranger.is_used_up_by_groups()
    with pytest.raises(MemoryExhausted, match=f"0 are in use and {SIZE} by its groups, also by those that are over"):
        again.acquire(1)
    os.close(clients.descriptors.pop())
    again.acquire(SIZE)
    assert clients.retained[0] == 2 * SIZE and (clients.user.orphaned_bytes, clients.user.orphaned_count) == (0, 0)


def test_what_is_given_back_when_all_sessions_have_ended_counts_of_their_user_too() -> None:
    clients = Clients()
    for session in clients.sessions:
        session.close()
    clients.end_group()
    assert clients.retained == [SIZE, 0, 0] and clients.user.orphaned_bytes == SIZE
    os.close(clients.descriptors.pop())
    assert clients.retained == [0] * 3 and clients.user.orphaned_bytes == 0


def test_a_session_that_keeps_as_much_as_it_may_have_gets_nothing_more() -> None:
    clients = Clients()
    session = clients.sessions[0]
    clients.sessions[1].close()
    session.acquire(SIZE // 2)
    clients.end_group()
    with pytest.raises(
        MemoryExhausted, match=f"{SIZE // 2} are in use and {SIZE} by its groups, also by those that are over"
    ):
        session.acquire(SIZE)
    assert not session.is_used_up_by_groups()
    clients.results = ResultArenas(clients.worker, clients, lambda: None)
    clients.end_group()
    assert session.is_used_up_by_groups()
    for descriptor in clients.descriptors:
        os.close(descriptor)
    session.acquire(SIZE)
    assert not session.is_used_up_by_groups()


def test_where_nobody_can_say_who_has_it_the_living_sessions_are_taken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectived_proto.ipc.shared_file._reopen", lambda *_: -1)  # as without /proc
    clients = Clients()
    clients.end_group()
    os.close(clients.descriptors.pop())
    assert clients.retained == [SIZE, SIZE // 2, SIZE // 2]
    for session in clients.sessions:
        session.close()
    assert clients.retained == [0] * 3 and clients.user.orphaned_bytes == 0


def test_memory_that_nobody_keeps_any_more_is_found_before_anybody_is_refused() -> None:
    clients = Clients()
    clients.end_group()
    os.close(clients.descriptors.pop())
    clients.worker.acquire(LIMIT)


def test_memory_without_pages_is_looked_after_until_its_client_lets_go() -> None:
    worker = MemoryBudget(LIMIT)
    arena = new_arena(SIZE, readers_only=False)
    arena.commit(SIZE)
    kept = os.dup(arena.shared_descriptor)
    assert arena.discard()
    called: list[bool] = []
    worker.lent.on_kept = lambda: called.append(True)
    worker.lent.give_back(LentMemory(arena.detach(), [SessionBudget(worker, SIZE)]))
    assert called and worker.lent.has_retained and worker.lent.retained_bytes == 0
    os.close(kept)
    worker.lent.settle()
    assert not worker.lent.has_retained


def test_what_is_set_aside_for_a_place_counts_until_it_is_known() -> None:
    worker = MemoryBudget(LIMIT)
    session = SessionBudget(worker, 2 * SIZE)
    redeem = session.pledge(SIZE)
    with pytest.raises(MemoryExhausted, match=f"0 are in use and {SIZE} by its groups"):
        session.pledge(SIZE + 1)
    session.pledge(SIZE)
    assert session.is_used_up_by_groups() and worker.used == 0
    redeem()
    session.acquire(SIZE)
