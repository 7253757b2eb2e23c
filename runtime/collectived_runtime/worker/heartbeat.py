"""What the heartbeats of a worker tell beside that it lives: where its ranks stand, as far as that has changed.

When a worker is lost nobody can ask it any more: what its ranks last did is then known from here. Lanes are read
without locks, as for status.
"""

from __future__ import annotations

from collections.abc import Iterable

from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_runtime.engine.ledger import Ledger, Standing

MOST_RANKS = 256  # told by one heartbeat; others have their turn with the next

_Key = tuple[int, int]  # generation, rank
_Place = tuple[int, int, str, str]  # submitted, finished, operation, site


class Heartbeats:
    """Remembers what has been told on one stream to the coordinator."""

    def __init__(self) -> None:
        self._told: dict[_Key, _Place] = {}
        self._last: _Key = (0, 0)  # told last, where not all could be

    def forget(self) -> None:
        """Another stream has begun: its coordinator may not know what was told on the one before."""
        self._told.clear()

    def next(self, ledgers: Iterable[Ledger], now: float) -> pb.Heartbeat:
        """The next heartbeat: which local ranks have moved; at most `MOST_RANKS` of them, in turns.

        Args:
            ledgers: of the generations that run.
            now: the monotonic clock, in seconds.
        """
        standings = {
            (ledger.generation, rank): standing
            for ledger in ledgers
            for rank, standing in list(ledger.standings.items())
        }
        self._told = {key: place for key, place in self._told.items() if key in standings}
        moved = sorted(key for key, standing in standings.items() if self._told.get(key) != _place(standing))
        beat = pb.Heartbeat(more=len(moved) > MOST_RANKS)
        if beat.more:
            moved = [key for key in moved if key > self._last] + [key for key in moved if key <= self._last]
            moved = moved[:MOST_RANKS]
            self._last = moved[-1]
        said: dict[int, pb.Standings] = {}
        for generation, rank in moved:
            if generation not in said:
                said[generation] = beat.standings.add(generation=generation)
            standing = standings[generation, rank]
            submitted, finished, op, site = self._told[generation, rank] = _place(standing)
            said[generation].ranks.add(
                rank=rank,
                submitted=submitted,
                finished=finished,
                last_op=op,
                last_site=site,
                idle_seconds=now - standing.active_at,
                waits=standing.waits,
                waited_seconds=standing.waited,
            )
        return beat


def _place(standing: Standing) -> _Place:
    return standing.submitted, standing.finished, standing.op, standing.site
