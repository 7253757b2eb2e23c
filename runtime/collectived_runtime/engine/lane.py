"""A lane: one thread per group generation and its successors, with one place where it waits.

That place is a `poll` over the doorbells and process descriptors of its members, the links of the group, and an eventfd
by which verdicts, links and requests of other threads arrive. Nothing else blocks: all sockets are non-blocking, and
what runs are generators (`strand.run`) that say what they wait for. So a lane is never deaf to a verdict, a death or a
stray frame, whatever else it does. What a lane decides by thinking is in `ledger.py`; here it acts.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from collectived_proto.codec import verdict_to_proto
from collectived_proto.errors import Code
from collectived_proto.local import wire
from collectived_proto.local.arena import Arena
from collectived_proto.types import CommunicationImplementation, GroupInfo, RankPosition, Report, ReportKind, Verdict

from collectived_runtime.engine import strand as strands
from collectived_runtime.engine.execute import Wait
from collectived_runtime.engine.ledger import Arrival, Instance, Ledger, OutOfTurn
from collectived_runtime.engine.links import Exchange, Links
from collectived_runtime.engine.program import Program, Strand, Topology, compose
from collectived_runtime.engine.results import Budget, Exhausted, Results, Slot, Workspace
from collectived_runtime.engine.running import Running
from collectived_runtime.engine.seat import NotReading, Seat
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link, LinkBroken

log = logging.getLogger("collectived.lane")

DECIDE_ALONE_SECONDS = 0.15  # how long a lane waits for the coordinator's verdict before it decides for itself
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL


@dataclass(slots=True)
class Counters:
    done: int = 0
    failed: int = 0
    result_bytes: int = 0
    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a lane needs of its worker. `report` and `ended` may be called from the lane's thread."""

    name: str
    exchange: Exchange
    budget: Budget
    stall_after: float
    report: Callable[[Report], None]
    ended: Callable[[Lane], None]


