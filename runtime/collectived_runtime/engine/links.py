"""A lane's links: one per peer place and channel, asked for at first use, watched while they live.

They are of one generation. When that ends, its links are given back and may serve the next (`Parting`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from collectived_proto.types import Peer
from collectived_runtime.engine.topology import Topology
from collectived_runtime.engine.watch import ENDED, Watch
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.hello import NONCE_BYTES, Hello
from collectived_runtime.transport.link import Link, LinkBroken, LinkMisused
from collectived_runtime.transport.reception import Call, LinkKey

LEFT_TEXT = "it has left the group"
_END = select.POLLRDHUP  # of a link that a strand holds without waiting for it: nothing else would show its end


class LinkParted(LinkBroken):
    """The peer has said goodbye: all of its ranks have left the group."""


class Exchange(Protocol):
    """Where links come from (the reception, or a network of tests)."""

    def dial(self, call: Call) -> None: ...

    def expect(self, key: LinkKey, arrived: Callable[[Link], None]) -> None: ...

    def forget(self, key: int, generation: int) -> None: ...

    def keep(self, link: Link, farewell: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Parting:
    """How a generation parts from its links, which may then serve another one."""

    exchange: Exchange
    key: int
    generation: int

    def __call__(self, link: Link, *, whole: bool = True) -> None:
        """Says farewell, so that its end is no fault for the peer, and gives the link away.

        Args:
            whole: nothing has been read there but whole frames; else the link is closed.
        """
        farewell = frames.bye(self.key, self.generation, keeps=whole)
        said = 0
        if not link.midway_out:
            with contextlib.suppress(LinkBroken):
                said = link.send([farewell])
        if whole and said == len(farewell):
            self.exchange.keep(link, farewell)
        else:
            link.close()


def address_of(text: str) -> tuple[str, int]:
    """`host:port` in two; raises ValueError where that is no such thing."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def place_of(peer: Peer) -> tuple[str, int]:
    """Where a peer says that it is: port 0, which nobody dials, where that is no address."""
    try:
        return address_of(peer.link_address)
    except ValueError:
        return peer.link_address, 0


