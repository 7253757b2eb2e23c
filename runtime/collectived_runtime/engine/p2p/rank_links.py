"""Rank links: connections that workers lend to two ranks, over which one sends to the other without any worker.

A link goes one way, and both of its ranks match by themselves (`ipc/rank_messages.py`). The sender's worker makes it
once the sender has sent to that rank before: a pair of sockets on one host, else a connection that it dials for these
two ranks alone, with a frame that says which. The receiver's worker lends its end when the receiver matches by itself.

Where there is no link the ranks send over their workers: that no link can be made is no fault. Nor is it one here that
a link ends; its ranks see that. Each worker keeps its own descriptors, to look whether a peer's host still answers, and
to end the links of a rank that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from collectived_proto.ipc.rank_messages import LinkOffer
from collectived_proto.types import ANY_SOURCE, Send
from collectived_runtime.engine.base.poller import HANGUP_EVENTS
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.compile.program import CHANNELS
from collectived_runtime.engine.p2p.pending_ops import PendingOp
from collectived_runtime.engine.run import message as letters
from collectived_runtime.engine.run.links import PeerNetwork
from collectived_runtime.engine.run.streams import accept_links, make_dialer
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link, LinkBroken, TcpStream

log = logging.getLogger("collectived.group_loop")

CHANNEL = CHANNELS + 2  # after those of messages and verdicts
FIRST_SENDS = 2  # that go over the workers, before a link is made
MAX_LINKS = 32  # out of one rank


class _End(NamedTuple):
    """One end of a link: whose it is, the rank at the other one, and whether its owner sends."""

    rank: int
    peer: int
    is_outgoing: bool


class RankLinkLender:
    """Of one generation. In the group loop's thread.

    Args:
        most_unexpected: bytes of messages that one rank may keep unasked for.
    """

    def __init__(self, network: PeerNetwork, doorbells: Doorbells, most_unexpected: int) -> None:
        self._network = network
        self._doorbells = doorbells
        self._most_unexpected = most_unexpected
        self._matching: set[int] = set()  # ranks that may have links
        self._parted: set[int] = set()  # ranks that get no links any more
        self._sends: Counter[tuple[int, int]] = Counter()  # by sender and receiver, until they have a link
        self._asked: set[tuple[int, int]] = set()  # those for which one was made or tried
        self._links_out: Counter[int] = Counter()  # by sender
        self._ends: dict[_End, Link | socket.socket] = {}
        self._unclaimed: set[_End] = set()  # incoming ones whose ranks do not match by themselves yet
        self._unnamed: set[Link] = set()  # their frame has not come
        self._to_dial: dict[int, deque[tuple[int, int]]] = {}  # by place; the first is being dialled
        self._can_lend = True  # False: connections to other workers are not plain TCP
        self._lock = threading.RLock()  # no link is expected any more once this is closed
        self._closed = False
        accept_links(network, CHANNEL, self._on_link)

    def begin(self, rank: int) -> None:
        """From now on a rank matches by itself: it may have links, and gets those that wait for it."""
        self._matching.add(rank)
        for end in [end for end in self._unclaimed if end.rank == rank]:
            self._unclaimed.discard(end)
            self._lend(end)

    def end(self, rank: int, *, is_lost: bool) -> None:
        """End the links of a rank that has left or is lost, also where its process lives."""
        self._matching.discard(rank)
        self._parted.add(rank)
        for end in [end for end in self._ends if end.rank == rank]:
            self._close_end(end, is_lost=is_lost)

    def note_send(self, sender: int, receiver: int) -> None:
        """A rank has given its worker a message for another one."""
        pair = sender, receiver
        if sender not in self._matching or sender == receiver or pair in self._asked:
            return
        self._sends[pair] += 1
        if self._sends[pair] < FIRST_SENDS or self._links_out[sender] >= MAX_LINKS:
            return
        topology = self._network.topology
        place = topology.place_of(receiver)
        if place == topology.place:
            if receiver in self._matching:
                self._note_asked(pair)
                self._connect_locally(pair)
        elif self._can_lend:
            self._note_asked(pair)
            queue = self._to_dial.setdefault(place, deque())
            queue.append(pair)
            if len(queue) == 1:
                self._dial(place)

    def _note_asked(self, pair: tuple[int, int]) -> None:
        self._asked.add(pair)
        self._links_out[pair[0]] += 1
        del self._sends[pair]

    def list_awaited(self, ops: Iterable[PendingOp]) -> list[Link]:
        """The links to other workers over which ranks wait to send or to receive by themselves."""
        awaited = {
            _End(post.rank, post.peer, isinstance(post.prepared.collective.operation, Send))
            for post in ops
            if post.watched
        }
        return [
            link
            for end, link in self._ends.items()
            if isinstance(link, Link) and (end in awaited or end._replace(peer=ANY_SOURCE) in awaited)
        ]

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for end in list(self._ends):
            self._close_end(end, is_lost=False)
        for link in list(self._unnamed):
            self._drop_unnamed(link)
        self._to_dial.clear()

    # Lending

    def _connect_locally(self, pair: tuple[int, int]) -> None:
        sender, receiver = pair
        try:
            one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            log.debug("no link from rank %d to rank %d: %s", *pair, error)
            return
        incoming, outgoing = _End(receiver, sender, False), _End(sender, receiver, True)
        self._ends |= {incoming: other, outgoing: one}
        for connection in (one, other):
            connection.setblocking(False)
        self._lend(incoming)
        self._lend(outgoing)

    def _lend(self, end: _End) -> None:
        """Send a rank its end."""
        connection = self._ends.get(end)
        local_rank = self._find_rank(end.rank)
        if connection is None:  # an end of a rank that was let go just now
            return
        if local_rank is None:
            self._close_end(end, is_lost=False)
            return
        offer = LinkOffer(self._network.generation, end.peer, end.is_outgoing, self._most_unexpected).encode()
        try:
            self._doorbells.lend(local_rank, offer, _descriptor(connection))
        except OSError as error:
            log.debug("no link between ranks %d and %d: %s", end.rank, end.peer, error)
            self._close_end(end, is_lost=False)

    def _find_rank(self, rank: int) -> LocalRank | None:
        """A rank that may be lent a link."""
        local_rank = self._doorbells.local_ranks.get(rank)
        if rank not in self._matching or local_rank is None or local_rank.doorbell is None:
            return None
        return local_rank

    def _close_end(self, end: _End, *, is_lost: bool) -> None:
        self._unclaimed.discard(end)
        connection = self._ends.pop(end, None)
        if connection is None:
            return
        if is_lost:
            with contextlib.suppress(OSError):  # it has ended
                if not isinstance(connection, Link):
                    connection.shutdown(socket.SHUT_RDWR)
                elif isinstance(connection.stream, TcpStream):
                    connection.stream.shutdown(socket.SHUT_RDWR)
        connection.close()

    # Out to other workers

    def _dial(self, place: int) -> None:
        """Dial the first of those that wait: of two at once the later link would end the earlier one over there."""
        dial = make_dialer(self._network, CHANNEL, place, lambda: self._closed, is_new=True)
        dial(partial(self._on_dialled, place), partial(self._on_unreachable, place))

    def _on_dialled(self, place: int, link: Link) -> None:
        sender, receiver = self._to_dial[place].popleft()
        if not isinstance(link.stream, TcpStream):
            link.close()
            self._can_lend = False
            return
        end = _End(sender, receiver, True)
        key, generation = self._network.topology.group.key, self._network.generation
        said = letters.encode_rank_link(key, generation, sender, receiver)
        try:
            is_named = self._find_rank(sender) is not None and link.send([said]) == len(said)
        except LinkBroken:
            is_named = False
        if is_named:
            self._ends[end] = link
            self._lend(end)
        else:
            link.close()
        self._dial_next(place)

    def _on_unreachable(self, place: int, error: LinkBroken) -> None:
        sender, receiver = self._to_dial[place].popleft()
        log.debug("no link from rank %d to rank %d: %s", sender, receiver, error)
        self._dial_next(place)

    def _dial_next(self, place: int) -> None:
        if self._can_lend and self._to_dial[place]:
            self._dial(place)

    # In from other workers

    def _on_link(self, link: Link) -> None:  # in the exchange's thread
        with self._lock:
            if not self._closed:  # the peer may dial the next at once
                topology, provider = self._network.topology, self._network.link_provider
                provider.expect_links(
                    [(topology.group.key, self._network.generation, link.peer, CHANNEL)], self._on_link
                )
        self._network.poller.call_soon_threadsafe(partial(self._take, link), link.close)

    def _take(self, link: Link) -> None:
        if self._closed or not isinstance(link.stream, TcpStream):
            link.close()
            return
        self._unnamed.add(link)
        self._network.poller.add(link.stream.fileno(), select.POLLIN, partial(self._read_name, link))

    def _read_name(self, link: Link, events: int) -> None:
        try:
            header = link.read_header()
            if header is None and not events & HANGUP_EVENTS:
                return
            end = None if header is None else self._parse_name(link, header)
        except (LinkBroken, frames.BadFrame) as error:
            log.debug("a link of worker %d to one of its ranks: %s", link.peer, error)
            end = None
        if end is None or end in self._ends or end.rank in self._parted:
            self._drop_unnamed(link)
            return
        self._unnamed.discard(link)
        self._network.poller.remove(link.stream.fileno())
        self._ends[end] = link
        if end.rank in self._matching:
            self._lend(end)
        else:
            self._unclaimed.add(end)

    def _parse_name(self, link: Link, header: bytes) -> _End | None:
        """Whose end a link is; None where its peer may not say so. Its sender writes nothing before it is asked to."""
        frame, topology = frames.parse(header), self._network.topology
        group = topology.group.key, self._network.generation
        if frame.kind is not frames.FrameKind.RANK_LINK or (frame.key, frame.generation) != group:
            return None
        sender, receiver = letters.parse_rank_link(frame)
        theirs = next(peer.ranks for peer in topology.peers if peer.task == link.peer)
        if sender not in theirs or receiver not in topology.own_ranks or len(link.unread_bytes) > len(header):
            return None
        return _End(receiver, sender, False)

    def _drop_unnamed(self, link: Link) -> None:
        self._unnamed.discard(link)
        self._network.poller.remove(link.stream.fileno())
        link.close()


def _descriptor(connection: Link | socket.socket) -> int:
    return connection.stream.fileno() if isinstance(connection, Link) else connection.fileno()
