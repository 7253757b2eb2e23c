"""How a group loop takes part in agreeing when processes that wait to join are counted: see `core/scaling.py`."""

from __future__ import annotations

import time

from collectived_proto.ipc import messages
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.failure.segment_watch import SegmentWatch
from collectived_runtime.engine.submit.tracker import InstanceTracker

PROMISE_SECONDS = 0.5  # longer than the coordinator takes to make something of it


class WaitingJoiners:
    """The number of processes that wait to join the group, and its messages to the ranks of one generation."""

    def __init__(self, doorbells: Doorbells, tracker: InstanceTracker) -> None:
        self._doorbells = doorbells
        self._tracker = tracker
        self._scheduled: list[tuple[int, int]] = []  # from which instance on how many wait to join

    def promise(self) -> tuple[int, int]:
        """Start nothing from the returned instance on until `schedule` is called, or for half a second.

        Also returns the first instance that no local rank has submitted.
        """
        following = 1 + max(standing.received for standing in self._tracker.progress.values())
        return self._tracker.promise(time.monotonic() + PROMISE_SECONDS), following

    @property
    def is_idle(self) -> bool:
        """Whether ranks have got all numbers that were agreed."""
        return not self._scheduled

    def schedule(self, from_instance: int, waiting: int) -> None:
        """So many wait to join, as the ranks are to see with that instance; -1: nothing has changed."""
        self._tracker.release_promise()
        if from_instance >= 0:
            self._scheduled.append((from_instance, waiting))

    def send_due(self, number: int, segment: SegmentWatch | None) -> None:
        """Send ranks the number agreed for an instance before it runs, over the doorbell and in their segment."""
        while self._scheduled and self._scheduled[0][0] <= number:
            self._tracker.waiting_joiners = self._scheduled.pop(0)[1]
            message = messages.encode_waiting(self._tracker.waiting_joiners)
            for local_rank in self._doorbells.local_ranks.values():
                self._doorbells.send(local_rank, message)
        if segment is not None:
            segment.set_waiting(self._tracker.waiting_joiners)
