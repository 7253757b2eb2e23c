"""Ranks that go on in stream order, through real group loops on fake devices: what they are told, and when."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.cuda import FakeCuda
from tests.runtime.engine.conftest import wait_for
from tests.runtime.engine.gpu.test_gpu_task import Party

from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.types import AllReduce, ReduceOp
from collectived_runtime.engine.gpu.stream_order import MOST_EVENTS

SUM = AllReduce(ReduceOp.SUM)
Make = Callable[..., Party]


class HeldAtTheEnd(FakeCuda):
    """One that stops where a result is copied to the device."""

    def __init__(self, hold: Path) -> None:
        super().__init__(1, hold)
        self._at = hold

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if any(one.address <= target < one.address + one.size for one in self._memory.values()):
            self._at.touch()
        super().copy(target, source, nbytes, stream)


class SlowToOpen(FakeCuda):
    """One whose driver opens events when it may."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asked, self.may = threading.Event(), threading.Event()

    def open_event(self, device: int, handle: bytes) -> int:
        self.asked.set()
        assert self.may.wait(20)
        return super().open_event(device, handle)


@pytest.fixture
def party(world: Callable[..., Any]) -> Iterator[Make]:
    made: list[Party] = []

    def make(hosts: tuple[int, ...], cudas: list[FakeCuda]) -> Party:
        made.append(Party(world(*hosts), (0,) * sum(hosts), cudas))
        return made[-1]

    yield make
    for one in made:
        one.close()


def launched(ranks: Party, rank: int) -> messages.Launched:
    """What the rank hears next."""
    heard: messages.Launched = ranks.world.ranks[rank].hear_launched()
    return heard


def all_reduce(ranks: Party, rank: int = 0, ordered: bool = True, event: int = 0) -> None:
    ranks.submit(rank, [np.full(100, rank + 1, np.float32)], SUM, ordered=ordered, event=event)


def test_a_rank_that_asks_is_told_of_an_event_while_the_device_is_at_it(party: Make, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    ranks = party((2,), [FakeCuda(1, hold)])
    hold.touch()
    all_reduce(ranks, 0)
    all_reduce(ranks, 1, ordered=False)
    heard, client = launched(ranks, 0), FakeClientCuda()
    assert heard.instance == 0
    client.wait_event(0, client.open_event(0, heard.handle), 1)
    assert client.under_way(1)
    hold.unlink()
    client.synchronize(0, 1)
    assert (ranks.memory(0, 2 << 20, 400).view(np.float32) == 3).all(), "behind the event all is there"
    for one in ranks.world.ranks:
        assert one.done().is_last
    assert not ranks.world.ranks[1].launched, "who does not ask is not told"


def test_what_passes_by_the_host_is_launched_with_its_last_copy(party: Make, tmp_path: Path) -> None:
    holds = [tmp_path / "0", tmp_path / "1"]
    ranks = party((1, 1), [HeldAtTheEnd(hold) for hold in holds])
    all_reduce(ranks, 0)
    all_reduce(ranks, 1)
    for rank in range(2):
        assert launched(ranks, rank).instance == 0
        assert holds[rank].exists(), "the device is not through"
    for hold in holds:
        hold.unlink()
    for rank in range(2):
        assert (ranks.result(rank, np.float32, 100, ranks.world.ranks[rank].done()) == 3).all()


def test_nobody_else_waits_while_the_driver_opens_an_event(party: Make) -> None:
    cuda = SlowToOpen()
    ranks = party((2,), [cuda])
    one, other = ranks.world.ranks
    event, handle = FakeClientCuda().create_event(0)
    one.doorbell.send(messages.encode_event(1, handle))
    all_reduce(ranks, 0, ordered=False, event=1)
    all_reduce(ranks, 1, ordered=False)
    assert cuda.asked.wait(10)
    other.doorbell.send(messages.encode_bare(messages.MessageType.PING))
    other.pong()  # the group loop goes on
    cuda.may.set()
    for number, rank in enumerate((one, other)):
        assert (ranks.result(number, np.float32, 100, rank.done()) == 3).all()
    os.close(event)


def test_an_event_whose_rank_has_gone_while_it_was_opened_is_ended(party: Make) -> None:
    cuda = SlowToOpen()
    ranks = party((1,), [cuda])
    event, handle = FakeClientCuda().create_event(0)
    ranks.world.ranks[0].doorbell.send(messages.encode_event(1, handle))
    all_reduce(ranks, event=1)
    assert cuda.asked.wait(10)
    ranks.world.ranks[0].doorbell.close()
    wait_for(lambda: ranks.world.group_loops[0].local_ranks[0].closed)
    cuda.may.set()
    ended = threading.Event()
    ranks.gpus[0].destroy_event(ranks.gpus[0].open_event(handle, lambda: None))
    ranks.gpus[0].open_event(handle, ended.set)  # behind those
    assert ended.wait(10)
    wait_for(lambda: len(cuda._opened) == 1)
    os.close(event)


def test_an_event_is_recorded_again_only_when_it_has_been_given_back(party: Make, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    ranks = party((1,), [FakeCuda(1, hold)])
    one, seen = ranks.world.ranks[0], []
    for _ in range(MOST_EVENTS):
        hold.touch()
        all_reduce(ranks)
        seen.append(launched(ranks, 0).event)
        hold.unlink()
        one.done()
    assert len(set(seen)) == MOST_EVENTS
    all_reduce(ranks)
    one.done()
    assert not one.launched, "it has none left, and hears when it is done"
    one.doorbell.send(messages.encode_release((seen[3], seen[3], messages.WORKER_EVENT_BASE + 1000)))
    hold.touch()
    all_reduce(ranks)
    assert launched(ranks, 0).event == seen[3]
    hold.unlink()
    one.done()


def test_after_its_end_nobody_is_told_that_an_instance_is_launched(party: Make, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    ranks = party((1,), [FakeCuda(1, hold)])
    one = ranks.world.ranks[0]
    hold.touch()
    all_reduce(ranks)
    heard = launched(ranks, 0)
    ranks.world.rule(ranks.world.verdict(Code.DEADLINE_EXCEEDED))
    hold.unlink()
    assert one.failed()[0] == heard.instance
    assert not one.launched


def test_events_end_with_their_rank_and_not_before_they_are_over(party: Make, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    cuda = FakeCuda(1, hold)
    ranks = party((1,), [cuda])
    hold.touch()
    all_reduce(ranks)
    client, heard = FakeClientCuda(), launched(ranks, 0)
    client.wait_event(0, client.open_event(0, heard.handle), 1)
    ranks.world.ranks[0].doorbell.close()
    wait_for(lambda: ranks.world.group_loops[0].local_ranks[0].closed)
    assert cuda.shared_events == 1, "somebody may wait for it"
    hold.unlink()
    wait_for(lambda: cuda.shared_events == 0)
    assert not client.under_way(1)
