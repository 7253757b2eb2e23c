"""Instances that a group loop leaves to the native core: small ones that cross hosts, once they have done so before.

An instance that the ranks fold in their segment, and whose contract has been carried out here twice, has a *route*
(`run/routes.py`). While nothing else is open, the group loop waits within the native core, which carries such instances
itself (`native/.../crossing.h`). All that is not as before comes back here, and goes on as if the core had never been:

- what the core has completed is counted and recorded as a sum; the latest instances as they were;
- of an open one the links say what they have sent already, and give once more what they had received: the general
  executor begins it anew.

So deadlines, stalls, contracts that differ, faults and verdicts are where they were.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field

from collectived_native import core
from collectived_proto.rows import encode_rows, extract_rows
from collectived_proto.types import Broadcast, Collective, Scatter
from collectived_runtime.engine.base.memory_budget import MemoryExhausted
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.segment import NS
from collectived_runtime.engine.compile import negotiation
from collectived_runtime.engine.compile.program import CompiledCollective
from collectived_runtime.engine.failure.reporter import FaultReporter
from collectived_runtime.engine.failure.spanning_watch import SpanningWatch
from collectived_runtime.engine.loop.phases import Phases
from collectived_runtime.engine.loop.waiting_joiners import WaitingJoiners
from collectived_runtime.engine.record.flight_recorder import RECEIVE, SEND, STRAND
from collectived_runtime.engine.record.group_records import GroupRecords
from collectived_runtime.engine.run.links import Links
from collectived_runtime.engine.run.routes import (
    CHANNEL,
    Prelude,
    announce,
    compile_route,
    exchange,
    has_route,
    make_template,
    measure_route,
)
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.tracker import MAX_FINISHED, Arrival, Instance, InstanceTracker
from collectived_runtime.transport.frame import FrameTemplate
from collectived_runtime.transport.link import Link

_PATIENCE_NS = NS // 50  # after which it returns which ranks have come, and what is awaited
_REPEATS = 2  # of a contract, after which it has a route
_MOST_RESTS = 64
_TRANSFERS = core.MOVE_SEND, core.MOVE_RECEIVE, core.MOVE_KEEP
_MOST_CONTRACTS = 1024  # that are counted


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    program: CompiledCollective
    reference: PreparedCollective
    contract: bytes
    collective: Collective
    transfers: tuple[tuple[int, int, int], ...]  # the first: kind of mark, round, task of the peer


@dataclass(frozen=True, slots=True)
class CrossingContext:
    """The parts of a generation that its crossings need."""

    topology: GroupTopology
    generation: int
    tracker: InstanceTracker
    links: Links
    phases: Phases
    doorbells: Doorbells
    records: GroupRecords
    reporter: FaultReporter
    waiting_joiners: WaitingJoiners


@dataclass(slots=True, eq=False)
class Crossings:
    """The routes of one generation, and the core that carries them."""

    context: CrossingContext
    _core: core.Crossings | None = None
    _routes: list[_Route] = field(default_factory=list)
    # Contracts with their lengths, and how often they came until they had a route.
    _seen: dict[bytes | tuple[object, ...], int] = field(default_factory=dict)
    _reserved: int = 0  # bytes, for the largest of them
    _rests: int = 0  # instances that the general executor has yet to complete, for the core could not
    _next_rests: int = 1  # how many, should the core complete none before the next that it cannot

    def learn(self, instance: Instance, program: CompiledCollective, segment: SpanningWatch, is_brought: bool) -> None:
        """Take note of an instance that the general executor has completed; of its kind it may have been the last."""
        self._rests = max(0, self._rests - 1)
        form, topology = instance.form, self.context.topology
        count = self._seen.get(form, 0) + 1
        if count > _REPEATS or len(self._routes) >= core.MOST_ROUTES or not is_brought:
            return
        if len(self._seen) >= _MOST_CONTRACTS:
            self._seen.clear()
        self._seen[form] = count
        if count == _REPEATS and instance.reference is not None and has_route(program, len(topology.peers)):
            with contextlib.suppress(MemoryExhausted):  # then the general executor goes on with these
                self._reserve(measure_route(program), segment)
                self._add(instance, instance.reference, program, segment)

    def _reserve(self, nbytes: int, segment: SpanningWatch) -> None:
        if nbytes > self._reserved:  # routes share their memory
            segment.reserve(nbytes - self._reserved)
            self._reserved = nbytes

    def _add(
        self, instance: Instance, reference: PreparedCollective, program: CompiledCollective, segment: SpanningWatch
    ) -> None:
        template = make_template(self.context.topology.group.key, self.context.generation, program)
        seat = segment.seat
        if self._core is None:
            self._core = core.crossings(seat.engine, segment.knocker, _PATIENCE_NS, template.header(0, 0, 0))
        gathers, brings, shares = seat.get_plans(instance, program)
        blob, said = seat.encode_blob(instance), b""
        if instance.collective.lengths_differ:
            said = encode_rows(extract_rows(instance.collective))
        if len(blob) > core.MAX_BLOB:
            blob = b""
        share = shares[0] if shares else None  # of a value without arrays
        route = compile_route(program, template, self._make_prelude(instance, template), share)
        self._core.add(gathers, brings, instance.contract, route.terms, route.moves, route.constants, blob, said)
        peers, before = self.context.topology.peers, route.first_round
        transfers = tuple(
            (SEND if kind == core.MOVE_SEND else RECEIVE, number - before, peers[place].task)
            for kind, number, place, *_ in route.moves
            if kind in _TRANSFERS and number >= before
        )
        self._routes.append(_Route(program, reference, instance.contract, instance.collective, transfers))

    def _make_prelude(self, instance: Instance, template: FrameTemplate) -> Prelude:
        """The exchange of workers before the values, of an instance as this one."""
        operation, topology = instance.collective.operation, self.context.topology
        if instance.rows:
            return exchange(template, instance.collective, topology)
        if not isinstance(operation, (Broadcast, Scatter)):
            return Prelude()
        task = negotiation.compile_announcement(topology, operation.root)
        return announce(template, task, negotiation.encode_announcement(instance.collective))

    def are_ready(self, segment: SpanningWatch) -> bool:
        """Whether the group loop may wait within the core: nothing is open, decided or announced."""
        tracker, context = self.context.tracker, self.context
        return (
            self._core is not None
            and not self._rests
            and not (tracker.instances or tracker.verdicts or tracker.is_aborted)
            and tracker.promised_from == math.inf
            and not any(standing.has_departed for standing in tracker.progress.values())
            and context.waiting_joiners.is_idle
            and not context.reporter.is_awaiting_verdict
            and segment.is_idle
        )

    def wait(self, segment: SpanningWatch, polls: bytearray, seconds: float) -> list[tuple[int, int]]:
        """Wait for any of `polls`, for so many seconds (inf: forever), and carry meanwhile what has a route.

        Returns:
            The descriptors with events that are for others.
        """
        assert self._core is not None
        context = self.context
        tracker, lent = context.tracker, context.links.lend(CHANNEL)
        wires = tuple(
            (lent[place].stream.fileno(), lent[place].take_unread()) if place in lent else (-1, b"")
            for place in range(len(context.topology.peers))
        )
        timeout = -1 if seconds == math.inf else max(0, int(seconds * NS))
        events, following, chain, is_odd, is_open, states, totals, recent = self._core.run(
            tracker.next_number, context.phases.chain, wires, polls, timeout
        )
        self._next_rests = 1 if totals else self._next_rests
        if is_odd:
            self._rests = self._next_rests
            self._next_rests = min(2 * self._next_rests, _MOST_RESTS)
        for place, state in enumerate(states):
            if place in lent:
                _give_back(lent[place], state)
        if totals:
            context.phases.chain = chain
            self._take_in(following, totals, recent)
        segment.resume(is_late=is_odd == core.LATE)
        if not is_open:
            context.links.poll_idle()
        return events

    def _take_in(self, following: int, totals: list[core.RouteTotal], recent: list[core.RecentCrossing]) -> None:
        """Count and record what is complete, all instances before `following`."""
        context, now = self.context, time.monotonic()
        tracker, records = context.tracker, context.records
        ranks = tuple(tracker.progress)
        for number, calls, nanoseconds, uneven, waited in totals:
            route = self._routes[number]
            program = route.program
            records.record_crossings(
                calls, route.collective.operation, program.summary, program.load, nanoseconds / NS, uneven / NS, now
            )
            if program.arithmetic[0] is not None:
                records.counters.folded_bytes += (
                    calls * len(ranks) * sum(leaf.nbytes for leaf in route.collective.leaves)
                )
            seconds = {rank: each / NS for rank, each in zip(ranks, waited, strict=True)}
            tracker.add_waits(route.collective.operation, calls, seconds)
        done = [self._recall(one, ranks) for one in recent]
        for instance, told in zip(done, recent, strict=True):
            summary = self._routes[told[1]].program.summary
            records.recorder.record_completed(context.generation, instance, summary, told[3] / NS)
        tracker.take_finished(done[-MAX_FINISHED:], following, now)
        context.reporter.on_completed(following - 1)

    def _recall(self, told: core.RecentCrossing, ranks: tuple[int, ...]) -> Instance:
        number, route_number, started, ended, began, descriptions, done = told
        route = self._routes[route_number]
        local_ranks = self.context.doorbells.local_ranks
        instance = Instance(number, started=True, finished=True, started_at=started / NS, reference=route.reference)
        instance.describe(route.collective, route.contract)
        for at, rank, description in sorted(zip(began, ranks, descriptions, strict=True)):
            prepared = local_ranks[rank].prepared.get(description, route.reference)
            instance.arrivals[rank] = Arrival(prepared, None, min(at, started) / NS)
        task = route.program.tasks[0]
        times = zip(done[::2], done[1::2], strict=True)
        instance.marks = [
            (kind, task.pack_number, task.shard, round_, peer, began_at / NS, done_at / NS)
            for (kind, round_, peer), (began_at, done_at) in zip(route.transfers, times, strict=False)
        ]
        instance.marks.append((STRAND, task.pack_number, task.shard, 0, -1, started / NS, ended / NS))
        return instance

    def close(self) -> None:
        """Carry nothing more."""
        self._core = None


def _give_back(link: Link, state: core.WireState) -> None:
    sent, received, all_sent, all_received = state
    link.bytes_sent += all_sent
    link.bytes_received += all_received
    link.resume(received, sent)
