"""A lane: one thread per group generation and its successors, with one place where it waits.

That place is a `poll` over the doorbells and process descriptors of its members, the links of the group, and an eventfd
by which verdicts, links and requests of other threads arrive. Nothing else blocks: all sockets are non-blocking, and
what runs are generators (`strand.run`) that say what they wait for. So a lane is never deaf to a verdict, a death or a
stray frame, whatever else it does. What a lane decides by thinking is in `ledger.py`; here it acts.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from collectived_proto.local import wire
from collectived_proto.types import (
    CommunicationImplementation,
    GroupInfo,
    RankPosition,
    Report,
    ReportKind,
    Verdict,
    shown_name,
)
from collectived_runtime.engine import strand as strands
from collectived_runtime.engine import verdicts
from collectived_runtime.engine.bells import Bells
from collectived_runtime.engine.execute import Wait
from collectived_runtime.engine.ledger import Arrival, Instance, Ledger
from collectived_runtime.engine.links import Exchange, Links
from collectived_runtime.engine.program import Program, Strand, Topology, compose
from collectived_runtime.engine.reports import Reports
from collectived_runtime.engine.results import Budget, Exhausted, Results, Slot, Workspace
from collectived_runtime.engine.running import Running
from collectived_runtime.engine.seat import Seat
from collectived_runtime.engine.watch import Watch
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link, LinkBroken

log = logging.getLogger("collectived.lane")

MAX_PROGRAMS = 1024  # kept per lane; the oldest is made again when it is needed again


@dataclass(slots=True)
class Counters:
    done: int = 0
    failed: int = 0
    result_bytes: int = 0


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
        self.name = shown_name(topology.group.name)
        self.counters = Counters()
        self.running: Running | None = None
        self._around = surroundings
        self._watch = Watch()
        self._bells = Bells(self._watch, self._message, self._lost)
        self._results = Results(surroundings.budget, self._bells.announce)
        self._workspace = Workspace()
        self._programs: dict[bytes, Program] = {}
        self._past: dict[int, Verdict] = {}  # how earlier generations of this lane ended
        self._early: list[tuple[Seat, wire.Ring]] = []  # rings for a generation that has not begun here
        self._early_verdicts: list[Verdict] = []  # and verdicts about one
        self._told: tuple[Verdict, bytes] | None = None  # the latest verdict, as clients are told it
        self._fell_back = False  # has said that there is no NCCL here
        self._over = False
        self._begin_generation(topology.group.generation)
        self._thread = threading.Thread(target=self._run, name=f"lane {self.name}", daemon=True)
        self._thread.start()

    @property
    def group(self) -> GroupInfo:
        """The group in the generation that is current here, with what the local ranks have finished."""
        members = list(self.topology.group.members)
        for rank, standing in list(self.ledger.standings.items()):
            members[rank] = replace(
                members[rank], last_instance=standing.finished, last_op=standing.op, last_site=standing.site
            )
        return replace(self.topology.group, generation=self.ledger.generation, members=tuple(members))

    @property
    def seats(self) -> dict[int, Seat]:
        return self._bells.seats

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received over links in this generation, headers included."""
        return self._links.traffic()

    # From other threads

    def take_seat(self, seat: Seat) -> None:
        """A local rank is about to connect its doorbell."""
        self._bells.seats[seat.rank] = seat
        self._watch.ask(lambda: self._bells.seat(seat))

    def absent(self, rank: int, why: str) -> None:
        """This local rank will never take its seat."""
        self._watch.ask(lambda: self._lost(rank, why))

    def connect(self, rank: int, bell: socket.socket) -> None:
        self._watch.ask(lambda: self._bells.connect(rank, bell, self._results.arenas))

    def hang_up(self, rank: int, why: str) -> None:
        """The session of this rank has ended."""
        self._watch.ask(lambda: self._bells.hang_up(self._bells.seats[rank], why))

    def rule(self, verdict: Verdict) -> None:
        self._watch.ask(lambda: self._rule(verdict))

    def query(self, instance: int, answer: Callable[[int, tuple[RankPosition, ...]], None]) -> None:
        """Calls `answer(generation, positions)` in the lane's thread."""
        self._watch.ask(lambda: answer(self.ledger.generation, self.ledger.positions(instance, time.monotonic())))

    def stop(self) -> None:
        """Ends the lane now; its peers are told that it is no fault."""
        self._watch.ask(self._end)

    def join(self) -> None:
        self._thread.join()

    # The loop

    def _run(self) -> None:
        try:
            while not self._over:
                again = self._advance()
                if self._over:
                    break
                self._links.use(self.running.uses() if self.running else {})
                self._links.ready.clear()
                due = self._reports.wakeup()
                self._watch.wait(0.0 if again else due)
                if time.monotonic() >= due:
                    self._reports.due()
        except Exception as error:  # whatever it is, neither clients nor peers may wait for this lane any more
            log.exception("lane of group %s: a defect of collectived ends it", self.name)
            self._give_up(error)
        finally:
            self._close()

    def _give_up(self, error: Exception) -> None:
        """Tells the coordinator that no local rank goes beyond what it has finished."""
        text = f"a defect of collectived ended its lane: {type(error).__name__}: {error}"
        for rank, standing in self.ledger.standings.items():
            if not standing.gone:
                self._reports.fault(ReportKind.LOST, standing.finished, rank=rank, text=text)

    def _begin_generation(self, generation: int) -> None:
        self.ledger = Ledger(
            self.topology.group.key,
            generation,
            self.topology.ranks,
            self._around.stall_after,
            time.monotonic(),
        )
        self._links = Links(
            self.topology, generation, self._around.exchange, self._watch, self._link_broken, self._frame_early
        )
        self._reports = Reports(self.topology, self.ledger, self._around.name, self._around.report, self._rule)
        self._chain = bytes(8)

    # Members

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
                if seat.reads:
                    self._bells.tell(seat, wire.bare(wire.Kind.PONG))
            case kind:
                raise wire.Malformed(f"a client does not send {kind.name}")

    def _leave(self, seat: Seat) -> None:
        standing = self.ledger.standings[seat.rank]
        if not standing.gone:
            standing.gone = True
            self._reports.note(ReportKind.LEFT, standing.submitted, rank=seat.rank)

    def _abort(self, seat: Seat, reason: str) -> None:
        standing = self.ledger.standings[seat.rank]
        if standing.gone:
            return
        standing.gone = True
        # Its caller may use its memory again as soon as this has been answered: from here on nothing is read.
        self.ledger.closed = True
        if self.running is not None:
            self.running.stop()
        self._reports.fault(ReportKind.ABORT, self.ledger.next, rank=seat.rank, text=reason)

    def _lost(self, rank: int, why: str) -> None:
        self._results.drop(rank)
        standing = self.ledger.standings[rank]
        if not standing.gone:
            standing.gone = True
            over = self.ledger.verdict_on(standing.submitted + 1) is not None
            level = logging.DEBUG if over else logging.WARNING
            log.log(level, "group %s: rank %d is lost: %s", self.name, rank, why)
            self._reports.fault(ReportKind.LOST, standing.submitted, rank=rank, text=why)

    # Submissions

    def _ring(self, seat: Seat, ring: wire.Ring) -> None:
        for number in ring.released:
            self._results.release(number, seat.rank)
        ledger = self.ledger
        if ring.generation != ledger.generation:
            past = self._past.get(ring.generation)
            if past is None:
                if len(self._early) >= wire.MAX_OUTSTANDING * len(self.seats):
                    raise wire.Malformed(f"a ring of generation {ring.generation}, which nobody has announced")
                self._early.append((seat, ring))
            else:
                self._fail(seat, ring.instance, past)
            return
        if ring.instance <= ledger.standings[seat.rank].submitted:
            for message in seat.outcome(ring.instance):
                self._bells.tell(seat, message)
            return
        prepared = seat.prepared.get(ring.prepared)
        if prepared is None:
            raise wire.Malformed(f"a ring of collective {ring.prepared}, which was never prepared")
        sources = seat.sources(prepared, ring.addresses, ring.staged)  # checks every bound; outlives the session
        arrival = Arrival(prepared, sources, time.monotonic())
        agrees = ledger.arrive(seat.rank, ring.instance, arrival, ring.remaining, ring.timeout)
        verdict = ledger.verdict_on(ring.instance)
        if verdict is not None:
            arrival.sources = None
            self._fail(seat, ring.instance, verdict)
        elif not agrees:
            self._reports.fault(ReportKind.MISMATCH, ring.instance)

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
            ended, again = running.step(self._links)
        except LinkBroken as error:
            self._links.drop_peer(error.peer)
            self._link_broken(error)
            return False
        for strand in ended:
            self._strand_done(running, strand)
        return again or bool(ended)

    def _begin(self, instance: Instance) -> None:
        program = self._programs.get(instance.contract)
        if program is None:
            if len(self._programs) >= MAX_PROGRAMS:  # somebody's shapes change with every call
                del self._programs[next(iter(self._programs))]
            program = self._programs[instance.contract] = compose(instance.collective, self.topology)
            if instance.collective.implementation is CommunicationImplementation.NCCL and not self._fell_back:
                self._fell_back = True
                log.warning("group %s is on CPU devices: the hint NCCL falls back to RING", self.name)
        slot: Slot | None = None
        if program.delivers:
            try:
                slot = self._results.take(program.layout.result_bytes, program.receivers)
            except (Exhausted, OSError) as error:
                self._exhausted(instance, error)
                return
        instance.started = True
        # Ranks of one worker have compared their contracts; the chain is for peers.
        chain = frames.next_chain(self._chain, instance.contract) if len(self.topology.peers) > 1 else self._chain
        sources = [instance.arrivals[rank].sources for rank in program.sources]

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
        """Tells the ranks of a complete pack. Done means done: nothing of it is read or written any more."""
        instance, slot = running.instance, running.slot
        complete, last = running.ended(strand)
        if not complete:
            return
        receivers = running.program.receivers
        if slot is not None:
            done = wire.Done(
                instance.number, strand.pack_number, last, True, slot.arena.number, slot.offset, slot.number
            )
            self._deliver(receivers, instance.number, done.encode())
        if last and len(receivers) < len(instance.arrivals):
            done = wire.Done(instance.number, strand.pack_number, last, False)
            others = [rank for rank in instance.arrivals if slot is None or rank not in receivers]
            self._deliver(others, instance.number, done.encode())
        if not last:
            return
        self.counters.done += 1
        self.counters.result_bytes += running.program.nbytes
        if slot is not None:
            for rank in running.program.receivers:
                if self.seats[rank].gone:
                    self._results.release(slot.number, rank)
        self.running = None
        self.ledger.finish(instance, time.monotonic())
        self._reports.completed(instance.number)
        for link, frame in self._links.parked():
            self._frame_early(link, frame)
        if instance.stalled:
            self._reports.note(ReportKind.RESUMED, instance.number)
        self._succeed()

    def _deliver(self, ranks: Iterable[int], instance: int, message: bytes) -> None:
        for rank in ranks:
            seat = self.seats[rank]
            seat.record(instance, message)
            self._bells.tell(seat, message)

    # Links

    def _link_broken(self, error: LinkBroken) -> None:
        """A peer is gone, or talks nonsense: what runs cannot complete here."""
        if self.running is not None:
            self.running.stop()
        log.warning("group %s: link to worker %d: %s", self.name, error.peer, error)
        self._reports.fault(ReportKind.LINK, self.ledger.next, worker=error.peer, text=str(error))

    def _judge(self, link: Link, expected: bytes, got: bytes) -> bool:
        """A frame that is not the one expected: wait for better news, or raise LinkBroken for nonsense."""
        try:
            frame = frames.parse(got)
        except frames.BadFrame as error:
            raise self._nonsense(link, str(error)) from None
        assert self.running is not None
        if frame.kind is not frames.FrameKind.BYE:  # which is of one that has gone away: a verdict will say so
            self._compare(link, frame, self.running.instance.number)
        return True

    def _frame_early(self, link: Link, frame: frames.Frame) -> None:
        """A frame on an idle link: of an instance to come it waits, of one that is over it differs from what we did."""
        self._compare(link, frame, self.ledger.next - 1)

    def _compare(self, link: Link, frame: frames.Frame, latest: int) -> None:
        """`latest` is the last instance of which no frame is to come here; a frame of it, or before, is a mismatch."""
        if (frame.key, frame.generation) != (self.topology.group.key, self.ledger.generation):
            raise self._nonsense(link, f"a frame of generation {frame.generation}")
        if frame.instance > latest:
            return
        instance = self.ledger.find(frame.instance)
        if instance is not None and not instance.disputed:
            instance.disputed = True
            self._reports.fault(ReportKind.MISMATCH, frame.instance, worker=link.peer)

    @staticmethod
    def _nonsense(link: Link, what: str) -> LinkBroken:
        error = LinkBroken(what)
        error.peer = link.peer
        return error

    # Faults and verdicts

    def _exhausted(self, instance: Instance, error: Exception) -> None:
        held = self._results.held()
        rank = max(held, key=lambda r: held[r]) if held else next(iter(instance.arrivals))
        instance.disputed = True  # it does not start; the verdict is on its way
        text = f"no memory for the results of {instance.collective.operation} #{instance.number}: {error}"
        if held:
            text += f"; rank {rank} holds {held[rank]} bytes of results: release them"
        self._reports.fault(ReportKind.EXHAUSTED, instance.number, rank=rank, text=text)

    def _rule(self, verdict: Verdict) -> None:
        if verdict.generation != self.ledger.generation:
            if verdict.generation not in self._past:
                self._early_verdicts.append(verdict)
            return
        failing = self.ledger.rule(verdict)
        for instance in failing:
            self.counters.failed += 1
            if self.running is not None and self.running.instance is instance:
                self._stop_running()
            for rank in instance.arrivals:
                self._fail(self.seats[rank], instance.number, verdict)
        for rank, seat in self.seats.items():
            # It had done its part and gone on: it hears of the failure at its next call.
            submitted = self.ledger.standings[rank].submitted
            if submitted >= verdict.from_instance and not any(rank in instance.arrivals for instance in failing):
                self._fail(seat, submitted, verdict)
        if failing:
            log.warning("group %s: %s", self.name, verdict.message)
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
        if self._told is None or self._told[0] is not verdict:
            self._told = verdict, verdicts.encode(verdict)
        message = wire.failed(instance, self._told[1])
        seat.record(instance, message)
        self._bells.tell(seat, message)

    def _succeed(self) -> None:
        """Begins the successor generation once everything before the verdict has ended."""
        verdict = next((verdict for verdict in self.ledger.verdicts if verdict.successor), None)
        if verdict is None or self.running is not None or self.ledger.startable() is not None:
            return
        if any(instance.number < verdict.from_instance for instance in self.ledger.open()):
            return
        self._past[self.ledger.generation] = verdict
        gone = [rank for rank, standing in self.ledger.standings.items() if standing.gone]
        self._links.close()
        self._begin_generation(verdict.successor)
        for rank in gone:
            self.ledger.standings[rank].gone = True
        for seat in self.seats.values():
            seat.forget()
        early, self._early = self._early, []
        for seat, ring in early:
            self._ring(seat, ring)
        rulings, self._early_verdicts = self._early_verdicts, []
        for known in rulings:
            self._rule(known)

    # The end

    def _end_if_deserted(self) -> None:
        """A lane ends when its last local rank has gone and nothing that it had submitted can still complete."""
        standings = self.ledger.standings.values()
        if all(standing.gone for standing in standings) and self._bells.deserted:
            self._end()

    def _end(self) -> None:
        self._over = True

    def _close(self) -> None:
        self._over = True
        if self.running is not None:
            self.running.stop()
        self.running = None
        self.ledger.instances.clear()  # nothing may look into an arena when it is closed
        self._links.close()
        self._bells.close()
        self._results.close()
        self._around.ended(self)
        self._watch.close()
