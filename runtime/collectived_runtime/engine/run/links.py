"""A group loop's links: one per peer place and channel, asked for at first use, watched while they live.

They are of one generation. When that ends, its links are given back and may serve the next (`LinkHandback`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from collectived_proto.addresses import parse_address
from collectived_proto.types import Peer
from collectived_runtime.engine.base.poller import HANGUP_EVENTS, Poller
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.run.path_watch import PathWatch
from collectived_runtime.limits.rejections import RejectionCounters
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.connections import LinkKey
from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.hello import NONCE_BYTES, LinkHello
from collectived_runtime.transport.link import Link, LinkBroken, LinkProtocolError, TcpStream

LENT_CHANNEL = 0  # the only one whose links may be lent to ranks
LEFT_TEXT = "it has left the group"
_HANGUP_EVENT = select.POLLRDHUP  # of a link that a task holds without waiting for it: nothing else would show its end


class PeerDeparted(LinkBroken):
    """The peer has said goodbye: all of its ranks have left the group."""


class LinkProvider(Protocol):
    """Where links come from (the connection server, or a network of tests)."""

    def dial(self, call: DialRequest) -> None: ...

    def expect_links(self, keys: Sequence[LinkKey], arrived: Callable[[Link], None]) -> None: ...

    def discard_generation(self, key: int, generation: int) -> None: ...

    def release_link(self, link: Link, farewell: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkHandback:
    """How a generation parts from its links, which may then serve another one."""

    link_provider: LinkProvider
    key: int
    generation: int

    def __call__(self, link: Link, *, whole: bool = True) -> None:
        """Says farewell, so that its end is no fault for the peer, and gives the link away.

        Args:
            whole: nothing has been read there but whole frames; else the link is closed.
        """
        farewell = frames.encode_bye(self.key, self.generation, keeps=whole)
        said = 0
        if not link.is_mid_send:
            with contextlib.suppress(LinkBroken):
                said = link.send([farewell])
        if whole and said == len(farewell):
            self.link_provider.release_link(link, farewell)
        else:
            link.close()


@dataclass(frozen=True, slots=True)
class PeerNetwork:
    """How the workers of one generation reach each other. `poller` watches their links in the group loop's thread.

    Where a peer's host has not answered for `path_timeout` seconds while a task waits for it, its link is broken.
    """

    topology: GroupTopology
    generation: int
    link_provider: LinkProvider
    poller: Poller
    refusals: RejectionCounters
    path_timeout: float = math.inf

    def make_handback(self) -> LinkHandback:
        return LinkHandback(self.link_provider, self.topology.group.key, self.generation)


def get_peer_address(peer: Peer) -> tuple[str, int]:
    """Where a peer says that it is: port 0, which is never dialled, where that is no address."""
    try:
        return parse_address(peer.link_address)
    except ValueError:
        return peer.link_address, 0


class Links:
    """The links of one generation, by peer and channel.

    Of two workers the one with the lower task dials, so that there is never a pair of links for one purpose.

    A link belongs to the task that runs over it. Between tasks it is *idle*: the next header, or the end, is read
    here.

    Args:
        on_broken: called in the group loop's thread when an idle link ends, a link cannot be had, or its path is dead.
        on_early_frame: called there with a frame that has come on an idle link; may raise LinkBroken.
    """

    def __init__(
        self,
        network: PeerNetwork,
        on_broken: Callable[[LinkBroken], None],
        on_early_frame: Callable[[Link, frames.Frame], None],
    ) -> None:
        self._topology = network.topology
        self._generation = network.generation
        self._link_provider = network.link_provider
        self._hand_back = network.make_handback()
        self._poller = network.poller
        self._on_broken = on_broken
        self._on_early_frame = on_early_frame
        self._links: dict[tuple[int, int], Link | None] = {}  # (place, channel); None: on its way
        self._watched_events: dict[Link, int] = {}  # links and the events asked for
        self._links_in_use: Mapping[Link, int] = {}
        self._path_watch = PathWatch(network.path_timeout)
        self._past_sent = self._past_received = 0
        self._departed_peers: set[int] = set()  # peers whose group loops have said goodbye
        self._abandoned: set[Link] = set()  # perhaps amid a frame: they are not read any more
        self._hung_up: set[Link] = set()  # ended amid a task that will find it: poll would report it forever
        self.ready: set[Link] = set()  # links with news since `ready` was cleared
        self.closed = False

    @property
    def has_links(self) -> bool:
        """Whether there is a link, or one is on its way."""
        return bool(self._links)

    def __iter__(self) -> Iterator[Link]:
        """May be read from any thread."""
        return iter([link for link in list(self._links.values()) if link is not None])

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received in this generation, headers included."""
        sent, received = self._past_sent, self._past_received  # first: what is dropped meanwhile is not counted twice
        links = list(self)
        return sent + sum(link.bytes_sent for link in links), received + sum(link.bytes_received for link in links)

    def get(self, places: Iterable[int], channel: int) -> dict[int, Link] | None:
        """The links to these places, or None while one is on its way; asks for each missing one once."""
        found: dict[int, Link] = {}
        whole = True
        for place in places:
            if (place, channel) not in self._links:
                if (task := self._topology.peers[place].task) in self._departed_peers:
                    self._links[place, channel] = None
                    self._poller.call_soon_threadsafe(
                        functools.partial(self._on_peer_departed, task)
                    )  # not amid a step of what runs
                else:
                    self._request(place, channel)
            link = self._links[place, channel]
            if link is None:
                whole = False
            else:
                found[place] = link
        return found if whole else None

    def lend(self, channel: int) -> dict[int, Link]:
        """By place, the links of a channel on which others may read and write while no task runs; see `Link.resume`."""
        return {
            place: link
            for (place, known), link in self._links.items()
            if known == channel
            and link is not None
            and isinstance(link.stream, TcpStream)
            and link not in self._abandoned
            and link not in self._hung_up
            and not link.is_mid_send
        }

    def _can_keep(self, link: Link) -> bool:
        """Whether a link may serve another generation: no rank here or there can have its descriptor."""
        is_lendable = link.channel == LENT_CHANNEL and isinstance(link.stream, TcpStream)
        return not (is_lendable and self._topology.may_lend_links)

    def add(self, link: Link) -> None:
        """Take a link that was asked for."""
        place = next(p for p, peer in enumerate(self._topology.peers) if peer.task == link.peer)
        self._links[place, link.channel] = link

    def update_watches(self, used: Mapping[Link, int]) -> None:
        """Watch links of running tasks for what they wait for, others for their end, parked ones for nothing."""
        before, self._links_in_use = self._links_in_use, used
        if bool(used) != bool(before):
            self._path_watch.start() if used else self._path_watch.stop()
        come_along = []  # links with bytes read together with the last ones of a task: poll does not report them
        for link in self:
            if link in self._abandoned:
                continue
            if link.is_lent:  # even of its end the other process says
                self._unwatch(link)
                continue
            if link.has_header:  # its task has seen the header, which was for another one
                if link in before and link not in used:
                    come_along.append(link)
                events = used.get(link, 0) & ~select.POLLIN
            else:
                events = used.get(link, 0) or (_HANGUP_EVENT if link in used else select.POLLIN)
            if link in self._hung_up and not events:
                continue
            known = self._watched_events.get(link)
            if known is None:
                self._poller.add(link.stream.fileno(), events, functools.partial(self._on_event, link))
            elif known != events:
                self._poller.change(link.stream.fileno(), events)
            self._watched_events[link] = events
        for link in come_along:
            self._poll_link(link, 0)

    def poll_idle(self) -> None:
        """Now that no task holds any: takes what has waited on links, or came along with the last frames."""
        self._links_in_use = {}
        self._path_watch.stop()
        for link in self:
            if link.has_header and link not in self._abandoned:
                self._poll_link(link, 0)

    @property
    def next_deadline(self) -> float:
        """When `on_timer` has something to do; inf where no task waits for a link."""
        return self._path_watch.next_deadline

    def on_timer(self, now: float) -> None:
        """Break a link that a task waits for, and whose peer's host does not answer any more."""
        dead = self._path_watch.look(self._links_in_use, now)
        if dead is not None:  # it stays open: the peer must get the verdict, and no end of the link
            self._on_broken(dead)

    def abandon(self, held: Iterable[Link]) -> None:
        """Read nothing more from these links: the tasks that held them were stopped, perhaps amid a frame."""
        for link in held:
            self._abandoned.add(link)
            self._unwatch(link)

    def drop(self, link: Link) -> None:
        """Close a link that has ended; the next use asks for another."""
        self._unregister(link)
        link.close()

    def _unregister(self, link: Link) -> None:
        self._links = {key: known for key, known in self._links.items() if known is not link}
        self._abandoned.discard(link)
        self._hung_up.discard(link)
        self._past_sent += link.bytes_sent
        self._past_received += link.bytes_received
        self._unwatch(link)

    def _unwatch(self, link: Link) -> None:
        if self._watched_events.pop(link, None) is not None:
            self._poller.remove(link.stream.fileno())

    def drop_peer(self, task: int) -> None:
        for link in self:
            if link.peer == task:
                self.drop(link)

    def close(self) -> None:
        """Say goodbye on all links, and give them back."""
        self.closed = True
        for link in self:
            whole = link not in self._abandoned and self._can_keep(link)
            self._unregister(link)
            self._hand_back(link, whole=whole)
        self._links.clear()
        self._link_provider.discard_generation(self._topology.group.key, self._generation)

    def _on_event(self, link: Link, events: int) -> None:
        self.ready.add(link)
        # Else the task that waits for it will see. One that waits to receive where a frame is parked sees nothing: the
        # link is then watched for nothing, and poll reports its end alone, forever.
        if not self._links_in_use.get(link) or not self._watched_events.get(link):
            self._poll_link(link, events)

    def _poll_link(self, link: Link, events: int) -> None:
        """Take the next header on a link for which no task waits. Of a link that a task holds only its end matters."""
        try:
            header = link.read_header()
            if header is None:
                return
            frame = frames.parse(header)
            if frame.kind is frames.FrameKind.BYE:
                if link in self._links_in_use:  # it is for the task to find
                    if events & HANGUP_EVENTS:
                        self._hung_up.add(link)
                        self._unwatch(link)
                    return
                self._departed_peers.add(link.peer)
                if frame.keeps_connection and self._can_keep(link):
                    self._unregister(link)
                    self._hand_back(link)
                else:
                    self.drop(link)
            elif events & HANGUP_EVENTS:
                raise LinkBroken("the connection was reset")
            elif link not in self._links_in_use:
                self._on_early_frame(link, frame)
        except frames.BadFrame as error:
            self.drop(link)
            self._on_broken(LinkProtocolError(str(error), link.peer))
        except LinkBroken as error:
            self.drop(link)
            error.peer = link.peer
            self._on_broken(error)

    def _on_peer_departed(self, task: int) -> None:
        self._on_broken(PeerDeparted(LEFT_TEXT, task))

    def _request(self, place: int, channel: int) -> None:
        self._links[place, channel] = None
        me = self._topology.peers[self._topology.place].task
        peer = self._topology.peers[place]
        key = self._topology.group.key

        def arrived(link: Link) -> None:  # in the exchange's thread
            self._poller.call_soon_threadsafe(lambda: link.close() if self.closed else self.add(link), link.close)

        def failed(error: LinkBroken) -> None:
            self._poller.call_soon_threadsafe(lambda: None if self.closed else self._on_broken(error))

        if me < peer.task:
            hello = LinkHello(me, peer.task, key, self._generation, channel, os.urandom(NONCE_BYTES))
            self._link_provider.dial(
                DialRequest(get_peer_address(peer), hello, arrived, failed, incarnation=peer.incarnation)
            )
        else:
            self._link_provider.expect_links([(key, self._generation, peer.task, channel)], arrived)
