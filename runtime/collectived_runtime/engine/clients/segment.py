"""The segment of one generation: where the ranks of this worker carry out their collectives themselves."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from collectived_native import core
from collectived_native.cores import count_cores
from collectived_native.segment import Geometry, Past, SeatState, Total
from collectived_proto.ipc import messages
from collectived_runtime.engine.base.arenas import UNEXPECTED_MEMORY_DIVISOR
from collectived_runtime.engine.base.lent import LentMemory
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.clients.segment_file import SegmentFile

NS = 1_000_000_000
MAX_SEATS = 256
_TICKS_AT_A_TIME = 4  # of a large value, whose parts lie in the segment
_ACROSS_BYTES = 1 << 20  # of a value that goes to other workers; of larger ones the rest counts when it is written
_MOST_ACROSS_BYTES = 4 << 20
_ACROSS_DIVISOR = 256  # of the worker's memory: what is not counted beforehand is little of it


def are_usable(topology: GroupTopology) -> bool:
    """Whether the ranks of this worker may meet in a segment: no GPUs, and not more of them than seats."""
    spans = len(topology.peers) > 1
    return not topology.has_gpus and 1 <= len(topology.own_ranks) <= MAX_SEATS - spans


def can_share(local_ranks: Iterable[LocalRank]) -> bool:
    """Whether these ranks can write one memory: all have shared memory with this worker, and are of one user."""
    ranks = list(local_ranks)
    uids = {local_rank.uid for local_rank in ranks}
    return len(uids) == 1 and None not in uids and all(one.takes_segment and one.holder is not None for one in ranks)


def measure_place(topology: GroupTopology) -> int:
    """Bytes that count of the session of each rank in a segment from the start."""
    is_operated = len(topology.peers) > 1
    seats = len(topology.own_ranks) + is_operated
    return _measure_place(Geometry.choose(seats, cores=count_cores(), operated=is_operated))


def _measure_place(geometry: Geometry) -> int:
    most_in_a_tick = min(geometry.small, _ACROSS_BYTES) if geometry.operated else geometry.seats * geometry.share
    return most_in_a_tick * _TICKS_AT_A_TIME


class GroupSegment:
    """Shared memory for the ranks of one generation, as its worker holds it.

    Args:
        budget: answers for its memory: for that of large values from the start, for what else is written once it is.
        on_knock: called when a rank has waited for a while, or this worker is rung.
        is_operated: whether this worker has a seat of its own, behind those of its ranks.

    Raises:
        MemoryExhausted: the budget does not allow it. OSError: there is no memory, or no descriptor, for it.
    """

    def __init__(
        self,
        local_ranks: Sequence[LocalRank],
        generation: int,
        start: int,
        poller: Poller,
        budget: MemoryBudget,
        on_knock: Callable[[], None],
        is_operated: bool = False,
    ) -> None:
        self.ranks = tuple(local_rank.rank for local_rank in local_ranks)
        self.seats = {rank: seat for seat, rank in enumerate(self.ranks)}
        self._generation = generation
        self._poller = poller
        self._on_knock = on_knock
        mail_bytes = 0 if is_operated else budget.limit // UNEXPECTED_MEMORY_DIVISOR // len(self.ranks)
        seats = len(self.ranks) + is_operated
        across = max(_ACROSS_BYTES, min(_MOST_ACROSS_BYTES, budget.limit // _ACROSS_DIVISOR))
        self._geometry = Geometry.choose(
            seats, cores=count_cores(), operated=is_operated, start=start, mail=mail_bytes, across=across
        )
        self._budget = budget
        allowance = _measure_place(self._geometry)
        self._prepaid = allowance * seats
        with contextlib.ExitStack() as undo:
            budget.acquire(self._prepaid, last=False)
            undo.callback(budget.release, self._prepaid)
            self._knocker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._knocker)
            self._file = SegmentFile(self._geometry)
            undo.callback(self._file.close)
            self.watcher: core.Watcher = self._file.watch()
            undo.pop_all()
        holders = [local_rank.holder for local_rank in local_ranks if local_rank.holder is not None]  # all
        self._measure_parts = partial(self._file.measure_parts, len(self.ranks))
        self._lent = LentMemory(self._file, holders, allowance, self._measure_parts)
        budget.lent.add(self._lent)
        poller.add(self._knocker, select.POLLIN, self._on_knocker)

    @property
    def knocker(self) -> int:
        """The descriptor by which this worker is rung."""
        return self._knocker

    @property
    def most_in_a_tick(self) -> int:
        """Bytes of a rank's value up to which one tick carries it all."""
        return self._geometry.small

    def take_seat(self) -> core.Engine:
        """Take the last seat, which is this worker's: others ring it by the knock."""
        seat = self._geometry.seats - 1
        return self._file.take_seat(seat, self._knocker)

    def reserve(self, nbytes: int) -> None:
        """Count memory that this worker takes for itself to serve its ranks, as long as the segment is there.

        Raises:
            MemoryExhausted: the budget does not allow it.
        """
        self._budget.acquire(nbytes, last=False)
        self._prepaid += nbytes

    def offer(self, local_rank: LocalRank, doorbells: Doorbells) -> None:
        """Send a rank the segment of its generation."""
        seat = self.seats[local_rank.rank]
        doorbells.send(local_rank, messages.encode_bare(messages.MessageType.KNOCKER), self._knocker)
        offered = messages.SegmentOffer(self._generation, seat, self._geometry.encode())
        doorbells.send(local_rank, offered.encode(), self._file.given)

    def charge(self) -> int | None:
        """Have what has been written of the memory since counted, and a session ended that has written too much.

        Returns:
            The rank that has written most, where the worker has not so much memory.
        """
        if not self._budget.lent.update(self._lent) or self._budget.used <= self._budget.limit:
            return None
        written = self._measure_parts()
        return self.ranks[written.index(max(written))]

    def read_seat(self, rank: int) -> SeatState:
        """Return what a rank has published; its process wrote it, so it is not to be trusted."""
        return SeatState(*self.watcher.seat(self.seats[rank]))

    def read_totals(self, rank: int) -> list[Total]:
        """Return what a rank has completed, by description; its process wrote it, so it is not to be trusted."""
        return [Total(*total) for total in self.watcher.totals(self.seats[rank])]

    def read_history(self, rank: int, first: int, last: int) -> list[Past]:
        """Return what a rank remembers of the instances from `first` to before `last`; not to be trusted either."""
        return [Past(*past) for past in self.watcher.history(self.seats[rank], first, last)]

    def _on_knocker(self, _: int) -> None:
        try:
            os.eventfd_read(self._knocker)
        except BlockingIOError:
            return
        self._on_knock()

    def close(self) -> None:
        """Let go of the memory; it counts until its ranks have let go of it too."""
        self._poller.remove(self._knocker)
        os.close(self._knocker)
        self.watcher.close()
        self._budget.release(self._prepaid)
        self._budget.lent.give_back(self._lent)
