"""Messages between two workers, apart from the plans: one stream out per peer, and one in per link.

Links of this kind go one way, the sender dials, and nothing else uses them; they are watched in the group loop's one
wait, and each moves on when it can.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.engine.base.poller import HANGUP_EVENTS, Poller
from collectived_runtime.engine.run.links import LinkHandback, PeerNetwork, get_peer_address
from collectived_runtime.engine.run.message import MAX_DESCRIPTION
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.hello import NONCE_BYTES, LinkHello
from collectived_runtime.transport.link import BytesLike, Link, LinkBroken, LinkProtocolError

STEP_BYTES = 4 << 20  # moved on one link between two looks at the world
_MOST_PARTS = 64  # given to the system at once


# Dials a peer; is handed what to call with the link, and what to call where there will be none.
Dialer = Callable[[Callable[[Link], None], Callable[[LinkBroken], None]], None]


@dataclass(slots=True, eq=False)
class OutgoingMessage:
    """A message on its way out: what is left of it, whose memory that is, and what to call when the system has it."""

    sender: int
    parts: deque[BytesLike]
    on_sent: Callable[[], None]
    number: int = -1  # of the send, where it is one


class SendStream:
    """Messages for one peer, one after another.

    `broken` is called when the link ends, `gone` when the peer has left.
    """

    def __init__(
        self,
        watch: Poller,
        dial: Dialer,
        broken: Callable[[LinkBroken], None],
        part: LinkHandback,
        gone: Callable[[int], None] = lambda task: None,
    ) -> None:
        self._poller = watch
        self._broken = broken
        self._on_peer_gone = gone
        self._hand_back_link = part
        self._link: Link | None = None
        self.bytes_sent = 0  # bytes
        self._queue: deque[OutgoingMessage] = deque()
        self._dead = False  # nothing will go this way any more; a verdict says why
        dial(self._on_connected, self._on_unreachable)

    @property
    def idle(self) -> bool:
        return not self._queue

    @property
    def link(self) -> Link | None:
        """None: it is on its way, or has ended."""
        return self._link

    def send(self, message: OutgoingMessage) -> None:
        if self._dead:
            return
        self._queue.append(message)
        if self._link is not None and len(self._queue) == 1:
            self._event(self._link, select.POLLOUT)  # the kernel has room, most likely
            if self._queue and self._link is not None:
                self._poller.change(self._link.stream.fileno(), select.POLLIN | select.POLLOUT)

    def discard(self, sender: int, number: int | None = None) -> None:
        """The memory of this rank is read no more: what has begun goes on from a copy, the rest not at all.

        Args:
            number: only that of one of its sends.
        """
        begun = self._queue[0] if self._queue and self._link is not None and self._link.is_mid_send else None
        theirs = [message for message in self._queue if message.sender == sender and number in (None, message.number)]
        for message in theirs:
            if message is begun:
                message.parts = deque([b"".join(message.parts)])
            else:
                self._queue.remove(message)

    def close(self) -> None:
        """Give the link back, and say goodbye if that cuts no message off."""
        self._queue.clear()
        if self._link is not None:
            self._poller.remove(self._link.stream.fileno())
            self._hand_back_link(self._link)
            self._link = None

    def _on_connected(self, link: Link) -> None:
        self._link = link
        events = select.POLLIN | (select.POLLOUT if self._queue else 0)
        self._poller.add(link.stream.fileno(), events, lambda events: self._event(link, events))

    def _event(self, link: Link, events: int) -> None:
        try:
            if events & (select.POLLIN | HANGUP_EVENTS) and (header := link.read_header()) is not None:
                # Nothing comes this way but a farewell: a verdict says what it means for the queue, and what follows.
                self._end(link, whole=frames.parse(header).keeps_connection)
                self._on_peer_gone(link.peer)
            elif events & select.POLLOUT:
                self._flush(link)
        except (LinkBroken, frames.BadFrame) as error:
            self._end(link, whole=False)
            self._broken(_of_peer(error, link.peer))

    def _on_unreachable(self, error: LinkBroken) -> None:
        self._dead = True
        self._queue.clear()
        self._broken(error)

    def _end(self, link: Link, *, whole: bool) -> None:
        self._poller.remove(link.stream.fileno())
        if whole:
            self._hand_back_link(link)
        else:
            link.close()
        self._link = None
        self._dead = True
        self._queue.clear()

    def _flush(self, link: Link) -> None:
        budget = STEP_BYTES
        while self._queue and budget > 0:
            message = self._queue[0]
            taken = link.send(list(message.parts)[:_MOST_PARTS])
            link.is_mid_send = True  # even of what was not taken some may be on its way
            if not taken:
                return
            self.bytes_sent += taken
            budget -= taken
            while message.parts and taken >= len(message.parts[0]):
                taken -= len(message.parts.popleft())
            if taken:
                message.parts[0] = memoryview(message.parts[0])[taken:]
            link.is_mid_send = bool(message.parts)
            if not message.parts:
                self._queue.popleft()
                message.on_sent()
        if not self._queue:
            self._poller.change(link.stream.fileno(), select.POLLIN)


def accept_links(network: PeerNetwork, channel: int, come: Callable[[Link], None]) -> None:
    """Hands the links that peers dial on this channel to `come`, in another thread."""
    topology = network.topology
    others = [peer.task for place, peer in enumerate(topology.peers) if place != topology.place]
    keys = [(topology.group.key, network.generation, task, channel) for task in others]
    network.link_provider.expect_links(keys, come)


def make_dialer(
    network: PeerNetwork,
    channel: int,
    place: int,
    closed: Callable[[], bool],
    is_new: bool = False,
) -> Dialer:
    """Return a function that dials a peer and passes on the link in the group loop's thread.

    The link is dropped where the stream is closed meanwhile.

    Args:
        is_new: a connection that was kept will not do.
    """
    topology, poller = network.topology, network.poller
    peer, me = topology.peers[place], topology.peers[topology.place].task
    hello = LinkHello(me, peer.task, topology.group.key, network.generation, channel, os.urandom(NONCE_BYTES))

    def reach(there: Callable[[Link], None], broken: Callable[[LinkBroken], None]) -> None:
        def arrived(link: Link) -> None:  # in the exchange's thread
            poller.call_soon_threadsafe(lambda: link.close() if closed() else there(link), link.close)

        def failed(error: LinkBroken) -> None:
            poller.call_soon_threadsafe(lambda: None if closed() else broken(error))

        incarnation = "" if is_new else peer.incarnation
        network.link_provider.dial(DialRequest(get_peer_address(peer), hello, arrived, failed, incarnation=incarnation))

    return reach


# Given the frame and the description of a message, the memory for its leaves; None: there is none now. May be called
# again with the same.
AllocateBuffers = Callable[[frames.Frame, bytes], Sequence[NDArray[np.uint8]] | None]


class ReceiveStream:
    """Messages from one peer.

    `begin` makes room for what comes, `arrived` is called when its last byte is there, `gone` when the peer has parted:
    nothing more will come.
    """

    def __init__(
        self,
        network: PeerNetwork,
        link: Link,
        kind: frames.FrameKind,
        begin: AllocateBuffers,
        arrived: Callable[[frames.Frame], None],
        broken: Callable[[LinkBroken], None],
        gone: Callable[[int], None] = lambda task: None,
    ) -> None:
        self._poller = network.poller
        self._hand_back_link = network.make_handback()
        self._on_peer_gone = gone
        self._link = link
        self._at_frame_boundary = True  # nothing but whole messages has been read
        self._closed = False
        self._kind = kind
        self._allocate_buffers = begin
        self._on_message = arrived
        self._broken = broken
        self._reading = self._read_messages()
        self._poller.add(link.stream.fileno(), select.POLLIN, self._event)

    @property
    def link(self) -> Link | None:
        """None: it has ended."""
        return None if self._closed else self._link

    @property
    def bytes_received(self) -> int:
        """Bytes received over this stream."""
        return self._link.bytes_received

    def resume(self) -> None:
        """Ask again for memory that was not there, and read on."""
        if not self._closed:
            self._event(0)

    def close(self) -> None:
        """Give the link back."""
        if not self._closed:
            self._closed = True
            self._poller.remove(self._link.stream.fileno())
            self._hand_back_link(self._link, whole=self._at_frame_boundary)

    def _event(self, events: int) -> None:
        try:
            next(self._reading)
        except StopIteration:
            self.close()
            self._on_peer_gone(self._link.peer)
        except (LinkBroken, frames.BadFrame) as error:
            self._closed = True
            self._poller.remove(self._link.stream.fileno())
            self._link.close()
            self._broken(_of_peer(error, self._link.peer))

    def _read_messages(self) -> Iterator[None]:
        """Read message after message; each yield waits for the link."""
        link = self._link
        while True:
            header = link.read_header()
            if header is None:
                yield
                continue
            frame = frames.parse(header)
            if frame.kind is frames.FrameKind.BYE:
                self._at_frame_boundary = frame.keeps_connection  # else it is closed there
                return
            if frame.kind is not self._kind or frame.length > MAX_DESCRIPTION:
                raise LinkProtocolError(f"a {frame.kind.name} of {frame.length} bytes, expected a {self._kind.name}")
            link.consume_header()
            self._at_frame_boundary = False
            description = bytearray(frame.length)
            yield from self._fill(memoryview(description))
            described = bytes(description)
            places = self._allocate_buffers(frame, described)
            if places is None:  # until there is room, or a verdict, nothing behind this is read
                self._poller.change(link.stream.fileno(), 0)
                while places is None:
                    yield
                    places = self._allocate_buffers(frame, described)
                self._poller.change(link.stream.fileno(), select.POLLIN)
            for place in places:
                yield from self._fill(place.data)
            self._at_frame_boundary = True
            self._on_message(frame)

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
    return type(error)(str(error), peer) if isinstance(error, LinkBroken) else LinkProtocolError(str(error), peer)
