"""Memory for values that come over gRPC: it is of the worker's budget, and is used again."""

from __future__ import annotations

import numpy as np
import pytest

from collectived_proto.ipc import messages
from collectived_runtime.engine.base.memory_budget import MemoryBudget, MemoryExhausted, SessionBudget
from collectived_runtime.worker.remote_ranks.uploads import MAX_SPARE_BYTES, NO_UPLOAD, Uploads


def test_what_is_taken_counts_and_what_is_closed_does_not() -> None:
    budget = MemoryBudget(1 << 20)
    uploads = Uploads(budget)
    first, memory = uploads.acquire(1000)
    second, _ = uploads.acquire(5000)
    assert first != second and memory.nbytes >= 1000
    assert budget.used == uploads.nbytes == 4096 + 8192
    uploads.close()
    uploads.close()
    assert budget.used == uploads.nbytes == 0


def test_memory_that_was_given_back_serves_the_next_upload_of_about_that_size() -> None:
    budget = MemoryBudget(1 << 30)
    uploads = Uploads(budget)
    number, memory = uploads.acquire(100_000)
    uploads.release(number)
    uploads.release(number)
    again, same = uploads.acquire(90_000)
    assert same is memory and again != number
    uploads.release(again)
    _, small = uploads.acquire(10)
    assert small is not memory, "a small value does not hold a large piece"


def test_the_rank_that_asks_for_too_much_is_refused_and_its_spares_go_first() -> None:
    budget = MemoryBudget(100 << 10)
    uploads = Uploads(budget)
    number, _ = uploads.acquire(60 << 10)
    with pytest.raises(MemoryExhausted, match="would exceed the worker's 102400 bytes"):
        uploads.acquire(60 << 10)
    uploads.release(number)
    assert budget.used == 60 << 10, "kept for later"
    uploads.acquire(96 << 10)
    assert budget.used == 96 << 10


def test_what_one_rank_keeps_for_later_is_there_for_another_and_nobody_met_a_limit() -> None:
    refused: list[str] = []
    whole = MemoryBudget(100 << 10, lambda: refused.append("worker"))
    idle, busy = [Uploads(SessionBudget(whole, 80 << 10, lambda: refused.append("session"))) for _ in range(2)]
    number, _ = idle.acquire(60 << 10)
    idle.release(number)
    assert whole.used == 60 << 10, "kept for later"
    number, _ = busy.acquire(72 << 10)
    assert (idle.nbytes, whole.used, refused) == (0, 72 << 10, [])
    busy.release(number)
    whole.acquire(96 << 10)  # of anybody else, in a group loop for instance
    assert (busy.nbytes, whole.used, refused) == (0, 96 << 10, [])
    with pytest.raises(MemoryExhausted, match="would exceed the worker's"):
        idle.acquire(8 << 10)
    assert refused == ["worker"], "once, where it was so"
    idle.close()
    assert whole._shrinkers == [busy._drop_spares]


def test_a_session_s_own_share_is_not_met_by_what_it_only_keeps_for_later() -> None:
    refused: list[int] = []
    share = SessionBudget(MemoryBudget(1 << 20), 80 << 10, lambda: refused.append(1))
    uploads = Uploads(share)
    number, _ = uploads.acquire(60 << 10)
    uploads.release(number)
    uploads.acquire(72 << 10)
    assert not refused and share.used == 72 << 10


def test_a_rank_that_is_idle_keeps_nothing_and_one_that_is_not_does() -> None:
    kept: list[int] = []
    budget = MemoryBudget(1 << 20)
    uploads = Uploads(budget, lambda: kept.append(1))
    for _ in range(2):
        uploads.release(uploads.acquire(4096)[0])
        assert uploads.release_idle() and budget.used == 4096, "just now it was used"
    assert len(kept) == 2
    assert not uploads.release_idle() and budget.used == 0


def test_no_more_than_so_much_is_kept() -> None:
    budget = MemoryBudget(1 << 30)
    uploads = Uploads(budget)
    for number, _ in [uploads.acquire(MAX_SPARE_BYTES // 2) for _ in range(4)]:
        uploads.release(number)
    assert budget.used == MAX_SPARE_BYTES


def test_addresses_are_checked() -> None:
    uploads = Uploads(MemoryBudget(1 << 20))
    number, memory = uploads.acquire(4096)
    memory[:] = np.arange(4096) % 251
    assert uploads.resolve_memory(number, 3, 4).tolist() == [3, 4, 5, 6]
    assert uploads.resolve_memory(NO_UPLOAD, 0, 1 << 40).nbytes == 0, "nobody reads it"
    for wrong in ((number, 4000, 97), (number + 1, 0, 1)):
        with pytest.raises(messages.MalformedMessage, match="which are not there"):
            uploads.resolve_memory(*wrong)
