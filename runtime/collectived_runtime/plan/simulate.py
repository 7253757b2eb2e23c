"""The simulator: how long a collective will take, from the plans that would be executed.

Plans are aligned, so that a collective is a sequence of rounds that all enter together at the latest; a round lasts as
long as on the busiest host. The hosts are *sampled*: plans are derived one participant at a time and only for the
sample, round by round, so that neither time nor memory grows with the square of the participants. The first and the
last host are always in the sample: roots, guests and remainders stand there.

Hosts that share processors do not enter rounds together: `shared_processors` follows each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from collectived_runtime.plan.cost_model import LinkClass, Model, bus_factor
from collectived_runtime.plan.moves import RecvMove, SendMove
from collectived_runtime.plan.shared_processors import simulate_shared
from collectived_runtime.plan.wide_moves import CollectMove, NativeKind, NativeMove, WideRound

SAMPLE = 8


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds; rounds; bytes per second as nccl-tests count them."""

    seconds: float
    rounds: int
    algorithm_bandwidth: float
    bus_bandwidth: float


def simulate(
    plan_of: Callable[[int], Iterable[WideRound]],
    hosts: Sequence[Sequence[int]],
    count: int,
    itemsize: int = 4,
    model: Model | None = None,
    sample: int = SAMPLE,
) -> Prediction:
    """Predict an all-reduce of `count` elements.

    Args:
        plan_of: the plan of a participant, best as an iterator.
        hosts: participants, host by host.
        count: elements of one contribution.
        itemsize: bytes of an element.
        model: the costs; the default is plain TCP in a rack.
        sample: how many hosts are looked at, where each has processors of its own.
    """
    model = model or Model()
    run = simulate_shared if model.is_crowded else partial(_simulate_rounds, sample=sample)
    seconds, rounds = run(plan_of, hosts, itemsize, model)
    rate = count * itemsize / seconds if seconds else 0.0
    return Prediction(seconds, rounds, rate, rate * bus_factor(sum(map(len, hosts))))


def _simulate_rounds(
    plan_of: Callable[[int], Iterable[WideRound]],
    hosts: Sequence[Sequence[int]],
    itemsize: int,
    model: Model,
    sample: int,
) -> tuple[float, int]:
    """Seconds and rounds where each host has processors of its own."""
    home = {participant: number for number, host in enumerate(hosts) for participant in host}
    watched = [[(me, iter(plan_of(me))) for me in hosts[number]] for number in sample_hosts(len(hosts), sample)]
    seconds, rounds = 0.0, 0
    while True:
        current = [[(me, next(rest, None)) for me, rest in host] for host in watched]
        if all(moves is None for host in current for _, moves in host):
            return seconds, rounds
        seconds += max(_round(host, home, itemsize, model) for host in current)
        rounds += 1


def sample_hosts(hosts: int, sample: int) -> list[int]:
    """Evenly spread host numbers, the first and the last among them."""
    if hosts <= sample:
        return list(range(hosts))
    return sorted({number * (hosts - 1) // (sample - 1) for number in range(sample)})


@dataclass(slots=True)
class _Load:
    """Bytes and messages through one link in one round."""

    sent: int = 0
    received: int = 0
    messages: int = 0

    def seconds(self, link: LinkClass, itemsize: int) -> float:
        """The time on the wire, without latency."""
        return max(self.sent, self.received) * itemsize / link.bandwidth

    def send(self, elements: int) -> None:
        self.sent += elements
        self.messages += 1

    def receive(self, elements: int) -> None:
        self.received += elements
        self.messages += 1


def _round(host: Iterable[tuple[int, WideRound | None]], home: Mapping[int, int], itemsize: int, model: Model) -> float:
    """Return the seconds that one round keeps one host busy."""
    shared = _Load()
    slowest = overhead = 0.0
    inside_used = False
    for me, moves in host:
        own, before = _Load(), shared.messages
        folded = _add(moves or (), me, home, own, shared)
        slowest = max(slowest, own.seconds(model.inside, itemsize), folded * itemsize / model.fold)
        overhead = max(overhead, model.overhead * (own.messages + shared.messages - before))
        inside_used = inside_used or own.messages > 0
    latency = model.across.latency if shared.messages else model.inside.latency if inside_used else 0.0
    return latency + overhead + max(slowest, shared.seconds(model.across, itemsize))


def _add(moves: WideRound, me: int, home: Mapping[int, int], own: _Load, shared: _Load) -> int:
    """Put the moves of one participant on the links; returns the elements that it folds."""

    def link(peer: int) -> _Load:
        return own if home[peer] == home[me] else shared

    folded = 0
    for move in moves:
        match move:
            case SendMove(peer, span, _):
                link(peer).send(len(span))
            case RecvMove(peer, span, _, fold):
                link(peer).receive(len(span))
                folded += len(span) if fold else 0
            case CollectMove(order, span, _):
                for peer in order:
                    if peer != me:
                        link(peer).receive(len(span))
                folded += len(span) * (len(order) - 1)
            case NativeMove(kind, members, span, _):
                far = any(home[member] != home[me] for member in members)
                volume = round(len(span) * (bus_factor(len(members)) if kind is NativeKind.ALL_REDUCE else 1))
                load = shared if far else own
                load.send(volume)
                load.receive(volume)
    return folded
