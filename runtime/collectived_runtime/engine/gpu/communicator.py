"""The GPUs of a worker that meet in a communicator of NCCL, and in which order tasks are launched there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from collectived_runtime.device.gpus import Gpu
from collectived_runtime.device.nccl.communicators import Communicator, Communicators, DeviceRank
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.gpu.launch_queue import LaunchQueue, TicketKey


@dataclass(frozen=True, slots=True)
class NcclContext:
    """The tools with which a worker runs collectives of NCCL. `gpus` are by index.

    Work for several GPUs at the same time is given to all of them under `launch_lock`: two such works that came
    to two GPUs in different orders would wait for each other forever.
    """

    communicators: Communicators
    gpus: Mapping[int, Gpu]
    launch_queue: LaunchQueue = field(default_factory=LaunchQueue)
    launch_lock: threading.Lock = field(default_factory=threading.Lock)


def local_device_ranks(topology: GroupTopology) -> list[DeviceRank]:
    """This worker's part of the communicator of a group."""
    return [DeviceRank(gpu, number) for number, (place, gpu) in enumerate(topology.gpus) if place == topology.place]


def intra_worker_device_ranks(topology: GroupTopology) -> list[DeviceRank]:
    """All of a communicator of this worker's GPUs alone."""
    return [DeviceRank(one.device, number) for number, one in enumerate(local_device_ranks(topology))]


class LaunchOrder:
    """The order in which the tasks of one instance are launched: that of the program, on every worker."""

    def __init__(self, key: TicketKey, count: int, launch_queue: LaunchQueue, wake: Callable[[], object]) -> None:
        self.key = key
        self._count = count
        self._launch_queue = launch_queue
        self._wake = wake
        self._launched = 0

    def create_turn(self, number: int) -> LaunchTurn:
        """The turn for which task `number` of those that NCCL carries out waits."""
        return LaunchTurn(self, number)

    def is_next(self, number: int) -> bool:
        return self._launched == number

    def mark_launched(self) -> None:
        """One more has been."""
        self._launched += 1
        if self._launched == self._count:
            self.close()
        self._wake()

    def close(self) -> None:
        """Nothing more of this instance will be launched."""
        self._launch_queue.remove(self.key)


@dataclass(frozen=True, slots=True)
class LaunchTurn:
    """A task's turn in a `LaunchOrder`. `done` when it may be launched."""

    order: LaunchOrder
    number: int

    @property
    def done(self) -> bool:
        return self.order.is_next(self.number)


@dataclass(frozen=True, slots=True)
class LocalCommunicator:
    """The GPUs of this worker that meet in a communicator.

    Attributes:
        communicators: one per local GPU, whose ranks are `ranks`.
        abort: aborts the communicators.
    """

    nccl_context: NcclContext
    topology: GroupTopology
    ranks: Sequence[DeviceRank]
    communicators: Sequence[Communicator]
    abort: Callable[[], object]

    @property
    def has_one_rank_per_gpu(self) -> bool:
        """Whether every GPU of the group has one rank only."""
        return len(self.topology.gpus) == self.topology.group.size
