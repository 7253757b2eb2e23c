"""One participant on its way through its plan while plans are checked.

A round is walked in two halves, each for all participants: first everything is read and *posted*, then everything is
received. So the order in which participants are visited does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from collectived_runtime.plan.errors import BufferOverwrite, PlanDeadlock
from collectived_runtime.plan.moves import Buffer, FinishMove, RecvMove, SendMove, Span
from collectived_runtime.plan.verify.buffers import ParticipantBuffers
from collectived_runtime.plan.verify.fold_trees import Value
from collectived_runtime.plan.wide_moves import CollectMove, NativeKind, NativeMove, WideRound

Posted = dict[tuple[int | NativeMove, int], list[tuple[Span, Buffer, Value]]]
"""The values sent in this round by (sender, receiver), or given to an engine by its move."""


class PlanParticipant:
    """One participant on its way through its plan."""

    __slots__ = (
        "_own_values",
        "_other_moves",
        "_receives",
        "_rounds",
        "_sends",
        "is_busy",
        "elements_sent",
        "buffers",
        "me",
        "messages_sent",
    )

    def __init__(self, me: int, plan: Iterable[WideRound], held: ParticipantBuffers) -> None:
        self.me = me
        self._rounds = iter(plan)
        self.buffers = held
        self.elements_sent = self.messages_sent = 0

    def enter_round(self) -> bool:
        """Take up the next round; False when the plan has ended."""
        moves = next(self._rounds, None)
        if moves is None:
            return False
        self.is_busy = bool(moves)
        if not moves:
            return True
        # By hand, not by `match`: this is where a check of a long ring spends its time.
        self._sends: list[SendMove] = []
        self._receives: list[RecvMove] = []
        self._other_moves: list[FinishMove | CollectMove | NativeMove] = []
        for move in moves:
            if isinstance(move, SendMove):
                self._sends.append(move)
            elif isinstance(move, RecvMove):
                self._receives.append(move)
            else:
                self._other_moves.append(move)
        return True

    def post_sends(self, posted: Posted) -> None:
        """Everything that is read in this round; from here on it counts as handed on."""
        sends = self._sends
        if self._receives and sends or len(self._receives) > 1:
            _check_disjoint(self.me, sends, self._receives)
        for move in self._other_moves:
            if isinstance(move, FinishMove):
                self.buffers.finish(move)
        before: tuple[Span, Buffer, Value] | None = None
        for send in sends:
            if before is None or before[0] is not send.span or before[1] is not send.source:
                before = (send.span, send.source, self.buffers.read(send.span, send.source))
            pair = (self.me, send.peer)
            if pair in posted:
                posted[pair].append(before)
            else:
                posted[pair] = [before]
            self.elements_sent += send.span.stop - send.span.start
        self.messages_sent += len(sends)
        self._own_values: list[Value] = []
        for move in self._other_moves:
            if isinstance(move, CollectMove):
                self._own_values.append(self.buffers.read(move.span, move.mine))
        for send in sends:
            if send.source is Buffer.SCRATCH:
                self.buffers.discard_sent(send)
        for move in self._other_moves:
            if isinstance(move, NativeMove):
                posted[move, self.me] = [(move.span, Buffer.INPUT, self._read_native_input(move))]

    def _read_native_input(self, native: NativeMove) -> Value:
        """The value that an engine reads here."""
        if native.kind is not NativeKind.BROADCAST:
            return self.buffers.read(native.span, Buffer.INPUT)
        return self.buffers.read(native.span, Buffer.OUTPUT) if native.root == self.me else []

    def receive_posted(self, posted: Posted) -> list[str]:
        """Carry out the receives, in order. Return which participants wait for which."""
        waiting: list[str] = []
        for receive in self._receives:
            sent = self._pop_posted(posted, receive.peer, receive.span)
            if sent is None:
                waiting.append(f"{self.me} waits for {receive.peer}")
            else:
                self.buffers.receive(receive, *sent)
        mine = iter(self._own_values)
        for move in self._other_moves:
            if isinstance(move, CollectMove):
                waiting += self._collect(move, next(mine), posted)
            elif isinstance(move, NativeMove):
                waiting += self._run_native(move, posted)
        return waiting

    def _collect(self, collect: CollectMove, mine: Value, posted: Posted) -> list[str]:
        values = {self.me: mine}
        for peer in collect.order:
            sent = None if peer == self.me else self._pop_posted(posted, peer, collect.span)
            if sent is not None:
                values[peer] = sent[1]
        if len(values) < len(collect.order):
            return [f"{self.me} waits for {peer}" for peer in collect.order if peer not in values]
        self.buffers.fold_all([values[peer] for peer in collect.order], collect.span)
        return []

    def _run_native(self, native: NativeMove, posted: Posted) -> list[str]:
        absent = [member for member in native.members if (native, member) not in posted]
        if not absent:
            self.buffers.apply_native(native, [posted[native, member][0][2] for member in native.members])
        return [f"{self.me} waits for {member}" for member in absent]

    def _pop_posted(self, posted: Posted, peer: int, expected: Span) -> tuple[Buffer, Value] | None:
        sent = posted.get((peer, self.me))
        if not sent:
            return None
        span, source, value = sent.pop(0)
        if not sent:
            del posted[peer, self.me]
        if span is not expected and span != expected:
            raise PlanDeadlock(f"{peer} sends {span}, {self.me} expects {expected}")
        return source, value


def _check_disjoint(me: int, sends: Sequence[SendMove], receives: Sequence[RecvMove]) -> None:
    """Check that a round neither sends nor receives twice what it receives, in any buffer: they may share memory."""
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
            raise BufferOverwrite(f"{me} writes what it sends or receives in the same round, at {start}")
        if written:
            written_until = max(written_until, stop)
        else:
            read_until = max(read_until, stop)
