"""The account of a worker: what its group loops have counted, those that ended included.

Kept in the worker's event loop. Group loops that run are read without locks; a count that never shrinks must not be
shown smaller than it was, for a scraper would take that for a restart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from collectived_proto.types import unscoped_name
from collectived_runtime.engine.loop.group_loop import GroupLoop
from collectived_runtime.engine.record.counters import Counters
from collectived_runtime.metrics.labels import GroupLabelAllocator


@dataclass(slots=True)
class GroupTotal:
    """Of all groups with one label."""

    done: int = 0
    failed: int = 0
    stalls: int = 0
    sent: int = 0
    received: int = 0

    def add(self, counters: Counters, traffic: tuple[int, int]) -> None:
        self.done += counters.done
        self.failed += counters.failed
        self.stalls += counters.stalls
        self.sent += traffic[0]
        self.received += traffic[1]


class LoopTotals:
    """See the module."""

    def __init__(self) -> None:
        self._label_allocator = GroupLabelAllocator()
        self._labels: dict[GroupLoop, str] = {}  # of group loops that run
        self._ended_totals = Counters()
        self._ended_groups: dict[str, GroupTotal] = {}
        self._traffic: weakref.WeakKeyDictionary[GroupLoop, tuple[int, int]] = weakref.WeakKeyDictionary()

    def add_loop(self, group_loop: GroupLoop) -> None:
        label, given_up = self._label_allocator.acquire(unscoped_name(group_loop.topology.group.name))
        if given_up is not None:
            self._ended_groups.pop(given_up, None)
        self._labels[group_loop] = label

    def remove_loop(self, group_loop: GroupLoop) -> None:
        """Add up a group loop that will count nothing more."""
        label = self._labels.pop(group_loop, None)
        if label is None:
            return
        self._label_allocator.release(label)
        self._ended_totals.merge(group_loop.counters)
        self._ended_groups.setdefault(label, GroupTotal()).add(group_loop.counters, self._update_traffic(group_loop))

    @property
    def group_loops(self) -> list[GroupLoop]:
        """Those that run."""
        return list(self._labels)

    def iterate_totals(self, now: float) -> Iterator[WorkerTotals]:
        """Sum up the work of all group loops, as of now.

        Each item is the same sum with one group loop more, the last one is whole. Between two of them others may go
        first; group loops that begin or end meanwhile change nothing.
        """
        total = WorkerTotals()
        total.counters.merge(self._ended_totals)
        for label, past in self._ended_groups.items():
            total.groups[label] = replace(past)
        for group_loop, label in list(self._labels.items()):
            total.counters.merge(group_loop.counters)
            total.groups.setdefault(label, GroupTotal()).add(group_loop.counters, self._update_traffic(group_loop))
            total.in_flight[label] = total.in_flight.get(label, InFlightTotals()) + compute_in_flight(group_loop, now)
            total.group_loops += 1
            yield total
        yield total

    def _update_traffic(self, group_loop: GroupLoop) -> tuple[int, int]:
        """Bytes sent and received. While a group loop changes its links some are not seen: never less than before."""
        before = self._traffic.get(group_loop, (0, 0))
        sent, received = group_loop.traffic()
        self._traffic[group_loop] = now = max(before[0], sent), max(before[1], received)
        return now


@dataclass(frozen=True, slots=True)
class InFlightTotals:
    """The work in flight in the groups of one label, and the number of local ranks there.

    It is counted in all, and by how much of it stalls; with the age of the oldest in seconds.
    """

    open: int = 0
    stalled: int = 0
    oldest: float = 0.0
    ranks: int = 0

    def __add__(self, other: InFlightTotals) -> InFlightTotals:
        return InFlightTotals(
            self.open + other.open,
            self.stalled + other.stalled,
            max(self.oldest, other.oldest),
            self.ranks + other.ranks,
        )


@dataclass(slots=True)
class WorkerTotals:
    """By label of groups, and of all; `group loops` run."""

    counters: Counters = field(default_factory=Counters)
    groups: dict[str, GroupTotal] = field(default_factory=dict)
    in_flight: dict[str, InFlightTotals] = field(default_factory=dict)
    group_loops: int = 0


def compute_in_flight(group_loop: GroupLoop, now: float) -> InFlightTotals:
    tracker = group_loop.tracker
    ages = [now - instance.first_arrival.arrived_at for instance in tracker.list_open()]
    ages += [now - post.submitted_at for post in group_loop.pending_ops]
    ranks = sum(not standing.has_departed for standing in list(tracker.progress.values()))
    if group_loop.topology.idle:
        return InFlightTotals(len(ages), ranks=ranks)
    return InFlightTotals(len(ages), sum(age > group_loop.stall_after for age in ages), max(ages, default=0.0), ranks)
