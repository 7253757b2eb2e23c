"""Flooding: the workers of a generation send each other their decisions when the coordinator does not answer.

`verdict_agreement.py` decides which verdict is taken, and when. A worker that cannot be reached decides alone.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from collectived_proto.codec import verdict_from_proto, verdict_to_proto
from collectived_proto.types import Verdict
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine.compile.program import CHANNELS
from collectived_runtime.engine.failure.verdict_agreement import (
    BY_COORDINATOR,
    AgreementEffect,
    TakeVerdict,
    TellVerdict,
    VerdictAgreement,
)
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
LISTEN_SECONDS = 0.075  # to those who may be dead; with DECIDE_ALONE_SECONDS it ends before clients give up
MAX_FORWARDERS = 2  # workers that notify one that has been given up
SEND_SECONDS = 1.0  # in which peers are reached, or not
_FINAL = 1  # in a frame's round


class PeerConsensus:
    """Has the workers of one generation agree on a verdict. Runs in the group loop's thread.

    Args:
        apply_verdict: takes the decision.
        add_missing_ranks: adds the ranks that are missing here to a verdict of another worker.
    """

    def __init__(
        self,
        network: PeerNetwork,
        apply_verdict: Callable[[Verdict], None],
        add_missing_ranks: Callable[[Verdict], Verdict],
    ) -> None:
        self._network = network
        self._topology = network.topology
        self._generation = network.generation
        self._hand_back_link = network.make_handback()
        self._apply_verdict = apply_verdict
        self._add_missing_ranks = add_missing_ranks
        others = [peer.task for place, peer in enumerate(network.topology.peers) if place != network.topology.place]
        self._agreement = VerdictAgreement(LISTEN_SECONDS, others)
        self._send_until = -math.inf
        self._out: dict[int, SendStream] = {}  # by place
        self._in: list[ReceiveStream] = []
        self._closed = False
        accept_links(network, CHANNEL, self._on_link)

    def propose(self, verdict: Verdict) -> None:
        """This worker has decided alone: what the others say within a moment counts too."""
        self._carry_out(self._agreement.decide_alone(verdict, time.monotonic()))

    def hear_coordinator(self, verdict: Verdict) -> None:
        """The coordinator has decided: that is final, unless workers have begun to settle it among themselves."""
        self._carry_out(self._agreement.hear_coordinator(verdict, time.monotonic()))

    def _carry_out(self, effects: Iterable[AgreementEffect]) -> None:
        peers = self._topology.peers
        for effect in effects:
            match effect:
                case TakeVerdict(verdict):
                    self._apply_verdict(verdict)
                case TellVerdict(verdict, final, only):
                    word = verdict_to_proto(verdict).SerializeToString()
                    for place, peer in enumerate(peers):
                        if place != self._topology.place and only in (None, peer.task):
                            self._send(place, word, final)

    def notify_excluded(self, verdict: Verdict) -> None:
        """The coordinator has given a worker up that may live all the same: its own ranks must get the verdict too."""
        if verdict.decided_by != BY_COORDINATOR or verdict.orderly:
            return
        missing = {member.rank for member in verdict.missing}
        topology = self._topology
        gone = [place for place, peer in enumerate(topology.peers) if missing.issuperset(peer.ranks)]
        left = [place for place in range(len(topology.peers)) if place not in gone]
        if gone and topology.place in left[:MAX_FORWARDERS]:
            for place in gone:
                self._send(place, verdict_to_proto(verdict).SerializeToString(), True)

    @property
    def idle(self) -> bool:
        """Whether nothing is to be said to the others any more."""
        if self._agreement.next_deadline != math.inf:
            return False
        return time.monotonic() >= self._send_until or all(way.idle for way in self._out.values())

    def next_deadline(self) -> float:
        until = self._agreement.next_deadline
        return until if not self._out or self.idle else min(until, self._send_until)

    def on_timer(self, now: float) -> None:
        self._carry_out(self._agreement.on_timer(now))

    def close(self) -> None:
        self._closed = True
        for way_out in self._out.values():
            way_out.close()
        for way_in in self._in:
            way_in.close()

    def _send(self, place: int, word: bytes, final: bool) -> None:
        self._send_until = time.monotonic() + SEND_SECONDS
        key = self._topology.group.key
        kind = frames.FrameKind.VERDICT
        said = _FINAL if final else 0
        header = frames.Frame(kind, 0, 0, said, key, self._generation, 0, bytes(8), bytes(8), 0, len(word)).encode()
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
                verdict = verdict_from_proto(common_pb2.Verdict.FromString(word))
                self._on_verdict(link.peer, verdict, frame.round == _FINAL)
            except DecodeError as error:
                self._network.refusals.count_malformed(MessageSource.LINK)
                raise LinkProtocolError(f"a verdict that cannot be read: {error}") from None
            return ()

        kind = frames.FrameKind.VERDICT
        self._in.append(ReceiveStream(self._network, link, kind, heard, lambda frame: None, _unreachable))

    def _on_verdict(self, task: int, verdict: Verdict, final: bool) -> None:
        group = self._topology.group
        if (verdict.key, verdict.generation) != (group.key, self._generation):
            return
        improved = self._add_missing_ranks(verdict)
        self._carry_out(self._agreement.hear_worker(task, verdict, final, time.monotonic(), improved))


def _unreachable(error: LinkBroken) -> None:
    """Nothing to do: a worker that cannot be reached decides alone."""
