"""Mail between two workers, apart from the plans: a way out per peer, and a way in per link.

Links of this kind go one way, who sends dials, and nothing else uses them; they are watched in the lane's one wait, and
each moves on when it can.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.engine.letter import MAX_DESCRIPTION
from collectived_runtime.engine.links import Parting, place_of
from collectived_runtime.engine.watch import ENDED, Watch
from collectived_runtime.engine.workshop import Workshop
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.hello import NONCE_BYTES, Hello
from collectived_runtime.transport.link import Link, LinkBroken, LinkMisused, Part
from collectived_runtime.transport.reception import Call

STEP_BYTES = 4 << 20  # moved on one link between two looks at the world
_MOST_PARTS = 64  # given to the system at once


# Dials a peer; is handed what to call with the link, and what to call where there will be none.
Reach = Callable[[Callable[[Link], None], Callable[[LinkBroken], None]], None]


@dataclass(slots=True, eq=False)
class Parcel:
    """A letter on its way out: what is left of it, whose memory that is, and what to do when the system has it all."""

    sender: int
    parts: deque[Part]
    sent: Callable[[], None]
    number: int = -1  # of the post, where it is one


class WayOut:
    """Parcels for one peer, one after another. `broken` is told when the link ends, `gone` when the peer has parted."""

    def __init__(
        self,
        watch: Watch,
        dial: Reach,
        broken: Callable[[LinkBroken], None],
        part: Parting,
        gone: Callable[[int], None] = lambda task: None,
    ) -> None:
        self._watch = watch
        self._broken = broken
        self._gone = gone
        self._part = part
        self._link: Link | None = None
        self.sent = 0  # bytes
        self._queue: deque[Parcel] = deque()
        self._dead = False  # nothing will go this way any more; a verdict says why
        dial(self._there, self._unreachable)

    @property
    def idle(self) -> bool:
        return not self._queue

    def post(self, parcel: Parcel) -> None:
        if self._dead:
            return
        self._queue.append(parcel)
        if self._link is not None and len(self._queue) == 1:
            self._watch.change(self._link.stream.fileno(), select.POLLIN | select.POLLOUT)

    def let_go(self, sender: int, number: int | None = None) -> None:
        """The memory of this rank is read no more: what has begun goes on from a copy, the rest not at all.

        Args:
            number: only that of one of its posts.
        """
        begun = self._queue[0] if self._queue and self._link is not None and self._link.midway_out else None
        theirs = [parcel for parcel in self._queue if parcel.sender == sender and number in (None, parcel.number)]
        for parcel in theirs:
            if parcel is begun:
                parcel.parts = deque([b"".join(parcel.parts)])
            else:
                self._queue.remove(parcel)

    def close(self) -> None:
        """Parts from the link, and says so where no letter is cut off by it."""
        self._queue.clear()
        if self._link is not None:
            self._watch.remove(self._link.stream.fileno())
            self._part(self._link)
            self._link = None

    def _there(self, link: Link) -> None:
        self._link = link
        events = select.POLLIN | (select.POLLOUT if self._queue else 0)
        self._watch.add(link.stream.fileno(), events, lambda events: self._event(link, events))

    def _event(self, link: Link, events: int) -> None:
        try:
            if events & (select.POLLIN | ENDED) and (header := link.header()) is not None:
                # Nothing comes this way but a farewell: a verdict says what it means for the queue, and what follows.
                self._end(link, whole=frames.parse(header).keeps)
                self._gone(link.peer)
            elif events & select.POLLOUT:
                self._send(link)
        except (LinkBroken, frames.BadFrame) as error:
            self._end(link, whole=False)
            self._broken(_of_peer(error, link.peer))

    def _unreachable(self, error: LinkBroken) -> None:
        self._dead = True
        self._queue.clear()
        self._broken(error)

    def _end(self, link: Link, *, whole: bool) -> None:
        self._watch.remove(link.stream.fileno())
        if whole:
            self._part(link)
        else:
            link.close()
        self._link = None
        self._dead = True
        self._queue.clear()

    def _send(self, link: Link) -> None:
        budget = STEP_BYTES
        while self._queue and budget > 0:
            parcel = self._queue[0]
            taken = link.send(list(parcel.parts)[:_MOST_PARTS])
            link.midway_out = True  # even of what was not taken some may be on its way
            if not taken:
                return
            self.sent += taken
            budget -= taken
            while parcel.parts and taken >= len(parcel.parts[0]):
                taken -= len(parcel.parts.popleft())
            if taken:
                parcel.parts[0] = memoryview(parcel.parts[0])[taken:]
            link.midway_out = bool(parcel.parts)
            if not parcel.parts:
                self._queue.popleft()
                parcel.sent()
        if not self._queue:
            self._watch.change(link.stream.fileno(), select.POLLIN)


def expect(shop: Workshop, generation: int, channel: int, come: Callable[[Link], None]) -> None:
    """Hands the links that peers dial on this channel to `come`, in another thread."""
    topology = shop.topology
    for place, peer in enumerate(topology.peers):
        if place != topology.place:
            shop.around.exchange.expect((topology.group.key, generation, peer.task, channel), come)


def dial(
    shop: Workshop,
    generation: int,
    channel: int,
    place: int,
    closed: Callable[[], bool],
) -> Reach:
    """What dials a peer for a way out, and hands it the link in the lane's thread unless it is closed meanwhile."""
    topology, watch = shop.topology, shop.watch
    peer, me = topology.peers[place], topology.peers[topology.place].task
    hello = Hello(me, peer.task, topology.group.key, generation, channel, os.urandom(NONCE_BYTES))

    def reach(there: Callable[[Link], None], broken: Callable[[LinkBroken], None]) -> None:
        def arrived(link: Link) -> None:  # in the exchange's thread
            watch.ask(lambda: link.close() if closed() else there(link), link.close)

        def failed(task: int, why: str) -> None:
            error = LinkBroken(f"it cannot be reached: {why}", task)
            watch.ask(lambda: None if closed() else broken(error))

        shop.around.exchange.dial(Call(place_of(peer), hello, arrived, failed, incarnation=peer.incarnation))

    return reach


