"""A generation in a lane: its ledger, its links, the instance that runs, and what is decided about it.

What is due is decided by thinking in `ledger.py`; here it is done, always in the lane's thread, and never by waiting.
An instance runs in up to four *stages*: where some rank takes what comes, the root's worker announces it; where lengths
differ, the workers exchange them; where NCCL carries it out, they agree that all have come; then the program itself
runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from collectived_proto.errors import Code
from collectived_proto.local import wire
from collectived_proto.types import (
    Broadcast,
    Recv,
    ReportKind,
    Scatter,
    Send,
    Verdict,
)
from collectived_runtime.device.cuda.driver import CudaError
from collectived_runtime.device.gpus import Region
from collectived_runtime.device.nccl.interface import NcclError
from collectived_runtime.engine import preliminary, verdicts
from collectived_runtime.engine import strand as strands
from collectived_runtime.engine.counters import NOT_STARTED
from collectived_runtime.engine.flood import Flood
from collectived_runtime.engine.ledger import Arrival, Instance, Ledger
from collectived_runtime.engine.links import LinkParted, Links
from collectived_runtime.engine.newcomers import Newcomers
from collectived_runtime.engine.posts import Posts
from collectived_runtime.engine.program import Program, Strand
from collectived_runtime.engine.recorder import NO_GIST
from collectived_runtime.engine.reports import Reports
from collectived_runtime.engine.results import Exhausted, Slot
from collectived_runtime.engine.running import Running
from collectived_runtime.engine.seat import Seat
from collectived_runtime.engine.stages import Stages
from collectived_runtime.engine.telling import Telling
from collectived_runtime.engine.workshop import Workshop
from collectived_runtime.limits.refusals import Where
from collectived_runtime.logs import facts_of, text_of
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link, LinkBroken, LinkMisused

log = logging.getLogger("collectived.lane")


class Generation:
    """See the module. `rule` takes a verdict that the workers made without the coordinator."""

    def __init__(self, shop: Workshop, number: int, rule: Callable[[Verdict], None]) -> None:
        topology, around = shop.topology, shop.around
        self.number = number
        self.running: Running | None = None
        self.ledger = Ledger(topology.group.key, number, topology.ranks, around.stall_after, time.monotonic())
        self.links = Links(topology, number, around.exchange, shop.watch, self.link_broken, self._frame_early)
        self.flood = Flood(shop, number, lambda: self.ledger.fault, rule, self._witness)
        decide, lost_after, connected = self.flood.decide, around.lost_after, around.connected
        self.reports = Reports(topology, self.ledger, around.name, around.report, decide, lost_after, connected)
        self.newcomers = Newcomers(shop, self.ledger)
        self._telling = Telling(number, shop.bells, shop.tools.lingering)
        self.fail = self._telling.failed
        self.posts = Posts(shop, number, self.reports, self.fail, self.link_broken)
        self._shop = shop
        self._stages = Stages(shop, number, self._differs, self._judge)
        self._said_goodbye: set[Link] = set()  # amid what they were needed for
        self._failure_said = False
        self._late: list[tuple[Seat, int]] = []  # what has not come by its own deadline, until there is a verdict

    # Members

    def submit(self, seat: Seat, ring: wire.Ring) -> None:
        """A rank submits an instance or a post, the next one or one that it has submitted before."""
        ledger = self.ledger
        prepared = seat.prepared.get(ring.prepared)
        if prepared is None:
            raise wire.Malformed(f"a ring of collective {ring.prepared}, which was never prepared")
        if ring.instance >= wire.POST:
            if ring.event:
                raise wire.Malformed(f"{prepared.op} with event {ring.event}, for a value in the memory of a GPU")
            self.posts.submit(seat, ring, prepared)
            return
        if ring.instance <= ledger.standings[seat.rank].rung:
            for message in seat.outcome(ring.instance):
                self._shop.bells.tell(seat, message)
            self._shop.bells.idle(seat)
            return
        if isinstance(prepared.collective.operation, (Send, Recv)):
            raise wire.Malformed(f"{prepared.op} numbered as an instance of the group")
        writing = self._shop.events.gpu_of(seat, ring) if ring.event else None
        sources = seat.sources(prepared, ring)  # checks every bound; outlives the session
        arrival = Arrival(prepared, sources, time.monotonic(), writing is None)
        agrees = ledger.arrive(seat.rank, ring.instance, arrival, ring.remaining, ring.timeout)
        verdict = ledger.verdict_on(ring.instance)
        if verdict is not None:
            arrival.sources = None
            late = Instance(ring.instance, {seat.rank: arrival}, model=prepared, collective=prepared.collective)
            self._shop.tape.failed(self.number, late, NO_GIST, verdict)
            self.fail(seat, ring.instance, verdict)
            self._shop.bells.idle(seat)
            return
        if not agrees:
            self.reports.fault(ReportKind.MISMATCH, ring.instance)
        if writing is not None:
            written = partial(ledger.written, seat.rank, ring.instance)
            self._shop.events.wait(seat, ring.instance, writing, ring.event, lambda: written(time.monotonic()))

    def late(self, seat: Seat, number: int, op: str, timeout: float) -> None:
        """An instance or post of a rank has not come by its own deadline, and so will not: it has failed for all."""
        post = number >= wire.POST
        verdict = self.ledger.fault if post else self.ledger.verdict_on(number)
        if verdict is not None:
            self.fail(seat, number, verdict)
            return
        self._late.append((seat, number))
        if post:
            self.reports.overdue(seat.rank, seat.rank, timeout, op)
        else:
            self.reports.late(number, seat.rank, op, timeout)

    def leave(self, rank: int) -> None:
        standing = self.ledger.standings[rank]
        if not standing.gone:
            standing.gone = True
            self.reports.left(rank, standing.submitted)
            self.posts.miss()

    def abort(self, rank: int, reason: str) -> None:
        standing = self.ledger.standings[rank]
        if standing.gone:
            return
        standing.gone = True
        # Its caller may use its memory again as soon as this has been answered, and does not hear that a GPU is at it.
        self.ledger.closed = True
        if self.running is not None:
            self.links.abandon(self.running.stop())
        current = self.ledger.instances.get(self.ledger.next)  # it may have been stopped before
        if current is not None:
            self._telling.aborted(current)
        self._stages.release()
        self.posts.let_go(rank)
        self.reports.fault(ReportKind.ABORT, self.ledger.next, rank=rank, text=reason)

    def lose(self, rank: int, why: str) -> None:
        """A rank's client is gone."""
        self.posts.drop(rank)
        standing = self.ledger.standings[rank]
        if not standing.gone:
            standing.gone = True
            over = self.ledger.verdict_on(standing.submitted + 1) is not None
            level = logging.DEBUG if over else logging.INFO  # the verdict that follows is the warning
            log.log(level, "group %s: rank %d is lost: %s", self._shop.name, rank, why)
            self.reports.fault(ReportKind.LOST, standing.submitted, rank=rank, text=why)

    def give_up(self, error: Exception) -> None:
        """Tells the coordinator that no local rank goes beyond what it has finished."""
        text = f"a defect of collectived ended its lane: {type(error).__name__}: {error}"
        if isinstance(error, CudaError):
            text = f"a GPU of its worker failed: {error}"
        for rank, standing in self.ledger.standings.items():
            if not standing.gone:
                self.reports.fault(ReportKind.LOST, standing.finished, rank=rank, text=text)

    @property
    def deserted(self) -> bool:
        """Whether no local rank is left, nothing that one has sent is on its way, and the others know why."""
        if not self.ledger.deserted:
            return False
        return self.posts.idle and not self.reports.undecided and self.flood.idle

    # What runs

    def advance(self) -> bool:
        """Starts and steps; whether something wants to go on at once."""
        copying = self.posts.advance()
        if self.running is None:
            instance = self.ledger.startable()
            if instance is None:
                return copying
            instance.started, instance.started_at = True, time.monotonic()
            self._begin(instance)
        running = self.running
        if running is None:  # it was carried out at once, or cannot be
            return copying or self.ledger.startable() is not None
        try:
            ended, again = running.step(self.links)
        except LinkBroken as error:
            self.links.drop_peer(error.peer)
            self.link_broken(error)
            return False
        except Exhausted as error:
            self._stop_running()
            self._exhausted(running.instance, error)
            return False
        except NcclError as error:
            self._stop_running()
            self._nccl_failed(running.instance, error)
            return False
        for strand in ended:
            self._strand_done(running, strand)
        return again or copying or bool(ended)

    def wakeup(self) -> float:
        """When `due` has something to do."""
        alarm = self._shop.tools.alarms.wakeup
        return min(self.reports.wakeup(), self.posts.wakeup(), self.flood.wakeup(), alarm)

    def due(self, now: float) -> None:
        self._shop.tools.alarms.due(now)
        self.posts.due(now)
        before = self.ledger.stalls
        self.reports.due()
        self._shop.counters.stalls += self.ledger.stalls - before
        self.flood.due(now)

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from other workers, headers included; may be read from any thread."""
        (sent, received), (posted, taken) = self.links.traffic(), self.posts.traffic()
        return sent + posted, received + taken

    def watch_links(self) -> None:
        """Before the lane waits: says what is waited for."""
        if self.links.any:
            self.links.use(self.running.uses() if self.running else {})
            self.links.ready.clear()

    def _begin(self, instance: Instance) -> None:
        """The next stage of an instance whose local ranks have all come."""
        collective, topology = instance.collective, self._shop.topology
        alone = len(topology.peers) == 1
        if not alone and not instance.announced and isinstance(collective.operation, (Broadcast, Scatter)):
            root = collective.operation.root
            self.running = self._stages.announcement(instance, root, lambda: self._begin(instance))
        elif collective.lengths_differ and collective.leaves and not instance.rows:
            own = {rank: preliminary.rows_of(one.prepared.collective) for rank, one in instance.arrivals.items()}
            if alone:
                instance.rows = tuple(own[rank] for rank in sorted(own))
                self._carry_out(instance)
            else:
                self.running = self._stages.exchange(instance, own, lambda: self._carry_out(instance))
        else:
            self._carry_out(instance)

    def _carry_out(self, instance: Instance) -> None:
        program = self._shop.program(instance)
        if self._stages.preceded(program) and not instance.agreed:
            self.running = self._stages.agreement(instance, program, lambda: self._carry_out(instance))
            return
        self.newcomers.tell(instance.number)
        slot: Slot | None = None
        memory: NDArray[np.uint8] | None = None
        readers = program.receivers
        outputs: list[Region] | None = None
        if any([arrival.sources.on_device for arrival in instance.arrivals.values()]):
            written = {rank: instance.arrivals[rank].sources.output for rank in readers}
            outputs = [output for output in written.values() if output is not None]
            readers = tuple(rank for rank, output in written.items() if output is None)
        if readers:
            try:
                slot = self._shop.results.take(program.slot_bytes, readers)
            except (Exhausted, OSError) as error:
                self._exhausted(instance, error)
                return
            memory = slot.memory
            if program.head:
                memory[: len(program.head)] = np.frombuffer(program.head, np.uint8)
                memory = memory[len(program.head) :]
        sources = [instance.arrivals[rank].sources for rank in program.sources]
        if program.at_once and memory is not None and outputs is None:
            strands.at_once(program, sources, memory, self._shop.counters)
            self._telling.done(instance, program, slot, 0, True, readers)
            self._finished(instance, program, slot, readers)
            return
        self.running = self._stages.program(instance, program, slot, sources, memory, readers, outputs)

    def _strand_done(self, running: Running, strand: Strand) -> None:
        """Done means done: only when all strands of a pack have ended are its ranks told."""
        complete, last = running.ended(strand)
        if running.then is not None:  # a stage before the program itself: nobody is told
            if last:
                self.running = None
                running.then()
            return
        if complete:
            running.told = running.slot is not None
            pack = strand.pack_number
            self._telling.done(running.instance, running.program, running.slot, pack, last, running.readers)
        if last:
            self.running = None
            self._finished(running.instance, running.program, running.slot, running.readers)

    def _finished(self, instance: Instance, program: Program, slot: Slot | None, readers: tuple[int, ...]) -> None:
        shop, counters, now = self._shop, self._shop.counters, time.monotonic()
        counters.done += 1
        counters.result_bytes += program.nbytes
        operation, first = instance.collective.operation, instance.first.at
        counters.tally(operation, program.gist.algorithm, program.nbytes, now - first)
        counters.waited(operation, instance.last.at - first)
        if slot is not None:
            for rank in readers:
                if shop.bells.seats[rank].gone:
                    shop.results.release(slot.number, rank)
        self.ledger.finish(instance, now)
        shop.minute.add(program.load, first, instance.started_at, now)
        shop.tape.done(self.number, instance, program.gist, now)
        self.reports.completed(instance.number)
        self.links.look()
        if instance.stalled:
            self.reports.resumed(instance.number)

    # Links

    def link_broken(self, error: LinkBroken) -> None:
        """A peer is gone, or talks nonsense: what runs cannot complete here."""
        if isinstance(error, LinkMisused):
            self._shop.around.refusals.bad(Where.LINK)
        if self.running is not None:
            self.links.abandon(self.running.stop())
        self._stages.release()
        log.info("group %s: link to worker %d: %s", self._shop.name, error.peer, error)
        if isinstance(error, LinkParted):
            self.reports.parted(error.peer, self.ledger.next)
        else:
            self.reports.fault(ReportKind.LINK, self.ledger.next, worker=error.peer, text=str(error))

    def _judge(self, link: Link, expected: bytes, got: bytes) -> bool:
        """A frame that is not the one expected: wait for better news, or raise LinkBroken for nonsense."""
        try:
            frame = frames.parse(got)
        except frames.BadFrame as error:
            raise LinkMisused(str(error), link.peer) from None
        assert self.running is not None
        if frame.kind is not frames.FrameKind.BYE:
            self._compare(link, frame, self.running.instance.number)
        elif link not in self._said_goodbye:  # the coordinator knows what that means; without it we do
            self._said_goodbye.add(link)
            self.reports.parted(link.peer, self.running.instance.number)
        return True

    def _differs(self, instance: Instance, worker: int = 0) -> None:
        instance.disputed = True
        self.reports.fault(ReportKind.MISMATCH, instance.number, worker=worker)

    def _frame_early(self, link: Link, frame: frames.Frame) -> None:
        """A frame on an idle link: of an instance to come it waits, of one that is over it differs from what we did."""
        self._compare(link, frame, self.ledger.next - 1)

    def _compare(self, link: Link, frame: frames.Frame, latest: int) -> None:
        """`latest` is the last instance of which no frame is to come here; a frame of it, or before, is a mismatch."""
        if (frame.key, frame.generation) != (self._shop.topology.group.key, self.number):
            raise LinkMisused(f"a frame of generation {frame.generation}", link.peer)
        if frame.instance > latest:
            return
        instance = self.ledger.find(frame.instance)
        if instance is not None and not instance.disputed:
            self._differs(instance, link.peer)

    # Faults and verdicts

    def _exhausted(self, instance: Instance, error: Exception) -> None:
        held = self._shop.results.held()
        rank = max(held, key=lambda r: held[r]) if held else next(iter(instance.arrivals))
        self._stages.release()
        instance.disputed = True  # it does not start; the verdict is on its way
        text = f"no memory for the results of {instance.collective.operation} #{instance.number}: {error}"
        if held:
            text += f"; rank {rank} holds {held[rank]} bytes of results: release them"
        self.reports.fault(ReportKind.EXHAUSTED, instance.number, rank=rank, text=text)

    def _nccl_failed(self, instance: Instance, error: NcclError) -> None:
        """NCCL does not say who is at fault, not even where it says that another rank is gone: nobody is accused."""
        instance.disputed = True  # it does not start; the verdict is on its way
        log.info("group %s: %s", self._shop.name, error)
        self.reports.fault(ReportKind.NATIVE, instance.number, text=str(error))

    def _witness(self, verdict: Verdict) -> Verdict:
        """Another worker's verdict, with the ranks of this one that it waited for."""
        standings = self.ledger.standings.items()
        absent = [rank for rank, standing in standings if standing.submitted < verdict.instance]
        if verdict.code != Code.DEADLINE_EXCEEDED or verdict.missing or not absent:
            return verdict
        return verdicts.with_missing(self._shop.topology, self._shop.around.name, verdict, absent)

    def rule(self, verdict: Verdict) -> None:
        """What it covers fails, now and later."""
        seats = self._shop.bells.seats
        failing = self.ledger.rule(verdict)
        counters = self._shop.counters
        if not verdict.orderly:
            counters.verdict(verdict.code)
        for instance in failing:
            running = self.running if self.running is not None and self.running.instance is instance else None
            counters.failed += 1
            counters.failure(
                instance.collective.operation, running.program.algorithm if running else NOT_STARTED, verdict.code
            )
            gist = running.program.gist if running is not None else NO_GIST
            if running is not None:
                self._stop_running()
            self._shop.tape.failed(self.number, instance, gist, verdict)
            for rank, arrival in instance.arrivals.items():
                if not arrival.ready:  # nor will it be read: its rank may use its memory again
                    self._shop.events.give_up(seats[rank], instance.number)
                self.fail(seats[rank], instance.number, verdict)
        for rank, seat in seats.items():
            # It had done its part and gone on: it hears of the failure at its next call.
            rung = self.ledger.standings[rank].rung
            if rung >= verdict.from_instance and not any(rank in instance.arrivals for instance in failing):
                self.fail(seat, rung, verdict)
        self.posts.rule(verdict)
        self.flood.inform(verdict)
        late, self._late = self._late, []
        for seat, number in late:
            if number >= verdict.from_instance if number < wire.POST else not verdict.orderly:
                self.fail(seat, number, verdict)
            else:
                self._late.append((seat, number))
        self._say(verdict, bool(failing))

    def _say(self, verdict: Verdict, failing: bool) -> None:
        """A failure is logged once, whatever follows from it; that somebody has left in order is none by itself."""
        news = not self._failure_said and (failing or not verdict.orderly)
        self._failure_said |= news
        level = logging.WARNING if news else logging.DEBUG
        log.log(level, "group %s: %s", self._shop.name, text_of(verdict), extra=facts_of(verdict))

    def _stop_running(self) -> None:
        running = self.running
        assert running is not None
        self.links.abandon(running.stop())
        self._stages.release()
        if running.slot is not None:
            for rank in running.readers:
                if not running.told or self._shop.bells.seats[rank].gone:  # others may be reading it
                    self._shop.results.release(running.slot.number, rank)
        self.running = None

    def last_words(self) -> None:
        """Tells ranks that have a doorbell what their next instance will end with, where that is known."""
        for rank, seat in self._shop.bells.seats.items():
            following = self.ledger.standings[rank].rung + 1
            verdict = self.ledger.verdict_on(following)
            if verdict is not None and seat.bell is not None and not seat.gone:
                self._shop.bells.tell(seat, wire.failed(following, verdicts.encode(verdict)))

    @property
    def succeeded(self) -> Verdict | None:
        """The verdict with a successor, once everything before it has ended; None as long as it has not."""
        verdict = next((verdict for verdict in self.ledger.verdicts if verdict.successor), None)
        if verdict is None or self.running is not None or self.ledger.startable() is not None:
            return None
        if any(instance.number < verdict.from_instance for instance in self.ledger.open()):
            return None
        return verdict if self.posts.idle and not self._late else None

    def close(self) -> None:
        """Stops what runs; peers are told that it is no fault."""
        if self.running is not None:
            self.links.abandon(self.running.stop())
        self.running = None
        self.ledger.instances.clear()  # nothing may look into an arena when it is closed
        self.close_links()

    def close_links(self) -> None:
        """Says goodbye to the peers."""
        self.posts.close()
        self.flood.close()
        self._stages.close()
        self.links.close()
