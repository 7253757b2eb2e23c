"""One participant on its way through its plan while plans are checked.

A round is walked in two halves, each for all participants: first everything is read and *posted*, then everything is
received. So the order in which participants are visited does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from collectived_runtime.plan.book import Value
from collectived_runtime.plan.collect import Collect, Kind, Native, WideRound
from collectived_runtime.plan.errors import Overwritten, Stuck
from collectived_runtime.plan.holdings import Holdings
from collectived_runtime.plan.moves import Buffer, Finish, Recv, Send, Span

Posted = dict[tuple[int | Native, int], list[tuple[Span, Buffer, Value]]]
"""What has been sent in this round by (sender, receiver), or given to an engine by its move."""


class Walker:
    """One participant on its way through its plan."""

    __slots__ = (
        "_mine",
        "_others",
        "_receives",
        "_rest",
        "_sends",
        "busy",
        "elements",
        "held",
        "me",
        "messages",
    )

    def __init__(self, me: int, plan: Iterable[WideRound], held: Holdings) -> None:
        self.me = me
        self._rest = iter(plan)
        self.held = held
        self.elements = self.messages = 0

    def enter(self) -> bool:
        """Take up the next round; False when the plan has ended."""
        moves = next(self._rest, None)
        if moves is None:
            return False
        self.busy = bool(moves)
        if not moves:
            return True
        # By hand, not by `match`: this is where a check of a long ring spends its time.
        self._sends: list[Send] = []
        self._receives: list[Recv] = []
        self._others: list[Finish | Collect | Native] = []
        for move in moves:
            if isinstance(move, Send):
                self._sends.append(move)
            elif isinstance(move, Recv):
                self._receives.append(move)
            else:
                self._others.append(move)
        return True

    def post(self, posted: Posted) -> None:
        """Everything that is read in this round; from here on it counts as handed on."""
        sends = self._sends
        if self._receives and sends or len(self._receives) > 1:
            _must_be_apart(self.me, sends, self._receives)
        for move in self._others:
            if isinstance(move, Finish):
                self.held.finish(move)
        before: tuple[Span, Buffer, Value] | None = None
        for send in sends:
            if before is None or before[0] is not send.span or before[1] is not send.source:
                before = (send.span, send.source, self.held.read(send.span, send.source))
            pair = (self.me, send.peer)
            if pair in posted:
                posted[pair].append(before)
            else:
                posted[pair] = [before]
            self.elements += send.span.stop - send.span.start
        self.messages += len(sends)
        self._mine: list[Value] = []
        for move in self._others:
            if isinstance(move, Collect):
                self._mine.append(self.held.read(move.span, move.mine))
        for send in sends:
            if send.source is Buffer.SCRATCH:
                self.held.hand_on(send)
        for move in self._others:
            if isinstance(move, Native):
                posted[move, self.me] = [(move.span, Buffer.INPUT, self._given(move))]

    def _given(self, native: Native) -> Value:
        """What an engine reads here."""
        if native.kind is not Kind.BROADCAST:
            return self.held.read(native.span, Buffer.INPUT)
        return self.held.read(native.span, Buffer.OUTPUT) if native.root == self.me else []

    def deliver(self, posted: Posted) -> list[str]:
        """Carry out what receives, in order; returns who waits for whom."""
        waiting: list[str] = []
        for receive in self._receives:
            sent = self._take(posted, receive.peer, receive.span)
            if sent is None:
                waiting.append(f"{self.me} waits for {receive.peer}")
            else:
                self.held.receive(receive, *sent)
        mine = iter(self._mine)
        for move in self._others:
            if isinstance(move, Collect):
                waiting += self._collect(move, next(mine), posted)
            elif isinstance(move, Native):
                waiting += self._take_part(move, posted)
        return waiting

    def _collect(self, collect: Collect, mine: Value, posted: Posted) -> list[str]:
        values = {self.me: mine}
        for peer in collect.order:
            sent = None if peer == self.me else self._take(posted, peer, collect.span)
            if sent is not None:
                values[peer] = sent[1]
        if len(values) < len(collect.order):
            return [f"{self.me} waits for {peer}" for peer in collect.order if peer not in values]
        self.held.fold_all([values[peer] for peer in collect.order], collect.span)
        return []

    def _take_part(self, native: Native, posted: Posted) -> list[str]:
        absent = [member for member in native.members if (native, member) not in posted]
        if not absent:
            self.held.take_part(native, [posted[native, member][0][2] for member in native.members])
        return [f"{self.me} waits for {member}" for member in absent]

    def _take(self, posted: Posted, peer: int, expected: Span) -> tuple[Buffer, Value] | None:
        sent = posted.get((peer, self.me))
        if not sent:
            return None
        span, source, value = sent.pop(0)
        if not sent:
            del posted[peer, self.me]
        if span is not expected and span != expected:
            raise Stuck(f"{peer} sends {span}, {self.me} expects {expected}")
        return source, value


def _must_be_apart(me: int, sends: Sequence[Send], receives: Sequence[Recv]) -> None:
    """What a round receives it neither sends nor receives twice, in any buffer: they may share memory."""
    if len(sends) == len(receives) == 1:
        sent, received = sends[0].span, receives[0].span
        if sent.stop <= received.start or received.stop <= sent.start:
            return
    spans = [(send.span.start, send.span.stop, False) for send in sends]
    spans += [(receive.span.start, receive.span.stop, True) for receive in receives]
    spans.sort()
    read_until = written_until = -1
    for start, stop, written in spans:
        if start == stop:
            continue
        if start < written_until or (written and start < read_until):
            raise Overwritten(f"{me} writes what it sends or receives in the same round, at {start}")
        if written:
            written_until = max(written_until, stop)
        else:
            read_until = max(read_until, stop)
