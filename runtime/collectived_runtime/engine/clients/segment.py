"""The segment of one generation: where the ranks of this worker carry out their collectives themselves."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable, Sequence

from collectived_native import core, segment
from collectived_native.segment import Geometry, SeatState, Total, count_cores
from collectived_proto.ipc import messages
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import LocalRank

NS = 1_000_000_000
MAX_SEATS = 256


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
        mail_bytes: which messages that nobody has asked for may take, of all ranks together.
        on_knock: called when a rank has waited for a while.

    Raises:
        OSError: there is no memory, or no descriptor, for it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        generation: int,
        start: int,
        mail_bytes: int,
        poller: Poller,
        on_knock: Callable[[], None],
    ) -> None:
        self.seats = {rank: seat for seat, rank in enumerate(ranks)}
        self.ranks = tuple(ranks)
        self._generation = generation
        self._poller = poller
        self._on_knock = on_knock
        self._geometry = Geometry.choose(len(ranks), cores=count_cores(), start=start, mail=mail_bytes // len(ranks))
        self._knocker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._memory = -1
        try:
            self._memory = segment.create(self._geometry)
            self.watcher: core.Watcher = segment.watch(self._memory, self._geometry)
        except BaseException:
            self._close_descriptors()
            raise
        poller.add(self._knocker, select.POLLIN, self._on_knocker)

    def offer(self, local_rank: LocalRank, doorbells: Doorbells) -> None:
        """Tell a rank where its generation meets."""
        seat = self.seats[local_rank.rank]
        doorbells.send(local_rank, messages.encode_bare(messages.MessageType.KNOCKER), self._knocker)
        offered = messages.SegmentOffer(self._generation, seat, self._geometry.encode())
        doorbells.send(local_rank, offered.encode(), self._memory)

    def read_seat(self, rank: int) -> SeatState:
        """Return what a rank has published; its process wrote it, so it is not to be trusted."""
        return SeatState(*self.watcher.seat(self.seats[rank]))

    def read_totals(self, rank: int) -> list[Total]:
        """Return what a rank has completed, by description; its process wrote it, so it is not to be trusted."""
        return [Total(*total) for total in self.watcher.totals(self.seats[rank])]

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
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in (self._knocker, self._memory):
            if descriptor >= 0:
                os.close(descriptor)
