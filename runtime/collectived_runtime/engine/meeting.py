"""The GPUs of a worker that meet in a communicator of NCCL, and in which order strands are launched there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from collectived_runtime.device.gpus import Gpu
from collectived_runtime.device.nccl.communicators import Communicator, Communicators, Rank
from collectived_runtime.engine.shares import Share
from collectived_runtime.engine.tickets import Key, Turnstile
from collectived_runtime.engine.topology import Topology


@dataclass(frozen=True, slots=True)
class Engine:
    """What a worker carries collectives out with where NCCL does it. `gpus` are by index.

    What several GPUs are to do at the same time is given to all of them under `together`: two such things that came to
    two GPUs in different orders would wait for each other for ever.
    """

    communicators: Communicators
    gpus: Mapping[int, Gpu]
    turnstile: Turnstile = field(default_factory=Turnstile)
    together: threading.Lock = field(default_factory=threading.Lock)


def ranks_here(topology: Topology) -> list[Rank]:
    """This worker's part of the communicator of a group."""
    return [Rank(gpu, number) for number, (place, gpu) in enumerate(topology.gpus) if place == topology.place]


def ranks_inside(topology: Topology) -> list[Rank]:
    """All of a communicator of this worker's GPUs alone."""
    return [Rank(one.device, number) for number, one in enumerate(ranks_here(topology))]


class LaunchOrder:
    """Whose strands of one instance have been launched: they are launched in the order of the program, everywhere."""

    def __init__(self, key: Key, count: int, turnstile: Turnstile, wake: Callable[[], object]) -> None:
        self.key = key
        self._count = count
        self._turnstile = turnstile
        self._wake = wake
        self._launched = 0

    def turn(self, number: int) -> Turn:
        """What strand `number` of those that NCCL carries out waits for."""
        return Turn(self, number)

    def next_is(self, number: int) -> bool:
        return self._launched == number

    def launched(self) -> None:
        """One more has been."""
        self._launched += 1
        if self._launched == self._count:
            self.close()
        self._wake()

    def close(self) -> None:
        """Nothing more of this instance will be launched."""
        self._turnstile.over(self.key)


@dataclass(frozen=True, slots=True)
class Turn:
    """A strand's turn in a `LaunchOrder`. `done` when it may be launched."""

    order: LaunchOrder
    number: int

    @property
    def done(self) -> bool:
        return self.order.next_is(self.number)


@dataclass(frozen=True, slots=True)
class Meeting:
    """The GPUs of this worker that meet in a communicator.

    Attributes:
        communicators: one per local GPU, whose ranks are `ranks`.
        abort: aborts the communicators.
    """

    engine: Engine
    topology: Topology
    ranks: Sequence[Rank]
    communicators: Sequence[Communicator]
    abort: Callable[[], object]

    @property
    def single(self) -> bool:
        """Whether every GPU of the group has one rank only."""
        return len(self.topology.gpus) == self.topology.group.size

    def shares(self) -> list[Share]:
        gpus = self.engine.gpus
        pairs = zip(self.ranks, self.communicators, strict=True)
        return [Share(gpus[rank.device], communicator, rank.rank) for rank, communicator in pairs]

    def home(self, rank: int) -> int:
        """The GPU of a rank."""
        return self.topology.homes[rank]

    def number(self, rank: int) -> int:
        """The rank in the group's communicator of that rank's GPU."""
        return self.topology.number_of(rank)
