"""What a topology knows of its ranks, and how often it looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.fakes.cuda import FakeCuda
from tests.fakes.nccl import FakeNccl

from collectived_proto.devices import DeviceName
from collectived_proto.types import GroupInfo, Member, Peer, Tier
from collectived_runtime.device.nccl.communicators import Communicators
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.gpu.communicator import NcclContext


def topology(*devices: tuple[int, str]) -> GroupTopology:
    """Ranks on workers and devices."""
    members = tuple(
        Member(rank, f"/job:worker/replica:0/task:{task}/device:{device}", task, f"host{task}", 1)
        for rank, (task, device) in enumerate(devices)
    )
    ranks = {task: tuple(member.rank for member in members if member.worker == task) for task, _ in devices}
    peers = tuple(Peer(task, "i", f"host{task}", "127.0.0.1:1", local, 1) for task, local in ranks.items())
    return GroupTopology.from_peers(GroupInfo("g", 1, 1, members), peers, devices[0][0], (Tier("ring"),))


def test_gpus_are_numbered_by_place_and_index() -> None:
    found = topology((0, "GPU:1"), (3, "GPU:0"), (0, "GPU:0"), (0, "GPU:1"))
    assert found.gpus == ((0, 0), (0, 1), (1, 0)) and found.gpu_indices == (1, 0, 0, 1)
    assert [found.gpu_number_of(rank) for rank in range(4)] == [1, 2, 0, 1]
    assert [found.place_of(rank) for rank in range(4)] == [0, 1, 0, 0]
    assert found.has_gpus and not found.nccl_unavailable_reason


def test_a_rank_that_is_on_no_gpu_is_named() -> None:
    found = topology((0, "GPU:0"), (0, "CPU:3"))
    assert found.gpu_indices == (0, -1) and found.has_gpus
    assert "rank 1 is on" in found.nccl_unavailable_reason and "CPU:3" in found.nccl_unavailable_reason


@pytest.fixture
def natives() -> Iterator[list[NcclContext]]:
    cudas = [FakeCuda(1) for _ in range(2)]
    engines = [NcclContext(Communicators(FakeNccl(cuda=cuda), cuda.set_device, print), {}) for cuda in cudas]
    yield engines
    for engine in engines:
        engine.communicators.close()


def test_no_collective_reads_the_names_of_devices(
    world: Callable[..., Any], natives: list[NcclContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(1, 1, gpus=(0, 0), natives=natives)
    reads: list[str] = []
    read = DeviceName.parse

    def counted(text: str) -> DeviceName:
        reads.append(text)
        return read(text)

    for rank in here.ranks:
        rank.submit(np.ones(10, np.float32))
    assert all(rank.done().is_last for rank in here.ranks)
    monkeypatch.setattr(DeviceName, "parse", counted)
    for _ in range(3):
        for rank in here.ranks:
            rank.submit(np.ones(10, np.float32))
        assert all(rank.done().is_last for rank in here.ranks)
    assert not reads
