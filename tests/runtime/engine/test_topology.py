"""What a topology knows of its ranks, and how often it looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.gpu.fake_cuda import FakeCuda
from tests.gpu.fake_nccl import FakeNccl

from collectived_proto.devices import DeviceName
from collectived_proto.types import GroupInfo, Member, Peer, Tier
from collectived_runtime.device.nccl.communicators import Communicators
from collectived_runtime.engine.meeting import Engine
from collectived_runtime.engine.topology import Topology


def topology(*devices: tuple[int, str]) -> Topology:
    """Ranks on workers and devices."""
    members = tuple(
        Member(rank, f"/job:worker/replica:0/task:{task}/device:{device}", task, f"host{task}", 1)
        for rank, (task, device) in enumerate(devices)
    )
    ranks = {task: tuple(member.rank for member in members if member.worker == task) for task, _ in devices}
    peers = tuple(Peer(task, "i", f"host{task}", "127.0.0.1:1", local, 1) for task, local in ranks.items())
    return Topology.of(GroupInfo("g", 1, 1, members), peers, devices[0][0], (Tier("ring"),))


def test_gpus_are_numbered_by_place_and_index() -> None:
    found = topology((0, "GPU:1"), (3, "GPU:0"), (0, "GPU:0"), (0, "GPU:1"))
    assert found.gpus == ((0, 0), (0, 1), (1, 0)) and found.homes == (1, 0, 0, 1)
    assert [found.number_of(rank) for rank in range(4)] == [1, 2, 0, 1]
    assert [found.place_of(rank) for rank in range(4)] == [0, 1, 0, 0]
    assert found.on_gpus and not found.why_no_nccl


def test_a_rank_that_is_on_no_gpu_is_named() -> None:
    found = topology((0, "GPU:0"), (0, "CPU:3"))
    assert found.homes == (0, -1) and found.on_gpus
    assert "rank 1 is on" in found.why_no_nccl and "CPU:3" in found.why_no_nccl


@pytest.fixture
def natives() -> Iterator[list[Engine]]:
    cudas = [FakeCuda(1) for _ in range(2)]
    engines = [Engine(Communicators(FakeNccl(cuda=cuda), cuda.use, print), {}) for cuda in cudas]
    yield engines
    for engine in engines:
        engine.communicators.close()


def test_no_collective_reads_the_names_of_devices(
    world: Callable[..., Any], natives: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(1, 1, gpus=(0, 0), natives=natives)
    reads: list[str] = []
    read = DeviceName.parse

    def counted(text: str) -> DeviceName:
        reads.append(text)
        return read(text)

    for rank in here.ranks:
        rank.submit(np.ones(10, np.float32))
    assert all(rank.done().last for rank in here.ranks)
    monkeypatch.setattr(DeviceName, "parse", counted)
    for _ in range(3):
        for rank in here.ranks:
            rank.submit(np.ones(10, np.float32))
        assert all(rank.done().last for rank in here.ranks)
    assert not reads