class Lane:
    """See the module. Methods without underscore may be called from any thread."""

    def __init__(self, topology: Topology, surroundings: Surroundings) -> None:
        self.topology = topology
        self.counters = Counters()
        self.seats: dict[int, Seat] = {}
        self._around = surroundings
        self.ledger = self._ledger(topology.group.generation)
        self._links = self._new_links(topology.group.generation)
        self._results = Results(surroundings.budget, self._announce)
        self._workspace = Workspace()
        self._programs: dict[bytes, Program] = {}
        self._chain = bytes(8)
        self.running: Running | None = None
        self._past: dict[int, list[Verdict]] = {}  # verdicts of earlier generations of this lane
        self._early: list[tuple[Seat, wire.Ring]] = []  # rings for a generation that has not begun here
        self._alone_at: dict[int, tuple[float, Report]] = {}  # instance -> when to decide it alone
        self._asked: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {self._wake: self._woken}
        self._watched: dict[int, int] = {}  # link descriptors and the events asked for
        self._ready: set[int] = set()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"lane {topology.group.name}", daemon=True)
        self._thread.start()

    @property
    def group(self) -> GroupInfo:
        """The group in the generation that is current here."""
        return replace(self.topology.group, generation=self.ledger.generation)

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received over links, headers included."""
        links = list(self._links)
        return (
            self.counters.sent + sum(link.sent for link in links),
            self.counters.received + sum(link.received for link in links),
        )

    # From other threads

    def take_seat(self, seat: Seat) -> None:
        """A local rank is about to connect its doorbell."""
        self.seats[seat.rank] = seat
        self._ask(lambda: self._watch_process(seat))

    def absent(self, rank: int, why: str) -> None:
        """This local rank will never take its seat."""
        self._ask(lambda: self._lose_rank(rank, why))

    def connect(self, rank: int, bell: socket.socket) -> None:
        self._ask(lambda: self._connect(rank, bell))

    def hang_up(self, rank: int, why: str) -> None:
        """The session of this rank has ended."""
        self._ask(lambda: self._hang_up(self.seats[rank], why))

    def rule(self, verdict: Verdict) -> None:
        self._ask(lambda: self._rule(verdict))

    def query(self, instance: int, answer: Callable[[int, tuple[RankPosition, ...]], None]) -> None:
        """Calls `answer(generation, positions)` in the lane's thread."""
        self._ask(lambda: answer(self.ledger.generation, self.ledger.positions(instance, time.monotonic())))

    def stop(self) -> None:
        """Ends the lane now; its peers are told that it is no fault."""
        self._ask(self._end)

    def join(self) -> None:
        self._thread.join()

    def _ask(self, what: Callable[[], None]) -> None:
        self._asked.append(what)
        if not self._over:
            os.eventfd_write(self._wake, 1)

    # The one wait

    def _run(self) -> None:
        try:
            while not self._over:
                again = self._advance()
                if self._over:
                    break
                self._watch_links()
                self._ready.clear()
                for descriptor, events in self._poll.poll(0 if again else self._patience()):
                    handler = self._handlers.get(descriptor)
                    if handler is not None:
                        handler(events)
                    else:
                        self._link_event(descriptor, events)
                self._report_due()
        except Exception:
            log.exception("lane of group %s: a defect of collectived ends it", self.topology.group.name)
        finally:
            self._close()

    def _patience(self) -> float | None:
        """Milliseconds until something is due; None: until something happens."""
        due = min([self.ledger.wakeup(), *(at for at, _ in self._alone_at.values())])
        return None if due == math.inf else max(0.0, math.ceil((due - time.monotonic()) * 1000))

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake)
        while self._asked and not self._over:
            self._asked.popleft()()

    def _watch(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        self._poll.register(descriptor, events)
        self._handlers[descriptor] = handler

    def _forget(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    # Members

    def _watch_process(self, seat: Seat) -> None:
        if seat.pidfd >= 0:
            self._watch(seat.pidfd, select.POLLIN, lambda _: self._hang_up(seat, "its process ended"))

    def _connect(self, rank: int, bell: socket.socket) -> None:
        seat = self.seats[rank]
        if seat.gone or seat.bell is not None:
            bell.close()
            return
        seat.connect(bell)
        self._watch(bell.fileno(), select.POLLIN, lambda events: self._bell_event(seat, events))
        for arena in self._results.arenas:
            self._tell(seat, wire.arena(wire.Kind.ARENA, arena.number, arena.size), arena.descriptor)
        if seat.flush():
            self._poll.modify(bell.fileno(), select.POLLIN | select.POLLOUT)

    def _announce(self, arena: Arena) -> None:
        for seat in self.seats.values():
            if seat.bell is not None:
                self._tell(seat, wire.arena(wire.Kind.ARENA, arena.number, arena.size), arena.descriptor)

    def _bell_event(self, seat: Seat, events: int) -> None:
        if events & select.POLLOUT and seat.bell is not None and not seat.flush():
            self._poll.modify(seat.bell.fileno(), select.POLLIN)
        if events & (select.POLLIN | _ENDED):
            self._read_bell(seat)

    def _read_bell(self, seat: Seat) -> bool:
        """Takes one message; False where none was there."""
        if seat.bell is None:
            return False
        try:
            data = seat.bell.recv(wire.MAX_MESSAGE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._lose(seat.rank, "its process ended or closed its doorbell")
            return False
        try:
            self._message(seat, data)
        except (wire.Malformed, OutOfTurn) as error:
            self._lose(seat.rank, f"it sent something malformed: {error}")
            return False
        return True

    def _message(self, seat: Seat, data: bytes) -> None:
        match wire.kind_of(data):
            case wire.Kind.RING:
                self._ring(seat, wire.parse_ring(data))
            case wire.Kind.RELEASE:
                for number in wire.parse_release(data):
                    self._results.release(number, seat.rank)
            case wire.Kind.LEAVE:
                self._leave(seat)
            case wire.Kind.ABORT:
                self._abort(seat, wire.text_of(data))
            case wire.Kind.PING:
                self._tell(seat, wire.bare(wire.Kind.PONG))
            case kind:
                raise wire.Malformed(f"a client does not send {kind.name}")

    def _hang_up(self, seat: Seat, why: str) -> None:
        while self._read_bell(seat):  # what it had fully submitted counts
            pass
        self._lose(seat.rank, why)

    def _leave(self, seat: Seat) -> None:
        standing = self.ledger.standings[seat.rank]
        if not standing.gone:
            standing.gone = True
            self._report(self.ledger.report(ReportKind.LEFT, standing.submitted, rank=seat.rank))

    def _abort(self, seat: Seat, reason: str) -> None:
        standing = self.ledger.standings[seat.rank]
        if not standing.gone:
            standing.gone = True
            self._report_fault(self.ledger.report(ReportKind.ABORT, self.ledger.next, rank=seat.rank, text=reason))

    def _lose(self, rank: int, why: str) -> None:
        seat = self.seats[rank]
        if seat.gone:
            return
        for descriptor in (seat.bell.fileno() if seat.bell else -1, seat.pidfd):
            self._forget(descriptor)
        seat.close()
        self._results.drop(rank)
        self._lose_rank(rank, why)

    def _lose_rank(self, rank: int, why: str) -> None:
        standing = self.ledger.standings[rank]
        if not standing.gone:
            standing.gone = True
            log.warning("group %s: rank %d is lost: %s", self.topology.group.name, rank, why)
            self._report_fault(self.ledger.report(ReportKind.LOST, standing.submitted, rank=rank, text=why))

    def _tell(self, seat: Seat, message: bytes, descriptor: int = -1) -> None:
        try:
            kept = seat.tell(message, descriptor)
        except NotReading as error:
            self._lose(seat.rank, f"it does not read: {error}")
            return
        if kept and seat.bell is not None:
            self._poll.modify(seat.bell.fileno(), select.POLLIN | select.POLLOUT)

    # Submissions

    def _ring(self, seat: Seat, ring: wire.Ring) -> None:
        for number in ring.released:
            self._results.release(number, seat.rank)
        ledger = self.ledger
        if ring.generation != ledger.generation:
            past = self._past.get(ring.generation)
            if past is None:
                self._early.append((seat, ring))
            else:
                self._fail(seat, ring.instance, past[-1])
            return
        if ring.instance <= ledger.standings[seat.rank].submitted:
            for message in seat.outcome(ring.instance):
                self._tell(seat, message)
            return
        prepared = seat.prepared.get(ring.prepared)
        if prepared is None:
            raise wire.Malformed(f"a ring of collective {ring.prepared}, which was never prepared")
        seat.sources(prepared, ring.addresses, ring.staged)  # checks every bound
        arrival = Arrival(prepared, ring.addresses, ring.staged, time.monotonic())
        dispute = ledger.arrive(seat.rank, ring.instance, arrival, ring.remaining)
        verdict = ledger.verdict_on(ring.instance)
        if verdict is not None:
            self._fail(seat, ring.instance, verdict)
        elif dispute is not None:
            self._report_fault(dispute)

    def _advance(self) -> bool:
        """Starts and steps; whether something wants to go on at once."""
        if self.running is None:
            instance = self.ledger.startable()
            if instance is None:
                self._end_if_deserted()
                return False
            self._begin(instance)
        running = self.running
        if running is None:
            return True
        try:
            ended, again = running.step(self._links, self._ready)
        except LinkBroken as error:
            for link in [link for link in self._links if link.peer == error.peer]:
                self._drop_link(link)
            self._link_broken(error)
            return False
        for strand in ended:
            self._strand_done(running, strand)
        return again or bool(ended)

    def _begin(self, instance: Instance) -> None:
        program = self._programs.get(instance.contract)
        if program is None:
            program = self._programs[instance.contract] = compose(instance.collective, self.topology)
            if instance.collective.implementation is CommunicationImplementation.NCCL:
                log.warning("group %s is on CPU devices: NCCL falls back to RING", self.topology.group.name)
        slot: Slot | None = None
        if program.delivers:
            try:
                slot = self._results.take(program.layout.result_bytes, program.receivers)
            except (Exhausted, OSError) as error:
                self._exhausted(instance, error)
                return
        instance.started = True
        chain = frames.next_chain(self._chain, instance.contract)
        sources = [
            self.seats[rank].sources(arrival.prepared, arrival.addresses, arrival.staged)
            for rank in program.sources
            for arrival in (instance.arrivals[rank],)
        ]

        def start(strand: Strand, links: dict[int, Link]) -> Iterator[Wait]:
            group = self.topology.group
            stamp = frames.Stamp(
                group.key,
                self.ledger.generation,
                instance.number,
                strand.pack_number,
                strand.shard,
                strand.plan_hash,
                chain,
            )
            memory = slot.memory if slot else None
            return strands.run(program, strand, sources, memory, self._workspace, links, stamp, self._judge)

        self._chain = chain
        self.running = Running(instance, program, slot, start)

    def _strand_done(self, running: Running, strand: Strand) -> None:
        """Tells the ranks. Done means done: nothing of this strand is read or written any more."""
        instance, slot = running.instance, running.slot
        last = running.left == 0
        for rank in instance.arrivals:
            seat = self.seats[rank]
            receives = slot is not None and rank in running.program.receivers
            if not receives and not last:
                continue
            done = wire.Done(instance.number, strand.pack_number, last, receives)
            if slot is not None and receives:
                done = replace(done, arena=slot.arena.number, offset=slot.offset, slot=slot.number)
            message = done.encode()
            seat.record(instance.number, message)
            self._tell(seat, message)
        if not last:
            return
        self.counters.done += 1
        self.counters.result_bytes += running.program.nbytes
        if slot is not None:
            for rank in running.program.receivers:
                if self.seats[rank].gone:
                    self._results.release(slot.number, rank)
        self.running = None
        self._alone_at.pop(instance.number, None)
        resumed = self.ledger.finish(instance, time.monotonic())
        if resumed is not None:
            self._around.report(resumed)
        self._succeed()

    # Links

    def _new_links(self, generation: int) -> Links:
        return Links(
            self.topology,
            generation,
            self._around.exchange,
            lambda of, link: self._ask(lambda: self._link_arrived(of, link)),
            lambda task, why: self._ask(lambda: self._link_failed(task, why)),
        )

    def _link_arrived(self, generation: int, link: Link) -> None:
        if generation == self.ledger.generation:
            self._links.add(link)
        else:
            link.close()

    def _link_failed(self, task: int, why: str) -> None:
        error = LinkBroken(f"it cannot be reached: {why}")
        error.peer = task
        self._link_broken(error)

    def _watch_links(self) -> None:
        """Asks poll for what the strands wait for; an idle link is watched for its end, a parked one for nothing."""
        uses = self.running.uses() if self.running else {}
        wanted: dict[int, int] = {}
        for link in self._links:
            events = uses.get(link, 0 if link.parked else select.POLLIN)
            wanted[link.stream.fileno()] = events
        if wanted == self._watched:
            return
        for descriptor in self._watched.keys() - wanted.keys():
            self._poll.unregister(descriptor)
        for descriptor, events in wanted.items():
            if self._watched.get(descriptor) != events:
                self._poll.register(descriptor, events)
        self._watched = wanted

    def _link_event(self, descriptor: int, events: int) -> None:
        self._ready.add(descriptor)
        link = next((link for link in self._links if link.stream.fileno() == descriptor), None)
        if link is None or (self.running is not None and link in self.running.uses()):
            return
        try:  # between frames: the next header, or the end
            header = link.header()
            if header is not None and frames.parse(header).kind is frames.FrameKind.BYE:
                self._drop_link(link)
            elif header is not None and events & _ENDED:
                raise LinkBroken("the connection was reset")
        except (LinkBroken, frames.BadFrame) as error:
            self._drop_link(link)
            broken = LinkBroken(str(error))
            broken.peer = link.peer
            self._link_broken(broken)

    def _drop_link(self, link: Link) -> None:
        descriptor = link.stream.fileno()
        if self._watched.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)
        self._links.drop(link)
        self._count(link)
        link.close()

    def _count(self, link: Link) -> None:
        self.counters.sent += link.sent
        self.counters.received += link.received

    def _link_broken(self, error: LinkBroken) -> None:
        """A peer is gone, or talks nonsense: what runs cannot complete here."""
        if self.running is not None:
            self.running.stop()
        log.warning("group %s: link to worker %d: %s", self.topology.group.name, error.peer, error)
        self._report_fault(self.ledger.report(ReportKind.LINK, self.ledger.next, worker=error.peer, text=str(error)))

    def _judge(self, link: Link, expected: bytes, got: bytes) -> bool:
        """A frame that is not the one expected: wait for better news, or raise LinkBroken for nonsense."""
        try:
            frame = frames.parse(got)
        except frames.BadFrame as error:
            broken = LinkBroken(str(error))
            broken.peer = link.peer
            raise broken from None
        running = self.running
        assert running is not None
        here = (self.topology.group.key, self.ledger.generation)
        if frame.kind is frames.FrameKind.BYE or (
            (frame.key, frame.generation) == here and frame.instance > running.instance.number
        ):
            return True  # it has gone on or away: the coordinator will say what that means
        if not running.instance.disputed:
            running.instance.disputed = True
            self._report_fault(self.ledger.report(ReportKind.MISMATCH, running.instance.number, worker=link.peer))
        return True

    # Faults and verdicts

    def _report(self, report: Report) -> None:
        self._around.report(report)

    def _report_fault(self, report: Report) -> None:
        """Reports what needs a verdict, and remembers to decide alone if none comes."""
        first = report.instance + 1 if report.kind is ReportKind.LOST else max(0, report.instance)
        if self.ledger.verdict_on(first) is None:
            self._alone_at.setdefault(first, (time.monotonic() + DECIDE_ALONE_SECONDS, report))
        self._around.report(report)

    def _report_due(self) -> None:
        now = time.monotonic()
        if self.ledger.wakeup() <= now:
            for report in self.ledger.due(now):
                if report.kind is ReportKind.EXPIRED:
                    self._report_fault(report)
                else:
                    self._warn_stalled(report, now)
                    self._around.report(report)
        for first, (at, report) in list(self._alone_at.items()):
            if at <= now:
                del self._alone_at[first]
                if self.ledger.verdict_on(first) is None and any(i.number >= first for i in self.ledger.open()):
                    self._rule(self._own_verdict(first, report))

    def _warn_stalled(self, report: Report, now: float) -> None:
        instance = self.ledger.instances[report.instance]
        missing = self.ledger.missing(instance)
        log.warning(
            "group %s: %s #%d has been waiting for %.1f s%s (submitted at %s)",
            self.topology.group.name,
            instance.collective.operation,
            instance.number,
            now - instance.first.at,
            f"; local ranks {missing} have not come" if missing else "",
            instance.collective.site or "an unknown place",
        )

    def _own_verdict(self, first: int, report: Report) -> Verdict:
        """What this worker decides when the coordinator says nothing."""
        group = self.topology.group
        code, text, ranks = {
            ReportKind.EXPIRED: (
                Code.DEADLINE_EXCEEDED,
                f"did not complete within {report.timeout_seconds:g} s",
                [position.rank for position in report.ranks if not position.arrived],
            ),
            ReportKind.LOST: (Code.UNAVAILABLE, f"rank {report.rank} is lost: {report.text}", [report.rank]),
            ReportKind.ABORT: (Code.ABORTED, f"rank {report.rank} aborted the group: {report.text}", [report.rank]),
            ReportKind.MISMATCH: (Code.INVALID_ARGUMENT, "ranks submitted different collectives", []),
            ReportKind.EXHAUSTED: (Code.RESOURCE_EXHAUSTED, report.text, [report.rank]),
            ReportKind.LINK: (
                Code.UNAVAILABLE,
                f"worker {report.worker} is lost: {report.text}",
                [rank for peer in self.topology.peers if peer.task == report.worker for rank in peer.ranks],
            ),
        }[report.kind]
        instance = self.ledger.instances.get(first)
        what = (
            f"{instance.collective.operation} #{first} of group {group.name!r}" if instance else f"group {group.name!r}"
        )
        return Verdict(
            group.name,
            group.key,
            self.ledger.generation,
            code,
            f"{what}: {text} (decided by {self._around.name} alone; the coordinator did not answer)",
            first,
            first,
            str(instance.collective.operation) if instance else "",
            tuple(group.members[rank] for rank in ranks),
            decided_by=self._around.name,
            members=group.members,
        )

    def _exhausted(self, instance: Instance, error: Exception) -> None:
        held = self._results.held()
        rank = max(held, key=lambda r: held[r]) if held else next(iter(instance.arrivals))
        instance.disputed = True  # it does not start; the verdict is on its way
        text = f"no memory for the results of {instance.collective.operation} #{instance.number}: {error}"
        if held:
            text += f"; rank {rank} holds {held[rank]} bytes of results: release them"
        self._report_fault(self.ledger.report(ReportKind.EXHAUSTED, instance.number, rank=rank, text=text))

    def _rule(self, verdict: Verdict) -> None:
        if verdict.generation != self.ledger.generation:
            return
        failing = self.ledger.rule(verdict)
        for instance in failing:
            self.counters.failed += 1
            if self.running is not None and self.running.instance is instance:
                self._stop_running()
            for rank in instance.arrivals:
                self._fail(self.seats[rank], instance.number, verdict)
        if failing:
            log.warning("group %s: %s", self.topology.group.name, verdict.message)
        self._succeed()

    def _stop_running(self) -> None:
        running = self.running
        assert running is not None
        running.stop()
        if running.slot is not None:
            for rank in running.program.receivers:
                self._results.release(running.slot.number, rank)
        self.running = None

    def _fail(self, seat: Seat, instance: int, verdict: Verdict) -> None:
        message = wire.failed(instance, verdict_to_proto(verdict).SerializeToString())
        seat.record(instance, message)
        self._tell(seat, message)

    def _succeed(self) -> None:
        """Begins the successor generation once everything before the verdict has ended."""
        verdict = next((verdict for verdict in self.ledger.verdicts if verdict.successor), None)
        if verdict is None or self.running is not None or self.ledger.startable() is not None:
            return
        if any(instance.number < verdict.from_instance for instance in self.ledger.open()):
            return
        self._past[self.ledger.generation] = self.ledger.verdicts
        gone = [rank for rank, standing in self.ledger.standings.items() if standing.gone]
        for link in self._links:
            self._count(link)
        self._links.close(orderly=True)
        self._watch_links()
        self.ledger = self._ledger(verdict.successor)
        for rank in gone:
            self.ledger.standings[rank].gone = True
        self._links = self._new_links(verdict.successor)
        self._chain = bytes(8)
        self._alone_at.clear()
        for seat in self.seats.values():
            seat.forget()
        early, self._early = self._early, []
        for seat, ring in early:
            self._ring(seat, ring)

    def _ledger(self, generation: int) -> Ledger:
        return Ledger(
            self.topology.group.key,
            generation,
            self.topology.ranks,
            self._around.stall_after,
            time.monotonic(),
        )

    # The end

    def _end_if_deserted(self) -> None:
        """A lane ends when its last local rank has gone and nothing that it had submitted can still complete."""
        standings = self.ledger.standings.values()
        if all(standing.gone for standing in standings) and all(seat.gone for seat in self.seats.values()):
            self._end()

    def _end(self) -> None:
        self._over = True

    def _close(self) -> None:
        self._over = True
        if self.running is not None:
            self.running.stop()
        self._links.close(orderly=True)
        for seat in self.seats.values():
            seat.close()
        self._results.close()
        self._around.ended(self)
        os.close(self._wake)
