"""Posts: sends and recvs between two ranks, apart from the group's instances.

A letter is taken from its sender at once: into a slot of its receiver where that is local, else over a link to the
receiver's worker, which keeps it until somebody asks for it. So two ranks that both send first and then receive both
complete. Letters of one address (receiver, sender, tag) keep their order; a send is complete when nobody reads its
memory any more, a recv when its letter is there. What waits when a verdict comes fails a moment later, for letters of
a rank that has left may still be on their way; where a rank has left in order, only what waits for it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from collectived_proto.codec import collective_from_proto
from collectived_proto.errors import Code, InvalidArgumentError
from collectived_proto.local import wire
from collectived_proto.types import Recv, Send, Verdict
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine import letter as letters
from collectived_runtime.engine import preliminary
from collectived_runtime.engine.counters import POINT_TO_POINT
from collectived_runtime.engine.execute import AGAIN
from collectived_runtime.engine.ledger import OutOfTurn, Prepared
from collectived_runtime.engine.links import Parting
from collectived_runtime.engine.mail import Parcel, WayIn, WayOut, dial, expect
from collectived_runtime.engine.program import CHANNELS
from collectived_runtime.engine.reports import Reports
from collectived_runtime.engine.results import Exhausted, Slot
from collectived_runtime.engine.seat import Seat, Sources
from collectived_runtime.engine.strand import Wait, copied
from collectived_runtime.engine.workshop import Workshop
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link, LinkBroken, LinkMisused, Part

CHANNEL = CHANNELS  # the one after those of strands
SHARE = 4  # letters that nobody has asked for may take one part in so many of the worker's memory
LAST_LETTERS_SECONDS = 0.1  # after a verdict
_WORKER = -1  # holds the slots of letters that nobody has asked for yet


@dataclass(slots=True, eq=False)
class Post:
    """A send or recv that somebody waits for. `other` is the rank at its other end."""

    rank: int
    number: int
    prepared: Prepared
    other: int
    deadline: float
    timeout: float
    since: float
    stall_at: float
    overdue: bool = False  # reported
    stalled: bool = False  # the same

    @property
    def tag(self) -> int:
        operation = self.prepared.collective.operation
        assert isinstance(operation, (Send, Recv))
        return operation.tag

    @property
    def text(self) -> str:
        """`recv(source=0, tag=3) at train.py:8`"""
        site = self.prepared.collective.site
        return f"{self.prepared.op}{f' at {site}' if site else ''}"


class Posts:
    """Of one generation. Runs in the lane's thread.

    Args:
        fail: tells a rank that one of its posts has failed.
        broken: told when a peer is gone.
    """

    def __init__(
        self,
        shop: Workshop,
        generation: int,
        reports: Reports,
        fail: Callable[[Seat, int, Verdict], None],
        broken: Callable[[LinkBroken], None],
    ) -> None:
        self._shop = shop
        self._generation = generation
        self._part = Parting(shop.around.exchange, shop.topology.group.key, generation)
        self._reports = reports
        self._fail = fail
        self._broken = broken
        self._next: dict[int, int] = {}  # by rank, the number of its next post
        self._pending: dict[tuple[int, int], Post] = {}  # by rank and number
        self._asking: dict[letters.Address, deque[Post]] = {}  # recvs whose letter has not come
        self._boxes: dict[letters.Address, deque[Slot]] = {}  # letters that nobody has asked for
        self._arriving: dict[Link, Slot] = {}
        self._copying: deque[Iterator[Wait]] = deque()
        self._out: dict[int, WayOut] = {}  # by place
        self._in: list[WayIn] = []
        self._over: tuple[Verdict, float] | None = None  # the verdict on all of this, and when it is carried out
        self._left: dict[int, tuple[Verdict, float]] = {}  # the same for posts with a rank that has left in order
        self._closed = False
        expect(shop, generation, CHANNEL, self._come)

    @property
    def idle(self) -> bool:
        """Whether nothing of what was submitted here is still on its way, or need arrive any more."""
        if self._pending or self._copying:
            return False
        return self._over is not None or all(way.idle for way in self._out.values())

    @property
    def pending(self) -> list[Post]:
        """What somebody waits for; may be read from any thread."""
        return list(self._pending.values())

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received over links of their own; may be read from any thread."""
        return sum(way.sent for way in list(self._out.values())), sum(way.received for way in list(self._in))

    # From ranks

    def submit(self, seat: Seat, ring: wire.Ring, prepared: Prepared) -> None:
        """A rank submits a send or a recv.

        Raises:
            OutOfTurn: it skips a number, or has too many outstanding.
        """
        expected = self._next.get(seat.rank, wire.POST)
        if ring.instance < expected:
            for message in seat.outcome(ring.instance):
                self._shop.bells.tell(seat, message)
            return
        mine = sum(rank == seat.rank for rank, _ in self._pending)
        if ring.instance > expected or mine >= wire.MAX_OUTSTANDING:
            raise OutOfTurn(f"rank {seat.rank} submitted post {ring.instance - wire.POST} with {mine} outstanding")
        self._next[seat.rank] = ring.instance + 1
        operation = prepared.collective.operation
        now = time.monotonic()
        deadline = now + ring.remaining if ring.remaining else math.inf
        times = (deadline, ring.timeout, now, now + self._shop.around.stall_after)
        match operation:
            case Send(to, tag):
                sources = seat.sources(prepared, ring)
                self._send(seat, Post(seat.rank, ring.instance, prepared, to, *times), (to, seat.rank, tag), sources)
            case Recv(source, tag):
                self._receive(Post(seat.rank, ring.instance, prepared, source, *times), (seat.rank, source, tag))
            case _:
                raise wire.Malformed(f"{operation} numbered as a send or recv")

    def drop(self, rank: int) -> None:
        """This rank asks for nothing any more; what it has sent goes on."""
        for address in [address for address in self._boxes if address[0] == rank]:
            for slot in self._boxes.pop(address):
                self._shop.results.release(slot.number, _WORKER)
        for key in [key for key, post in self._pending.items() if key[0] == rank]:
            if isinstance(self._pending[key].prepared.collective.operation, Recv):
                self._forget(self._pending.pop(key))

    def miss(self) -> None:
        """Somebody has left: what waits for them does so in vain."""
        for post in self._pending.values():
            self._reports.missed(post.rank, post.other, post.text)

    def _gone(self, task: int) -> None:
        """A worker has parted, for none of its ranks will send or receive any more."""
        self._reports.gone(task)
        self.miss()

    def let_go(self, rank: int) -> None:
        """The memory of this rank must not be read any more."""
        for way in self._out.values():
            way.let_go(rank)
        self._copying.clear()  # the generation is over; letters between local ranks go with it

    # What is due

    def advance(self) -> bool:
        """Copies on; whether there is more to copy."""
        if self._copying and next(self._copying[0], None) is None:
            self._copying.popleft()
        return bool(self._copying)

    def wakeup(self) -> float:
        """When `due` has something to do; inf where nothing is to come."""
        if not self._pending:
            return math.inf
        times = [math.inf]
        for post in self._pending.values():
            times.append(post.stall_at)
            if not post.overdue:
                times.append(post.deadline)
            if (ending := self._ending(post)) is not None:
                times.append(ending[1])
        return min(times)

    def due(self, now: float) -> None:
        for post in list(self._pending.values()):
            ending = self._ending(post)
            if ending is not None and ending[1] <= now:
                self._forget(self._pending.pop((post.rank, post.number)))
                for way in self._out.values():  # its caller may use its memory again
                    way.let_go(post.rank, post.number)
                if self._over is not None:
                    self._copying.clear()
                self._record(post, ending[0])
                self._shop.counters.failure(post.prepared.collective.operation, POINT_TO_POINT, ending[0].code)
                self._fail(self._shop.bells.seats[post.rank], post.number, ending[0])
            elif post.deadline <= now and not post.overdue:
                post.overdue = True
                self._reports.overdue(post.rank, post.other, post.timeout, post.text)
            elif post.stall_at <= now:
                waited = now - post.since
                self._shop.counters.stalls += not post.stalled
                post.stalled = True
                post.stall_at = now + max(self._shop.around.stall_after, waited)  # again after twice the time
                self._reports.unanswered(post.rank, post.other, waited, post.text)

    def rule(self, verdict: Verdict) -> None:
        last_letters = 0.0 if verdict.code == Code.DEADLINE_EXCEEDED else LAST_LETTERS_SECONDS  # they had their time
        carried_out = (verdict, time.monotonic() + last_letters)
        if verdict.orderly:
            for member in verdict.missing:
                self._left.setdefault(member.rank, carried_out)
        elif self._over is None:
            self._over = carried_out

    def _ending(self, post: Post) -> tuple[Verdict, float] | None:
        """The verdict by which a post fails, and when."""
        return self._over or self._left.get(post.other)

    def close(self) -> None:
        self._closed = True
        for way_out in self._out.values():
            way_out.close()
        for way_in in self._in:
            way_in.close()
        for slot in [*self._arriving.values(), *(slot for box in self._boxes.values() for slot in box)]:
            self._shop.results.release(slot.number, _WORKER)
        self._arriving.clear()
        self._boxes.clear()
        self._copying.clear()

    def _forget(self, post: Post) -> None:
        for asking in self._asking.values():
            if post in asking:
                asking.remove(post)

    # Sending

    def _send(self, seat: Seat, post: Post, address: letters.Address, sources: Sources) -> None:
        ending = self._ending(post)
        if ending is not None:
            self._fail(seat, post.number, ending[0])
            return
        self._pending[post.rank, post.number] = post
        collective = post.prepared.collective
        description = preliminary.word(collective)
        leaves = [sources.leaf(index) for index in range(len(collective.leaves))]
        topology = self._shop.topology
        place = topology.place_of(post.other)
        if place == topology.place:
            self._copying.append(self._copied(post, address, letters.Form.of(collective, description), leaves))
            return
        header = letters.header(topology.group.key, self._generation, address, description, leaves)
        parts: deque[Part] = deque([header, description, *(leaf.data for leaf in leaves if len(leaf))])
        if place not in self._out:
            reach = dial(self._shop, self._generation, CHANNEL, place, lambda: self._closed)
            self._out[place] = WayOut(self._shop.watch, reach, self._broken, self._part, self._gone)
        self._out[place].post(Parcel(post.rank, parts, lambda: self._sent(post), post.number))
        self._reports.missed(post.rank, post.other, post.text)

    def _copied(
        self, post: Post, address: letters.Address, form: letters.Form, leaves: Sequence[NDArray[np.uint8]]
    ) -> Iterator[Wait]:
        slot = self._slot(address, form)
        if slot is None:
            return
        for leaf, place in zip(leaves, form.places(slot.memory), strict=True):
            yield from copied(leaf, place)
            yield AGAIN
        self._sent(post)
        self._put(address, slot)

    def _sent(self, post: Post) -> None:
        if self._pending.pop((post.rank, post.number), None) is not None:
            self._record(post)
            self._count(post, sum(leaf.nbytes for leaf in post.prepared.collective.leaves))
            self._tell(post.rank, wire.Done(post.number, 0, True, False))

    # Receiving

    def _come(self, link: Link) -> None:  # in the exchange's thread
        self._shop.watch.ask(lambda: link.close() if self._closed else self._take(link), link.close)

    def _take(self, link: Link) -> None:
        def begin(frame: frames.Frame, description: bytes) -> Sequence[NDArray[np.uint8]] | None:
            form, address = self._read(link, frame, description)
            slot = self._slot(address, form)
            if slot is None:
                return None
            self._arriving[link] = slot
            return form.places(slot.memory)

        def arrived(frame: frames.Frame) -> None:
            self._put(letters.address(frame), self._arriving.pop(link))

        def broken(error: LinkBroken) -> None:
            slot = self._arriving.pop(link, None)
            if slot is not None:
                self._shop.results.release(slot.number, _WORKER)
            self._broken(error)

        kind = frames.FrameKind.LETTER
        self._in.append(WayIn(self._shop.watch, link, kind, begin, arrived, broken, self._part, self._gone))

    def _read(self, link: Link, frame: frames.Frame, description: bytes) -> tuple[letters.Form, letters.Address]:
        """How a letter of a peer lies in a slot, and whom it is for; raises LinkBroken where it can be for nobody."""
        topology = self._shop.topology
        address = letters.address(frame)
        if (frame.key, frame.generation) != (topology.group.key, self._generation) or address[0] not in topology.ranks:
            raise LinkMisused(f"a letter for rank {address[0]} of generation {frame.generation}")
        try:
            collective = collective_from_proto(common_pb2.Collective.FromString(description))
        except (DecodeError, InvalidArgumentError) as error:
            raise LinkMisused(f"a letter whose description cannot be read: {error}") from None
        if sum(leaf.nbytes for leaf in collective.leaves) != frame.offset:
            raise LinkMisused(f"a letter of {frame.offset} bytes, which is not what it describes")
        return letters.Form.of(collective, description), address

    def _slot(self, address: letters.Address, form: letters.Form) -> Slot | None:
        """Memory for a letter; where there is none, its sender is at fault."""
        receiver, sender, tag = address
        try:
            if not self._asking.get(address):
                self._make_sure(form.size)
            return self._shop.results.take(form.size, (_WORKER,))
        except (Exhausted, OSError) as error:
            self._reports.unclaimed(receiver, sender, f"{form.size} bytes with tag {tag}: {error}")
            return None

    def _make_sure(self, size: int) -> None:
        """Raises Exhausted where letters that nobody has asked for would take more than their share of memory."""
        kept = sum(slot.size for box in self._boxes.values() for slot in box)
        kept += sum(slot.size for slot in self._arriving.values())
        most = self._shop.around.budget.limit // SHARE
        if kept + size > most:
            raise Exhausted(f"{kept} bytes wait to be received already, and {most} may")

    def _put(self, address: letters.Address, slot: Slot) -> None:
        """A letter is there: for the first who asks."""
        asking = self._asking.get(address)
        if asking:
            self._deliver(asking.popleft(), slot)
        elif self._shop.bells.seats[address[0]].gone:
            self._shop.results.release(slot.number, _WORKER)
        else:
            self._boxes.setdefault(address, deque()).append(slot)

    def _receive(self, post: Post, address: letters.Address) -> None:
        self._pending[post.rank, post.number] = post
        box = self._boxes.get(address)
        if box:
            self._deliver(post, box.popleft())
            if not box:
                del self._boxes[address]
            return
        self._asking.setdefault(address, deque()).append(post)
        self._reports.missed(post.rank, post.other, post.text)

    def _deliver(self, post: Post, slot: Slot) -> None:
        del self._pending[post.rank, post.number]
        self._record(post, nbytes=slot.size)
        self._count(post, 0)  # its sender's worker has counted it
        slot.holders.add(post.rank)
        self._shop.results.release(slot.number, _WORKER)
        self._tell(post.rank, wire.Done(post.number, 0, True, True, slot.arena.number, slot.offset, slot.number))

    def _record(self, post: Post, verdict: Verdict | None = None, nbytes: int = 0) -> None:
        collective = post.prepared.collective
        nbytes = nbytes or sum(leaf.nbytes for leaf in collective.leaves)
        where = (self._generation, post.number, post.rank, post.other)
        self._shop.tape.post(*where, post.prepared.op, collective.site, nbytes, post.since, verdict)

    def _count(self, post: Post, nbytes: int) -> None:
        operation = post.prepared.collective.operation
        self._shop.counters.tally(operation, POINT_TO_POINT, nbytes, time.monotonic() - post.since)

    def _tell(self, rank: int, done: wire.Done) -> None:
        seat = self._shop.bells.seats[rank]
        message = done.encode()
        seat.record(done.instance, message)
        self._shop.bells.tell(seat, message)
