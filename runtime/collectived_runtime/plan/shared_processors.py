"""How long an all-reduce takes where its hosts are workers of one machine with few processors.

Each participant sends, receives and folds one message after another, in the order of its plan; in a round it sends
before it receives. It goes on as soon as the next message has come, whatever round the others are in. A message takes a
processor for a while. The next free processor goes to the participant that was ready first: this is list scheduling (R.
Graham, *Bounds on multiprocessing timing anomalies*, SIAM Journal on Applied Mathematics 1969).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from collectived_runtime.plan.cost_model import Model, bus_factor
from collectived_runtime.plan.moves import RecvMove, SendMove
from collectived_runtime.plan.wide_moves import CollectMove, NativeKind, NativeMove, WideRound


class _Message(NamedTuple):
    """A message of one participant to or from `peer`; sizes are in elements."""

    peer: int
    size: int
    is_sent: bool
    folded: int = 0


@dataclass(slots=True)
class _Participant:
    """One participant: what is left of its plan, and when it is through with what came before.

    Attributes:
        came: when each message that it has not taken yet is there, by sender.
    """

    rounds: Iterator[WideRound]
    now: float = 0.0
    count: int = 0  # of rounds that have begun
    messages: deque[_Message] = field(default_factory=deque)  # of the current round
    came: dict[int, deque[float]] = field(default_factory=dict)

    def find_next(self, me: int) -> _Message | None:
        """Return the message that it has to do with next; None: it has done everything."""
        while not self.messages:
            moves = next(self.rounds, None)
            if moves is None:
                return None
            self.messages.extend(_list_messages(moves, me))
            self.count += 1
        return self.messages[0]


@dataclass(slots=True)
class _Port:
    """One end of a link: until when each direction is in use."""

    sends_until: float = 0.0
    receives_until: float = 0.0


def simulate_shared(
    plan_of: Callable[[int], Iterable[WideRound]], hosts: Sequence[Sequence[int]], itemsize: int, model: Model
) -> tuple[float, int]:
    """Predict an all-reduce between hosts that share `len(hosts) / model.crowd` processors.

    Args:
        plan_of: the plan of a participant.
        hosts: participants, host by host.
        itemsize: bytes of an element.
        model: the costs.

    Returns:
        Seconds until the last participant is through, and the most rounds that one of them has.
    """
    home = {participant: number for number, host in enumerate(hosts) for participant in host}
    all_of = {me: _Participant(iter(plan_of(me))) for me in home}
    across, inside = [_Port() for _ in hosts], {me: _Port() for me in home}
    free = [0.0] * max(1, round(len(hosts) / model.crowd))  # a heap: when each processor is free
    ready: list[tuple[float, int]] = []  # a heap: from when on a participant needs a processor
    waiting: dict[int, int] = {}  # by participant, for whose message it waits

    def go_on(me: int) -> None:
        """Queue a participant for a processor, or have it wait for its next message."""
        one = all_of[me]
        message = one.find_next(me)
        if message is None:
            return
        if message.is_sent:
            heappush(ready, (one.now, me))
        elif came := one.came.get(message.peer):
            heappush(ready, (max(one.now, came[0]), me))
        else:
            waiting[me] = message.peer

    def carry(me: int, message: _Message, begin: float, end: float) -> None:
        """Take a message over its link, while its sender is busy with it from `begin` to `end`."""
        peer = message.peer
        near = home[me] == home[peer]
        link = model.inside if near else model.across
        source, target = (inside[me], inside[peer]) if near else (across[home[me]], across[home[peer]])
        seconds = message.size * itemsize / link.bandwidth
        first = max(source.sends_until, begin)
        source.sends_until = first + seconds
        target.receives_until = max(target.receives_until, first) + seconds
        all_of[peer].came.setdefault(me, deque()).append(max(target.receives_until, end) + link.latency)
        if waiting.get(peer) == me:
            del waiting[peer]
            go_on(peer)

    for me in home:
        go_on(me)
    while ready:
        at, me = heappop(ready)
        one = all_of[me]
        message, begin = one.messages.popleft(), max(at, free[0])
        one.now = begin + _processor_seconds(message, home[me] == home[message.peer], itemsize, model)
        heapreplace(free, one.now)
        if message.is_sent:
            carry(me, message, begin, one.now)
        else:
            one.came[message.peer].popleft()
        go_on(me)
    assert not waiting, "a plan waits for what no other plan sends"
    return max(one.now for one in all_of.values()), max(one.count for one in all_of.values())


def _processor_seconds(message: _Message, is_near: bool, itemsize: int, model: Model) -> float:
    """How long a message keeps a processor busy, at one of its ends."""
    folding = message.folded * itemsize / model.fold
    if is_near:
        return model.overhead + folding
    return model.message_seconds(1, busy=0.0) + message.size * itemsize / 2 / model.copied + folding


def _list_messages(moves: WideRound, me: int) -> list[_Message]:
    """The messages of one round, those that are sent before those that are received."""
    sent, received = [], []
    for move in moves:
        match move:
            case SendMove(peer, span, _):
                sent.append(_Message(peer, len(span), True))
            case RecvMove(peer, span, _, fold):
                received.append(_Message(peer, len(span), False, len(span) if fold else 0))
            case CollectMove(order, span, _):
                received += [_Message(peer, len(span), False, len(span)) for peer in order if peer != me]
            case NativeMove(kind, members, span, _) if len(members) > 1:  # as much as a ring of them carries
                volume = round(len(span) * (bus_factor(len(members)) if kind is NativeKind.ALL_REDUCE else 1))
                place = members.index(me)
                sent.append(_Message(members[(place + 1) % len(members)], volume, True))
                received.append(_Message(members[place - 1], volume, False))
    return sent + received
