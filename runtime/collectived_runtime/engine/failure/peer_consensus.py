"""Flooding: how the workers of a generation come to one verdict when the coordinator says nothing.

Who decides alone tells all the others at once, and so does everybody who hears it; for a moment all of them listen,
then each takes the verdict with the lowest (instance, rank) that it has heard. A verdict of the coordinator, and one
that has been told to clients already, goes before every other. Whoever cannot be reached decides without us.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from collectived_proto.codec import verdict_from_proto, verdict_to_proto
from collectived_proto.types import Verdict
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine.compile.program import CHANNELS
from collectived_runtime.engine.run.links import PeerNetwork
from collectived_runtime.engine.run.streams import (
    OutgoingMessage,
    ReceiveStream,
    SendStream,
    accept_links,
    make_dialer,
)
from collectived_runtime.limits.rejections import MessageSource
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link, LinkBroken, LinkProtocolError

CHANNEL = CHANNELS + 1
LISTEN_SECONDS = 0.06
MAX_FORWARDERS = 2  # workers that tell one that has been given up
SEND_SECONDS = 1.0  # in which peers are reached, or not
_BY_COORDINATOR = "coordinator"


class PeerConsensus:
    """Of one generation. Runs in the group loop's thread.

    Args:
        ruled: the verdict that clients have been told, if any.
        rule: takes what has been decided.
        witness: what this worker has to add to a verdict of another: who is missing here.
    """

    def __init__(
        self,
        network: PeerNetwork,
        ruled: Callable[[], Verdict | None],
        rule: Callable[[Verdict], None],
        witness: Callable[[Verdict], Verdict],
    ) -> None:
        self._network = network
        self._topology = network.topology
        self._generation = network.generation
        self._hand_back_link = network.make_handback()
        self._get_verdict = ruled
        self._apply_verdict = rule
        self._add_missing_ranks = witness
        self._best: Verdict | None = None
        self._until = math.inf
        self._departures: dict[tuple[int, ...], Verdict] = {}  # that ranks have left in order: one rules out no other
        self._unapplied_departures: list[Verdict] = []  # of these, what has not been ruled
        self._departures_until = math.inf
        self._send_until = -math.inf
        self._out: dict[int, SendStream] = {}  # by place
        self._in: list[ReceiveStream] = []
        self._closed = False
        accept_links(network, CHANNEL, self._on_link)

    def propose(self, verdict: Verdict) -> None:
        """This worker has decided alone: what the others say within a moment counts too."""
        others = [place for place in range(len(self._topology.peers)) if place != self._topology.place]
        if not others:
            self._apply_verdict(verdict)
            return
        if verdict.orderly:
            self._propose_departure(verdict, others)
            return
        first = self._best is None
        if self._best is None or precedence(verdict) < precedence(self._best):
            self._best = verdict
            for place in others:
                self._send(place, verdict)
        if first:
            self._until = time.monotonic() + LISTEN_SECONDS

    def _propose_departure(self, verdict: Verdict, others: list[int]) -> None:
        """Of what is said about the same ranks the lowest counts, and of all of it the lowest comes first."""
        ranks = tuple(member.rank for member in verdict.missing)
        known = self._departures.get(ranks)
        if known is None or precedence(verdict) < precedence(known):
            self._departures[ranks] = verdict
            self._unapplied_departures.append(verdict)
            for place in others:
                self._send(place, verdict)
            self._departures_until = min(self._departures_until, time.monotonic() + LISTEN_SECONDS)

    def notify_excluded(self, verdict: Verdict) -> None:
        """The coordinator has given a worker up that may live all the same: its own ranks are to hear of it too."""
        if verdict.decided_by != _BY_COORDINATOR or verdict.orderly:
            return
        missing = {member.rank for member in verdict.missing}
        topology = self._topology
        gone = [place for place, peer in enumerate(topology.peers) if missing.issuperset(peer.ranks)]
        left = [place for place in range(len(topology.peers)) if place not in gone]
        if gone and topology.place in left[:MAX_FORWARDERS]:
            for place in gone:
                self._send(place, verdict)

    @property
    def idle(self) -> bool:
        """Whether nothing is to be said to the others any more."""
        if min(self._until, self._departures_until) != math.inf:
            return False
        return time.monotonic() >= self._send_until or all(way.idle for way in self._out.values())

    def next_deadline(self) -> float:
        until = min(self._until, self._departures_until)
        if not self._out:
            return until
        return min(until, math.inf if self.idle else self._send_until)

    def on_timer(self, now: float) -> None:
        if min(self._until, self._departures_until) > now:
            return
        self._until = self._departures_until = math.inf
        said, self._unapplied_departures = (
            [*self._unapplied_departures, *([self._best] if self._best is not None else [])],
            [],
        )
        for verdict in sorted(said, key=precedence):  # faults and departures alike: of both the lowest comes first
            if self._get_verdict() is None:
                self._apply_verdict(verdict)

    def close(self) -> None:
        self._closed = True
        for way_out in self._out.values():
            way_out.close()
        for way_in in self._in:
            way_in.close()

    def _send(self, place: int, verdict: Verdict) -> None:
        self._send_until = time.monotonic() + SEND_SECONDS
        word = verdict_to_proto(verdict).SerializeToString()
        key = self._topology.group.key
        kind = frames.FrameKind.VERDICT
        header = frames.Frame(kind, 0, 0, 0, key, self._generation, 0, bytes(8), bytes(8), 0, len(word)).encode()
        if place not in self._out:
            reach = make_dialer(self._network, CHANNEL, place, lambda: self._closed)
            self._out[place] = SendStream(self._network.poller, reach, _unreachable, self._hand_back_link)
        self._out[place].send(OutgoingMessage(-1, deque([header, word]), lambda: None))

    def _on_link(self, link: Link) -> None:  # in the exchange's thread
        self._network.poller.call_soon_threadsafe(
            lambda: link.close() if self._closed else self._add_receive_stream(link), link.close
        )

    def _add_receive_stream(self, link: Link) -> None:
        def heard(frame: frames.Frame, word: bytes) -> Sequence[NDArray[np.uint8]]:
            try:
                self._on_verdict(link.peer, verdict_from_proto(common_pb2.Verdict.FromString(word)))
            except DecodeError as error:
                self._network.refusals.count_malformed(MessageSource.LINK)
                raise LinkProtocolError(f"a verdict that cannot be read: {error}") from None
            return ()

        kind = frames.FrameKind.VERDICT
        self._in.append(ReceiveStream(self._network, link, kind, heard, lambda frame: None, _unreachable))

    def _on_verdict(self, task: int, verdict: Verdict) -> None:
        group = self._topology.group
        if (verdict.key, verdict.generation) != (group.key, self._generation):
            return
        told = self._get_verdict()
        if told is None:
            self.propose(self._add_missing_ranks(verdict))
        elif told != verdict and told.decided_by == _BY_COORDINATOR:
            peers = self._topology.peers
            self._send(next(place for place, peer in enumerate(peers) if peer.task == task), told)


def precedence(verdict: Verdict) -> tuple[bool, int, int, str]:
    """Of several verdicts the one with the lowest of these counts."""
    culprits = (*verdict.missing, *verdict.differing)
    lowest = min((member.rank for member in culprits), default=1 << 32)
    return verdict.decided_by != _BY_COORDINATOR, verdict.from_instance, lowest, verdict.decided_by


def _unreachable(error: LinkBroken) -> None:
    """Whoever cannot be reached decides without us."""
