"""The account of a worker: what its lanes have counted, those that ended included.

Kept in the worker's event loop. Lanes that run are read without locks; what never shrinks must not be shown smaller
than it was, for a scraper would take that for a restart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from collectived_proto.types import shown_name
from collectived_runtime.engine.counters import Counters
from collectived_runtime.engine.lane import Lane
from collectived_runtime.metrics.labels import GroupNames


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


class Account:
    """See the module."""

    def __init__(self) -> None:
        self._names = GroupNames()
        self._labels: dict[Lane, str] = {}  # of lanes that run
        self._past = Counters()
        self._past_groups: dict[str, GroupTotal] = {}
        self._traffic: weakref.WeakKeyDictionary[Lane, tuple[int, int]] = weakref.WeakKeyDictionary()

    def began(self, lane: Lane) -> None:
        label, given_up = self._names.begin(shown_name(lane.topology.group.name))
        if given_up is not None:
            self._past_groups.pop(given_up, None)
        self._labels[lane] = label

    def ended(self, lane: Lane) -> None:
        """A lane will count nothing more."""
        label = self._labels.pop(lane, None)
        if label is None:
            return
        self._names.end(label)
        self._past.merge(lane.counters)
        self._past_groups.setdefault(label, GroupTotal()).add(lane.counters, self._traffic_of(lane))

    def sums(self, now: float) -> Iterator[Sum]:
        """What all lanes together have done, as of now: each item is the same sum with one lane more, the last one is
        whole. Between two of them others may go first; what begins or ends meanwhile changes nothing."""
        total = Sum()
        total.counters.merge(self._past)
        for label, past in self._past_groups.items():
            total.groups[label] = replace(past)
        for lane, label in list(self._labels.items()):
            total.counters.merge(lane.counters)
            total.groups.setdefault(label, GroupTotal()).add(lane.counters, self._traffic_of(lane))
            total.flights[label] = total.flights.get(label, Flight()) + flight(lane, now)
            total.lanes += 1
            yield total
        yield total

    def _traffic_of(self, lane: Lane) -> tuple[int, int]:
        """Bytes sent and received. While a lane changes its links some are not seen: never less than before."""
        before = self._traffic.get(lane, (0, 0))
        sent, received = lane.traffic()
        self._traffic[lane] = now = max(before[0], sent), max(before[1], received)
        return now


@dataclass(frozen=True, slots=True)
class Flight:
    """What is under way in the groups of one label: how much, how much of it stalls, the age of the oldest in seconds,
    and how many local ranks there are."""

    open: int = 0
    stalled: int = 0
    oldest: float = 0.0
    ranks: int = 0

    def __add__(self, other: Flight) -> Flight:
        return Flight(
            self.open + other.open,
            self.stalled + other.stalled,
            max(self.oldest, other.oldest),
            self.ranks + other.ranks,
        )


@dataclass(slots=True)
class Sum:
    """By label of groups, and of all; `lanes` run."""

    counters: Counters = field(default_factory=Counters)
    groups: dict[str, GroupTotal] = field(default_factory=dict)
    flights: dict[str, Flight] = field(default_factory=dict)
    lanes: int = 0


def flight(lane: Lane, now: float) -> Flight:
    ledger = lane.ledger
    ages = [now - instance.first.at for instance in ledger.open()]
    ages += [now - post.since for post in lane.posts]
    ranks = sum(not standing.gone for standing in list(ledger.standings.values()))
    if lane.topology.idle:
        return Flight(len(ages), ranks=ranks)
    return Flight(len(ages), sum(age > lane.stall_after for age in ages), max(ages, default=0.0), ranks)
