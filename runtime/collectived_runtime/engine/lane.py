"""A lane: one thread per group generation and its successors, with one place where it waits.

That place is a `poll` over the doorbells and process descriptors of its members, the links of the group, and an eventfd
by which verdicts, links and requests of other threads arrive. Nothing else blocks: all sockets are non-blocking, and
what runs are generators (`strand.run`) that say what they wait for. So a lane is never deaf to a verdict, a death or a
stray frame, whatever else it does. What happens within a generation is in `generation.py`; here is the loop, and who
belongs to which generation.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from collectived_proto.local import wire
from collectived_proto.local.spin import cores
from collectived_proto.types import GroupInfo, RankPosition, Verdict, shown_name
from collectived_runtime.engine.bells import Bells
from collectived_runtime.engine.counters import Counters
from collectived_runtime.engine.crew import Help
from collectived_runtime.engine.events import Events
from collectived_runtime.engine.generation import Generation
from collectived_runtime.engine.ledger import Ledger
from collectived_runtime.engine.lingering import Lingering
from collectived_runtime.engine.minute import Minute
from collectived_runtime.engine.posts import Post
from collectived_runtime.engine.recorder import Label, Tape
from collectived_runtime.engine.results import Results, Workspace
from collectived_runtime.engine.running import Running
from collectived_runtime.engine.seat import Seat
from collectived_runtime.engine.strand import Tools
from collectived_runtime.engine.stream_order import StreamOrder
from collectived_runtime.engine.topology import Topology
from collectived_runtime.engine.watch import Watch
from collectived_runtime.engine.workshop import Surroundings, Workshop

log = logging.getLogger("collectived.lane")

__all__ = ["Lane", "Surroundings"]

_RING = int(wire.Kind.RING)


class Lane:
    """See the module. Methods without underscore may be called from any thread.

    Raises:
        OSError, RuntimeError: there are no descriptors, or no thread, to be had for it.
    """

    def __init__(self, topology: Topology, surroundings: Surroundings) -> None:
        self.topology = topology
        self.name = shown_name(topology.group.name)
        self._around = surroundings
        self._idle_after = surroundings.idle_after
        here = topology.peers[topology.place].host
        self._spare = cores() - sum(peer.host == here for peer in topology.peers)
        self._watch = Watch()
        self._bells = Bells(self._watch, self._message, self._lost, surroundings.refusals)
        self._results = Results(surroundings.budget, self._bells, self._grown)
        wake = partial(self._watch.ask, _look)
        self._lingering = Lingering(self._bells.tell)
        tools = Tools(Workspace(self._grown), Help(surroundings.crew, wake), Counters(), wake, self._lingering)
        group, tasks = topology.group, tuple(peer.task for peer in topology.peers)
        places = tuple(tuple(peer.ranks) for peer in topology.peers)
        label = Label(self.name, group.key, group.size, topology.ranks, tasks, places)
        tape = Tape(surroundings.recorder, label)
        self._order = StreamOrder(self._watch.ask, self._tell)
        self._events = Events(self._watch.ask, self._bells.lose)
        self._shop = Workshop(
            topology,
            self.name,
            surroundings,
            self._watch,
            self._bells,
            self._results,
            tools,
            tape,
            self._order,
            self._events,
        )
        self._past: dict[int, Verdict] = {}  # how earlier generations of this lane ended
        self._early: list[Callable[[], None]] = []  # what was submitted to a generation that has not begun here
        self._early_verdicts: list[Verdict] = []  # and verdicts about one
        self._over = False
        self._tidy_at = math.inf  # when to look whether memory is idle
        self._done_then = 0  # how much had been done when that was looked at last
        self._generation = Generation(self._shop, topology.group.generation, self._rule)
        self._moved = (self._generation, 0, 0)  # bytes sent and received in the generations before it
        self._thread = threading.Thread(target=self._run, name=f"lane {self.name}", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # nobody else would give back what it has taken until here
            self._generation.close()
            self._watch.close()
            raise

    @property
    def group(self) -> GroupInfo:
        """The group in the generation that is current here, with what the local ranks have finished."""
        ledger = self.ledger
        members = list(self.topology.group.members)
        for rank, standing in list(ledger.standings.items()):
            members[rank] = replace(
                members[rank], last_instance=standing.finished, last_op=standing.op, last_site=standing.site
            )
        return replace(self.topology.group, generation=ledger.generation, members=tuple(members))

    @property
    def seats(self) -> dict[int, Seat]:
        return self._bells.seats

    @property
    def ledger(self) -> Ledger:
        """Of the current generation."""
        return self._generation.ledger

    @property
    def running(self) -> Running | None:
        return self._generation.running

    @property
    def posts(self) -> list[Post]:
        """Sends and recvs that somebody waits for."""
        return self._generation.posts.pending

    @property
    def label(self) -> Label:
        return self._shop.tape.label

    @property
    def stall_after(self) -> float:
        """Seconds after which what waits is said to stall."""
        return self._around.stall_after

    @property
    def notes(self) -> list[str]:
        """What users of this group should know, each once: `on CPU devices: …`."""
        return list(self._shop.notes)

    @property
    def counters(self) -> Counters:
        return self._shop.counters

    @property
    def minute(self) -> Minute:
        """What has been done in the last minute."""
        return self._shop.minute

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from other workers, headers included; never more than has been."""
        generation, sent, received = self._moved
        now = generation.traffic()
        return sent + now[0], received + now[1]

    # From other threads

    def take_seat(self, seat: Seat) -> None:
        """A local rank is about to connect its doorbell."""
        self._bells.seats[seat.rank] = seat
        self._watch.ask(lambda: self._bells.seat(seat))

    def absent(self, rank: int, why: str) -> None:
        """This local rank will never take its seat."""
        self._watch.ask(lambda: self._lost(rank, why))

    def connect(self, rank: int, bell: socket.socket) -> None:
        self._watch.ask(lambda: self._bells.connect(rank, bell, self._results.arenas), bell.close)

    def submit(self, rank: int, message: bytes) -> None:
        """A message of a rank without a doorbell, as it would come over one."""
        self._watch.ask(lambda: self._bells.take(self._bells.seats[rank], message))

    def late(self, rank: int, generation: int, instance: int, op: str, timeout: float) -> None:
        """What a rank without a doorbell was to submit has not come by its own deadline: that ends it for all."""
        self._watch.ask(lambda: self._late(self._bells.seats[rank], generation, instance, op, timeout))

    def hang_up(self, rank: int, why: str) -> None:
        """The session of this rank has ended."""
        self._watch.ask(lambda: self._bells.hang_up(self._bells.seats[rank], why))

    def rule(self, verdict: Verdict) -> None:
        self._watch.ask(lambda: self._rule(verdict))

    def last_words(self) -> None:
        """This worker is about to end: ranks hear now what they would hear at their next collective."""
        self._watch.ask(lambda: self._generation.last_words())

    def query(self, instance: int, answer: Callable[[int, tuple[RankPosition, ...]], None]) -> None:
        """Calls `answer(generation, positions)` in the lane's thread."""
        self._watch.ask(lambda: answer(self._generation.number, self.ledger.positions(instance, time.monotonic())))

    def report_again(self) -> None:
        """The coordinator is back, and may not have heard who has gone."""
        self._watch.ask(lambda: self._generation.reports.again())

    def promise(self, generation: int, answer: Callable[[int, int], None]) -> None:
        """Calls `answer(instance, following)` in the lane's thread: nothing starts from that instance on before
        `newcomers`, and `following` is the first that no local rank has submitted."""

        def ask() -> None:
            if generation == self._generation.number:
                self._bells.look()  # what was submitted before somebody asked is kept
            if generation == self._generation.number:
                answer(*self._generation.newcomers.promise())

        self._watch.ask(ask)

    def newcomers(self, generation: int, from_instance: int, waiting: int) -> None:
        """So many wait to join the group, from that instance on; -1: nothing has changed."""

        def take() -> None:
            if generation == self._generation.number:
                self._generation.newcomers.agreed(from_instance, waiting)

        self._watch.ask(take)

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
                current = self._generation
                current.watch_links()
                due = current.wakeup()
                rested = self._bells.wakeup
                self._watch.wait(0.0 if again else min(due, rested, self._tidy_at), self._looks())
                if (now := time.monotonic()) >= due:
                    current.due(now)
                if now >= rested:
                    self._bells.wake(now)
                if now >= self._tidy_at:
                    self._tidy(now)
        except Exception as error:  # whatever it is, neither clients nor peers may wait for this lane any more
            log.exception("lane of group %s: a defect of collectived ends it", self.name)
            self._generation.give_up(error)
        finally:
            self._close()

    def _grown(self) -> None:
        """Memory has been taken from the system: when it has been idle for a while it is given back."""
        if self._tidy_at == math.inf:
            self._tidy_at = time.monotonic() + self._idle_after

    def _tidy(self, now: float) -> None:
        done, before = self._shop.counters.done, self._done_then
        self._done_then = done
        idle = done == before and self.running is None
        self._tidy_at = now + self._idle_after if not idle or self._results.tidy() else math.inf
        if idle:
            self._shop.tools.workspace.tidy()

    def _looks(self) -> bool:
        """Whether what is to come next may come soon, and there is a core to look for it.

        Ranks that have arrived sleep until they hear from us; those that have not may need a core each, and so may the
        other workers of this host.
        """
        missing = self.ledger.awaited
        return 0 < missing <= self._spare

    def _advance(self) -> bool:
        if self._lingering:
            self._lingering.look()
        current = self._generation
        again = current.advance()
        if current.ledger.verdicts:
            self._succeed()
        if current.running is None and not again:
            self._end_if_deserted()
        return again or self._generation is not current

    # Members

    def _message(self, seat: Seat, data: bytes) -> None:
        if data[0] == _RING:  # nearly always
            self._ring(seat, wire.parse_ring(data))
            return
        match wire.kind_of(data):
            case wire.Kind.RELEASE:
                self._release(seat.rank, wire.parse_release(data))
                self._bells.idle(seat)
            case wire.Kind.LEAVE:
                self._generation.leave(seat.rank)
            case wire.Kind.ABORT:
                self._generation.abort(seat.rank, wire.text_of(data))
            case wire.Kind.EVENT:
                self._events.name(seat.rank, *wire.parse_event(data))
            case wire.Kind.PING:
                if seat.reads:
                    held = self._lingering.holds(seat)
                    self._bells.tell(seat, wire.bare(wire.Kind.PONG, "its memory is in use" if held else ""))
                self._bells.idle(seat)
            case kind:
                raise wire.Malformed(f"a client does not send {kind.name}")

    def _ring(self, seat: Seat, ring: wire.Ring) -> None:
        self._release(seat.rank, ring.released)
        if ring.generation == self._generation.number:
            self._generation.submit(seat, ring)
            return
        past = self._past.get(ring.generation)
        if past is not None:
            self._generation.fail(seat, ring.instance, past)
            return
        if len(self._early) >= wire.MAX_OUTSTANDING * len(self.seats):
            raise wire.Malformed(f"a ring of generation {ring.generation}, which nobody has announced")
        self._early.append(lambda: self._ring(seat, ring))

    def _release(self, rank: int, numbers: Iterable[int]) -> None:
        """Result slots, and events, that a rank needs no longer."""
        for number in numbers:
            if number < wire.WORKER_EVENT:
                self._results.release(number, rank)
            else:
                self._order.give_back(rank, number)

    def _tell(self, rank: int, message: bytes) -> None:
        self._bells.tell(self.seats[rank], message)

    def _late(self, seat: Seat, generation: int, instance: int, op: str, timeout: float) -> None:
        past = self._past.get(generation)
        if generation == self._generation.number:
            self._generation.late(seat, instance, op, timeout)
        elif past is not None:
            self._generation.fail(seat, instance, past)
        else:
            self._early.append(lambda: self._late(seat, generation, instance, op, timeout))

    def _lost(self, rank: int, why: str) -> None:
        self._events.drop(rank)
        self._order.drop(rank)
        self._results.drop(rank)
        self._generation.lose(rank, why)

    # Generations

    def _rule(self, verdict: Verdict) -> None:
        if verdict.generation == self._generation.number:
            self._generation.rule(verdict)
            self._succeed()
        elif verdict.generation not in self._past:
            self._early_verdicts.append(verdict)

    def _succeed(self) -> None:
        """Begins the successor generation once everything before the verdict has ended."""
        before = self._generation
        verdict = before.succeeded
        if verdict is None:
            return
        self._past[before.number] = verdict
        before.close_links()
        moved = self.traffic()
        self._generation = Generation(self._shop, verdict.successor, self._rule)
        self._moved = (self._generation, *moved)
        for rank, standing in before.ledger.standings.items():
            self.ledger.standings[rank].gone = standing.gone
        for seat in self.seats.values():
            seat.forget()
        early, self._early = self._early, []
        for submitted in early:
            submitted()
        rulings, self._early_verdicts = self._early_verdicts, []
        for known in rulings:
            self._rule(known)

    # The end

    def _end_if_deserted(self) -> None:
        """A lane ends when its last local rank has gone and nothing that it had submitted can still complete."""
        if self._generation.deserted and self._bells.deserted and self.ledger.startable() is None:
            self._end()

    def _end(self) -> None:
        self._over = True

    def _close(self) -> None:
        self._over = True
        self._generation.close()
        self._bells.close()
        self._events.close()
        self._order.close()
        self._results.close()
        self._around.ended(self)
        self._watch.close()


def _look() -> None:
    """Somebody who helps has done: it is enough that the lane wakes."""
