"""Communicators of two workers over a NCCL of our own: made together, given up, aborted, and bounded in time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.nccl import FakeNccl

from collectived_runtime.device.nccl.communicators import (
    Communicator,
    Communicators,
    DeviceRank,
    PendingCommunicators,
)
from collectived_runtime.device.nccl.interface import (
    NcclBuffers,
    NcclDataType,
    NcclError,
    NcclOperation,
    NcclRemoteError,
)

PATIENCE = 10.0


class Worker:
    def __init__(self, nccl: FakeNccl, within: float = 5.0) -> None:
        self.nccl = nccl
        self.used: list[int] = []
        self.died: queue.Queue[str] = queue.Queue()
        self.woken = threading.Event()
        self.communicators = Communicators(nccl, self.used.append, self.died.put, within)

    def mint(self) -> bytes:
        errand = self.communicators.create_unique_id(0, self.woken.set)
        assert errand.wait(PATIENCE) and self.woken.wait(PATIENCE)
        minted: bytes = errand.result
        return minted

    def make(self, size: int, unique_id: bytes, *ranks: DeviceRank) -> PendingCommunicators:
        return self.communicators.create(size, unique_id, ranks, self.woken.set)


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(*paths: Path, within: float = 5.0, **options: Any) -> Worker:
        made.append(Worker(FakeNccl(*paths, **options), within))
        return made[-1]

    yield make
    for one in made:
        one.communicators.close()
        one.nccl.close()


def until(fact: Callable[[], object]) -> None:
    while not fact():
        threading.Event().wait(0.001)


def both(one: Worker, other: Worker) -> tuple[Communicator, Communicator]:
    """A communicator of two workers with one GPU each."""
    unique_id = one.mint()
    makings = one.make(2, unique_id, DeviceRank(0, 0)), other.make(2, unique_id, DeviceRank(0, 1))
    until(lambda: all(making.done for making in makings))
    (first,), (second,) = (making.result() for making in makings)
    return first, second


def summed(communicator: Communicator, values: Any) -> Any:
    source, target = np.array(values, np.float32), np.zeros(len(values), np.float32)
    communicator.issue(
        lambda handle: communicator.nccl.all_reduce(
            NcclBuffers(source.ctypes.data, target.ctypes.data, len(source), NcclDataType.FLOAT32),
            NcclOperation.SUM,
            handle,
            0,
        )
    )
    return target.tolist()


@pytest.mark.parametrize("blocking", [False, True])
def test_two_workers_make_a_communicator_and_sum_over_it(worker: Callable[..., Worker], blocking: bool) -> None:
    one, other = worker(blocking=blocking), worker(blocking=blocking)
    first, second = both(one, other)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(summed(second, [10, 20])))
    thread.start()
    assert summed(first, [1, 2]) == [11, 22]
    thread.join(PATIENCE)
    assert found == [[11, 22]]
    assert one.used == [0]  # the GPU was made current in the thread that made it


def test_a_worker_with_two_gpus_makes_one_end_for_each(worker: Callable[..., Worker]) -> None:
    one = worker()
    making = one.make(2, one.mint(), DeviceRank(0, 0), DeviceRank(1, 1))
    until(lambda: making.done)
    assert [end.device for end in making.result()] == [0, 1]
    assert sorted(one.used) == [0, 1]


def test_while_a_rank_is_missing_it_is_not_done_and_can_be_given_up(worker: Callable[..., Worker]) -> None:
    one = worker()
    making = one.make(2, one.mint(), DeviceRank(0, 0))
    until(lambda: one.nccl.inits)
    assert not making.done
    making.cancel()
    until(lambda: making.done and one.nccl.freed == [("abort", 0)])
    with pytest.raises(NcclError, match="not all of 2 ranks have come"):
        making.result()
    assert one.died.empty()


def test_an_init_that_blocks_for_ever_ends_the_worker_only_after_it_was_given_up(
    worker: Callable[..., Worker],
) -> None:
    one = worker(blocking=True, within=0.2)
    unique_id = one.mint()
    making = one.make(2, unique_id, DeviceRank(0, 0))
    until(lambda: one.nccl.inits)
    making.cancel()
    assert "the init of a communicator of 2 ranks on GPU 0 has not ended within 0.2 s" in one.died.get(timeout=PATIENCE)
    other = worker(blocking=True)  # so that it ends here
    late = other.make(2, unique_id, DeviceRank(0, 1))
    until(lambda: late.done and one.nccl.freed == [("abort", 0)])


def test_an_init_that_was_given_up_before_its_turn_never_begins(worker: Callable[..., Worker]) -> None:
    one = worker()
    first = one.make(2, one.mint(), DeviceRank(0, 0))
    until(lambda: one.nccl.inits)
    second = one.make(2, b"any".ljust(128), DeviceRank(0, 0))
    second.cancel()
    first.cancel()
    until(lambda: second.done)
    with pytest.raises(NcclError, match="given up before it began"):
        second.result()
    assert one.nccl.inits == [0]


def test_an_init_that_comes_late_is_aborted(worker: Callable[..., Worker], tmp_path: Path) -> None:
    one, other = worker(blocking=True), worker(blocking=True)
    unique_id = one.mint()
    making = one.make(2, unique_id, DeviceRank(0, 0))
    until(lambda: one.nccl.inits)
    making.cancel()
    other.make(2, unique_id, DeviceRank(0, 1))
    until(lambda: one.nccl.freed == [("abort", 0)])
    assert one.died.empty()


def test_where_one_gpu_fails_nothing_is_left_of_the_others(worker: Callable[..., Worker]) -> None:
    one = worker()
    making = one.make(2, b"\0nobody listens here".ljust(128), DeviceRank(0, 0), DeviceRank(1, 1))
    until(lambda: making.done)
    with pytest.raises(NcclRemoteError):
        making.result()


def test_what_is_kept_is_found_until_it_is_ended(worker: Callable[..., Worker]) -> None:
    one, other = worker(), worker()
    ends = both(one, other)
    one.communicators.store("group", ends[:1])
    assert one.communicators.get("group") == ends[:1]
    (errand,) = one.communicators.tear_down("group", orderly=True)
    assert errand.wait(PATIENCE) and one.nccl.freed == [("destroy", 0)]
    assert one.communicators.get("group") is None and one.communicators.tear_down("group", orderly=True) == []


def test_an_abort_ends_a_call_that_waits_for_a_rank(worker: Callable[..., Worker]) -> None:
    one, other = worker(), worker()
    ends = both(one, other)
    one.communicators.store("group", ends[:1])
    failed: list[BaseException] = []

    def call() -> None:
        try:
            summed(ends[0], [1, 2])
        except NcclError as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: one.nccl.calls)
    one.communicators.tear_down("group", orderly=False)
    thread.join(PATIENCE)
    assert "has been aborted" in str(failed[0])
    until(lambda: one.nccl.freed == [("abort", 0)])
    with pytest.raises(NcclError, match="has been aborted"):  # and nobody uses it any more
        summed(ends[0], [1, 2])


def test_a_rank_that_is_gone_is_a_remote_error_elsewhere(worker: Callable[..., Worker]) -> None:
    one, other = worker(), worker()
    first, second = both(one, other)
    other.nccl.abort(second.handle)
    with pytest.raises(NcclRemoteError):
        summed(first, [1, 2])


def test_an_abort_that_hangs_ends_the_worker_within_its_bound(worker: Callable[..., Worker], tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    one, other = worker(tmp_path / "no", hold, within=0.2), worker()
    one.communicators.store("group", both(one, other)[:1])
    hold.touch()
    one.communicators.tear_down("group", orderly=False)
    assert one.died.get(timeout=PATIENCE) == "the abort of a communicator on GPU 0 has not ended within 0.2 s"
    hold.unlink()


def test_an_abort_does_not_wait_for_an_init_of_another_group(worker: Callable[..., Worker]) -> None:
    one, other = worker(), worker()
    one.communicators.store("group", both(one, other)[:1])
    waiting = one.make(2, one.mint(), DeviceRank(0, 0))
    (errand,) = one.communicators.tear_down("group", orderly=False)
    assert errand.wait(PATIENCE) and not waiting.done
    waiting.cancel()