class Links:
    """Of two workers the one with the lower task dials, so that there is never a pair of links for one purpose.

    A link belongs to the strand that runs over it. Between strands it is *idle*: the next header, or the end, is read
    here.

    Args:
        broken: called in the lane's thread when an idle link ends, or a link cannot be had.
        early: called there with a frame that has come on an idle link; may raise LinkBroken.
    """

    def __init__(
        self,
        topology: Topology,
        generation: int,
        exchange: Exchange,
        watch: Watch,
        broken: Callable[[LinkBroken], None],
        early: Callable[[Link, frames.Frame], None],
    ) -> None:
        self._topology = topology
        self._generation = generation
        self._exchange = exchange
        self._part = Parting(exchange, topology.group.key, generation)
        self._watch = watch
        self._broken = broken
        self._early = early
        self._links: dict[tuple[int, int], Link | None] = {}  # (place, channel); None: on its way
        self._watched: dict[Link, int] = {}  # links and the events asked for
        self._used: Mapping[Link, int] = {}
        self._past_sent = self._past_received = 0
        self._gone: set[int] = set()  # peers whose lanes have said goodbye
        self._abandoned: set[Link] = set()  # perhaps amid a frame: nobody reads them any more
        self.ready: set[Link] = set()  # links with news since `ready` was cleared
        self.closed = False

    @property
    def any(self) -> bool:
        """Whether there is one, or one is on its way."""
        return bool(self._links)

    def __iter__(self) -> Iterator[Link]:
        """May be read from any thread."""
        return iter([link for link in list(self._links.values()) if link is not None])

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received in this generation, headers included."""
        sent, received = self._past_sent, self._past_received  # first: what is dropped meanwhile is not counted twice
        links = list(self)
        return sent + sum(link.sent for link in links), received + sum(link.received for link in links)

    def get(self, places: Iterable[int], channel: int) -> dict[int, Link] | None:
        """The links to these places, or None while one of them is on its way; asks for what nobody has asked for."""
        found: dict[int, Link] = {}
        whole = True
        for place in places:
            if (place, channel) not in self._links:
                if (task := self._topology.peers[place].task) in self._gone:
                    self._links[place, channel] = None
                    self._watch.ask(functools.partial(self._parted, task))  # not amid a step of what runs
                else:
                    self._ask(place, channel)
            link = self._links[place, channel]
            if link is None:
                whole = False
            else:
                found[place] = link
        return found if whole else None

    def add(self, link: Link) -> None:
        """A link that was asked for is there."""
        place = next(p for p, peer in enumerate(self._topology.peers) if peer.task == link.peer)
        self._links[place, link.channel] = link

    def use(self, used: Mapping[Link, int]) -> None:
        """Watches links of running strands for what they wait for, others for their end, parked ones for nothing."""
        before, self._used = self._used, used
        come_along = []  # what was read together with the last bytes of a strand, so that poll does not tell of it
        for link in self:
            if link in self._abandoned:
                continue
            if link.parked:  # who waits for it has seen what is there, and it was not for him
                if link in before and link not in used:
                    come_along.append(link)
                events = used.get(link, 0) & ~select.POLLIN
            else:
                events = used.get(link, 0) or (_END if link in used else select.POLLIN)
            known = self._watched.get(link)
            if known is None:
                self._watch.add(link.stream.fileno(), events, functools.partial(self._event, link))
            elif known != events:
                self._watch.change(link.stream.fileno(), events)
            self._watched[link] = events
        for link in come_along:
            self._look(link, 0)

    def look(self) -> None:
        """Now that no strand holds any: takes what has waited on links, or came along with the last frames."""
        self._used = {}
        for link in self:
            if link.parked and link not in self._abandoned:
                self._look(link, 0)

    def abandon(self, held: Iterable[Link]) -> None:
        """The strands that held these links have been stopped: what comes next there is nobody's to understand."""
        for link in held:
            self._abandoned.add(link)
            if self._watched.pop(link, None) is not None:
                self._watch.remove(link.stream.fileno())

    def drop(self, link: Link) -> None:
        """This link has ended; the next use asks for another."""
        self._forget(link)
        link.close()

    def _forget(self, link: Link) -> None:
        self._links = {key: known for key, known in self._links.items() if known is not link}
        self._abandoned.discard(link)
        self._past_sent += link.sent
        self._past_received += link.received
        if self._watched.pop(link, None) is not None:
            self._watch.remove(link.stream.fileno())

    def drop_peer(self, task: int) -> None:
        for link in self:
            if link.peer == task:
                self.drop(link)

    def close(self) -> None:
        """Parts from all of them."""
        self.closed = True
        for link in self:
            whole = link not in self._abandoned
            self._forget(link)
            self._part(link, whole=whole)
        self._links.clear()
        self._exchange.forget(self._topology.group.key, self._generation)

    def _event(self, link: Link, events: int) -> None:
        self.ready.add(link)
        if not self._used.get(link):  # else the strand that waits for it will see
            self._look(link, events)

    def _look(self, link: Link, events: int) -> None:
        """Takes the next header on a link that nobody waits for; of one that a strand holds only its end matters."""
        try:
            header = link.header()
            if header is None:
                return
            frame = frames.parse(header)
            if frame.kind is frames.FrameKind.BYE:
                if link not in self._used:  # else it is for the strand to find
                    self._gone.add(link.peer)
                    if frame.keeps:
                        self._forget(link)
                        self._part(link)
                    else:
                        self.drop(link)
            elif events & ENDED:
                raise LinkBroken("the connection was reset")
            elif link not in self._used:
                self._early(link, frame)
        except frames.BadFrame as error:
            self.drop(link)
            self._broken(LinkMisused(str(error), link.peer))
        except LinkBroken as error:
            self.drop(link)
            error.peer = link.peer
            self._broken(error)

    def _parted(self, task: int) -> None:
        self._broken(LinkParted(LEFT_TEXT, task))

    def _lost(self, task: int, why: str) -> None:
        self._broken(LinkBroken(why, task))

    def _ask(self, place: int, channel: int) -> None:
        self._links[place, channel] = None
        me = self._topology.peers[self._topology.place].task
        peer = self._topology.peers[place]
        key = self._topology.group.key

        def arrived(link: Link) -> None:  # in the exchange's thread
            self._watch.ask(lambda: link.close() if self.closed else self.add(link), link.close)

        def failed(task: int, why: str) -> None:
            self._watch.ask(lambda: None if self.closed else self._lost(task, f"it cannot be reached: {why}"))

        if me < peer.task:
            hello = Hello(me, peer.task, key, self._generation, channel, os.urandom(NONCE_BYTES))
            self._exchange.dial(Call(place_of(peer), hello, arrived, failed, incarnation=peer.incarnation))
        else:
            self._exchange.expect((key, self._generation, peer.task, channel), arrived)
