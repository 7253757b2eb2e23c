"""One participant on its way through its plan while plans are checked.

A round is walked in two halves, each for all participants: first everything is read and *posted*, then everything is
received. So the order in which participants are visited does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from collectived_runtime.plan.book import Value
from collectived_runtime.plan.collect import Collect, Kind, Native, WideRound
from collectived_runtime.plan.faults import Overwritten, Stuck
from collectived_runtime.plan.holdings import Holdings
from collectived_runtime.plan.moves import Buffer, Finish, Recv, Send, Span

Posted = dict[tuple[int | Native, int], list[tuple[Span, Buffer, Value]]]
"""What has been sent in this round by (sender, receiver), or given to an engine by its move."""


class Walker:
    """One participant on its way through its plan."""

    __slots__ = (
        "_collects",
        "_finishes",
        "_mine",
        "_natives",
        "_receives",
        "_rest",
        "_sends",
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
        self._finishes: list[Finish] = []
        self._sends: list[Send] = []
        self._receives: list[Recv] = []
        self._collects: list[Collect] = []
        self._natives: list[Native] = []
        for move in moves:
            match move:
                case Send():
                    self._sends.append(move)
                case Recv():
                    self._receives.append(move)
                case Finish():
                    self._finishes.append(move)
                case Collect():
                    self._collects.append(move)
                case Native():
                    self._natives.append(move)
        return True

    def post(self, posted: Posted) -> None:
        """Everything that is read in this round; from here on it counts as handed on."""
        if self._receives:
            _must_be_apart(self.me, self._sends, self._receives)
        for finish in self._finishes:
            self.held.finish(finish)
        for send in self._sends:
            sent = (send.span, send.source, self.held.read(send.span, send.source))
            posted.setdefault((self.me, send.peer), []).append(sent)
            self.elements += len(send.span)
        self.messages += len(self._sends)
        self._mine = [self.held.read(collect.span, collect.mine) for collect in self._collects]
        for send in self._sends:
            self.held.hand_on(send)
        for native in self._natives:
            value: Value = []
            if native.kind is not Kind.BROADCAST:
                value = self.held.read(native.span, Buffer.INPUT)
            elif native.root == self.me:
                value = self.held.read(native.span, Buffer.OUTPUT)
            posted.setdefault((native, self.me), []).append((native.span, Buffer.INPUT, value))

    def deliver(self, posted: Posted) -> Iterator[str]:
        """Carry out what receives, in order; yields who waits for whom."""
        for receive in self._receives:
            sent = self._take(posted, receive.peer, receive.span)
            if sent is None:
                yield f"{self.me} waits for {receive.peer}"
            else:
                self.held.receive(receive, *sent)
        for collect, mine in zip(self._collects, self._mine, strict=True):
            values = {self.me: mine}
            for peer in collect.order:
                sent = None if peer == self.me else self._take(posted, peer, collect.span)
                if sent is not None:
                    values[peer] = sent[1]
            yield from (f"{self.me} waits for {peer}" for peer in collect.order if peer not in values)
            if len(values) == len(collect.order):
                self.held.fold_all([values[peer] for peer in collect.order], collect.span)
        for native in self._natives:
            absent = [member for member in native.members if (native, member) not in posted]
            yield from (f"{self.me} waits for {member}" for member in absent)
            if not absent:
                self.held.take_part(native, [posted[native, member][0][2] for member in native.members])

    def _take(self, posted: Posted, peer: int, expected: Span) -> tuple[Buffer, Value] | None:
        sent = posted.get((peer, self.me))
        if not sent:
            return None
        span, source, value = sent.pop(0)
        if span != expected:
            raise Stuck(f"{peer} sends {span}, {self.me} expects {expected}")
        return source, value


def _must_be_apart(me: int, sends: Iterable[Send], receives: Iterable[Recv]) -> None:
    """What a round receives it neither sends nor receives twice, in any buffer: they may share memory."""
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