# Given the frame and the description of a letter, the memory for its leaves; None: there is none.
Begin = Callable[[frames.Frame, bytes], Sequence[NDArray[np.uint8]] | None]


class WayIn:
    """Mail of one peer. `begin` makes room for what comes, `arrived` is called when its last byte is there, `gone` when
    the peer has parted: nothing more will come."""

    def __init__(
        self,
        watch: Watch,
        link: Link,
        kind: frames.FrameKind,
        begin: Begin,
        arrived: Callable[[frames.Frame], None],
        broken: Callable[[LinkBroken], None],
        part: Parting,
        gone: Callable[[int], None] = lambda task: None,
    ) -> None:
        self._watch = watch
        self._part = part
        self._gone = gone
        self._link = link
        self._whole = True  # nothing but whole letters has been read
        self._over = False
        self._kind = kind
        self._begin = begin
        self._arrived = arrived
        self._broken = broken
        self._reading = self._read()
        watch.add(link.stream.fileno(), select.POLLIN, self._event)

    @property
    def received(self) -> int:
        """Bytes."""
        return self._link.received

    def close(self) -> None:
        """Parts from the link."""
        if not self._over:
            self._over = True
            self._watch.remove(self._link.stream.fileno())
            self._part(self._link, whole=self._whole)

    def _event(self, events: int) -> None:
        try:
            next(self._reading)
        except StopIteration:
            self.close()
            self._gone(self._link.peer)
        except (LinkBroken, frames.BadFrame) as error:
            self._over = True
            self._watch.remove(self._link.stream.fileno())
            self._link.close()
            self._broken(_of_peer(error, self._link.peer))

    def _read(self) -> Iterator[None]:
        """Reads letter after letter; each yield waits for the link."""
        link = self._link
        while True:
            header = link.header()
            if header is None:
                yield
                continue
            frame = frames.parse(header)
            if frame.kind is frames.FrameKind.BYE:
                self._whole = frame.keeps  # else it is closed there
                return
            if frame.kind is not self._kind or frame.length > MAX_DESCRIPTION:
                raise LinkMisused(f"a {frame.kind.name} of {frame.length} bytes, expected a {self._kind.name}")
            link.take_header()
            self._whole = False
            description = bytearray(frame.length)
            yield from self._fill(memoryview(description))
            places = self._begin(frame, bytes(description))
            while places is None:  # a verdict is on its way; until then nothing behind this is read
                self._watch.change(link.stream.fileno(), 0)
                yield
            for place in places:
                yield from self._fill(place.data)
            self._whole = True
            self._arrived(frame)

    def _fill(self, view: memoryview) -> Iterator[None]:
        budget = STEP_BYTES
        while view:
            received = self._link.recv_into(view[:STEP_BYTES])
            view = view[received:]
            budget -= received
            if view and (not received or budget <= 0):
                budget = STEP_BYTES
                yield


def _of_peer(error: LinkBroken | frames.BadFrame, peer: int) -> LinkBroken:
    return type(error)(str(error), peer) if isinstance(error, LinkBroken) else LinkMisused(str(error), peer)
