"""A lane's links: one per peer place and channel, made at first use, for one generation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from collectived_runtime.engine.program import Topology
from collectived_runtime.transport.frame import bye
from collectived_runtime.transport.hello import NONCE_BYTES, Hello
from collectived_runtime.transport.link import Link, LinkBroken
from collectived_runtime.transport.reception import Call, LinkKey


class Exchange(Protocol):
    """Where links come from (the reception, or a network of tests)."""

    def dial(self, call: Call) -> None: ...

    def expect(self, key: LinkKey, arrived: Callable[[Link], None]) -> None: ...

    def forget(self, key: int, generation: int) -> None: ...


def address_of(text: str) -> tuple[str, int]:
    """`host:port` in two."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


class Links:
    """Of two workers the one with the lower task dials, so that there is never a pair of links for one purpose.

    Args:
        arrived, failed: called in whatever thread the exchange runs in.
    """

    def __init__(
        self,
        topology: Topology,
        generation: int,
        exchange: Exchange,
        arrived: Callable[[int, Link], None],
        failed: Callable[[int, str], None],
    ) -> None:
        self._topology = topology
        self._generation = generation
        self._exchange = exchange
        self._arrived = arrived
        self._failed = failed
        self._links: dict[tuple[int, int], Link | None] = {}  # (place, channel); None: on its way

    def __iter__(self) -> Iterator[Link]:
        return iter([link for link in self._links.values() if link is not None])

    def get(self, places: Iterable[int], channel: int) -> dict[int, Link] | None:
        """The links to these places, or None while one of them is on its way; asks for what nobody has asked for."""
        found: dict[int, Link] = {}
        whole = True
        for place in places:
            if (place, channel) not in self._links:
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

    def drop(self, link: Link) -> None:
        """This link has ended; the next use asks for another."""
        self._links = {key: known for key, known in self._links.items() if known is not link}

    def close(self, *, orderly: bool) -> None:
        """Closes all; an orderly end says so to the peers, for whom it is then no fault."""
        for link in self:
            if orderly and not link.midway_out:
                with contextlib.suppress(LinkBroken):
                    link.send([bye(self._topology.group.key, self._generation)])
            link.close()
        self._links.clear()
        self._exchange.forget(self._topology.group.key, self._generation)

    def _ask(self, place: int, channel: int) -> None:
        self._links[place, channel] = None
        me = self._topology.peers[self._topology.place].task
        peer = self._topology.peers[place]
        key = self._topology.group.key
        generation = self._generation
        arrived, failed = self._arrived, self._failed
        if me < peer.task:
            hello = Hello(me, peer.task, key, generation, channel, os.urandom(NONCE_BYTES))
            self._exchange.dial(
                Call(
                    address_of(peer.link_address),
                    hello,
                    lambda link: arrived(generation, link),
                    lambda task, why: failed(task, why),
                )
            )
        else:
            self._exchange.expect((key, generation, peer.task, channel), lambda link: arrived(generation, link))
