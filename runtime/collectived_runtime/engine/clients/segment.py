"""The segment of one generation: where the ranks of this worker carry out their collectives themselves."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterable, Sequence

from collectived_native import core, segment
from collectived_native.cores import count_cores
from collectived_native.segment import Geometry, Past, SeatState, Total
from collectived_proto.ipc import messages
from collectived_runtime.engine.base.arenas import UNEXPECTED_MEMORY_DIVISOR
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import LocalRank

NS = 1_000_000_000
MAX_SEATS = 256
_BLOCK_BYTES = 512  # of st_blocks
_TICKS_AT_A_TIME = 4  # of a large value, whose parts lie in the segment


def are_usable(topology: GroupTopology) -> bool:
    """Whether the ranks of a group may meet in a segment: all are of this worker, and on the host."""
    return len(topology.peers) == 1 and not topology.has_gpus and len(topology.own_ranks) <= MAX_SEATS


def can_share(local_ranks: Iterable[LocalRank]) -> bool:
    """Whether these ranks can write one memory: all have shared memory with this worker, and are of one user."""
    ranks = list(local_ranks)
    uids = {local_rank.uid for local_rank in ranks}
    return (
        len(uids) == 1 and None not in uids and all(one.takes_segment and one.completion_sink is None for one in ranks)
    )


class GroupSegment:
    """Shared memory for the ranks of one generation, as its worker holds it.

    Args:
        budget: answers for its memory: for that of large values from the start, for what else is written once it is.
        on_knock: called when a rank has waited for a while.

    Raises:
        MemoryExhausted: the budget does not allow it. OSError: there is no memory, or no descriptor, for it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        generation: int,
        start: int,
        poller: Poller,
        budget: MemoryBudget,
        on_knock: Callable[[], None],
    ) -> None:
        self.seats = {rank: seat for seat, rank in enumerate(ranks)}
        self.ranks = tuple(ranks)
        self._generation = generation
        self._poller = poller
        self._on_knock = on_knock
        mail_bytes = budget.limit // UNEXPECTED_MEMORY_DIVISOR // len(ranks)
        geometry = Geometry.choose(len(ranks), cores=count_cores(), start=start, mail=mail_bytes)
        self._geometry = geometry
        self._budget = budget
        self._charged = geometry.seats**2 * geometry.share * _TICKS_AT_A_TIME  # the rest as it is written
        budget.acquire(self._charged, last=False)
        self._knocker = self._memory = -1
        try:
            self._knocker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._memory = segment.create(self._geometry)
            self.watcher: core.Watcher = segment.watch(self._memory, self._geometry)
        except BaseException:
            self._let_go()
            raise
        poller.add(self._knocker, select.POLLIN, self._on_knocker)

    def offer(self, local_rank: LocalRank, doorbells: Doorbells) -> None:
        """Tell a rank where its generation meets."""
        seat = self.seats[local_rank.rank]
        doorbells.send(local_rank, messages.encode_bare(messages.MessageType.KNOCKER), self._knocker)
        offered = messages.SegmentOffer(self._generation, seat, self._geometry.encode())
        doorbells.send(local_rank, offered.encode(), self._memory)

    def charge(self) -> int | None:
        """Charge the budget with what has been written of the memory since.

        A member may write all of its own part, whatever the budget says. Where that is too much, the rank that has
        written most is returned.
        """
        grown = os.fstat(self._memory).st_blocks * _BLOCK_BYTES - self._charged
        if grown <= 0:
            return None
        self._budget.force_acquire(grown)
        self._charged += grown
        return self._find_largest_writer() if self._budget.used > self._budget.limit else None

    def _find_largest_writer(self) -> int:
        """Their parts lie one after the other, of equal size, and fill the memory but for a little at its start."""
        part = os.fstat(self._memory).st_size // len(self.ranks)
        written = [0] * len(self.ranks)
        end = 0
        with contextlib.suppress(OSError):  # there is no more data
            while True:
                start = os.lseek(self._memory, end, os.SEEK_DATA)
                end = os.lseek(self._memory, start, os.SEEK_HOLE)
                for seat in range(start // part, min(len(self.ranks), -(-end // part))):
                    written[seat] += min(end, (seat + 1) * part) - max(start, seat * part)
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
        """Let go of the memory; it is freed when its ranks have let go of it too."""
        self._poller.remove(self._knocker)
        self.watcher.close()
        self._let_go()

    def _let_go(self) -> None:
        self._budget.release(self._charged)
        for descriptor in (self._knocker, self._memory):
            if descriptor >= 0:
                os.close(descriptor)
