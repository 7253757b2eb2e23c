"""A study: what each algorithm costs at each size on given hosts, and what AUTO makes of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from collectived_proto.types import Peer
from collectived_runtime.coordinator import tables
from collectived_runtime.plan.choose import Row, pick
from collectived_runtime.plan.model import Model, bus_factor, lower_bound
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.simulate import simulate
from collectived_runtime.simulation.algorithms import of_auto, participants, plan, side_by_side

ITEMSIZE = 4
"""Everything is told for float32."""


@dataclass(frozen=True, slots=True)
class Question:
    """All-reduce of `sizes` (bytes) over hosts with that many devices, in `shards` side by side."""

    hosts: tuple[int, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    model: Model = Model()
    shards: int = 1


@dataclass(frozen=True, slots=True)
class Figure:
    """What one algorithm takes for one size; bandwidths in bytes per second, as nccl-tests count them."""

    seconds: float
    rounds: int
    algorithm_bandwidth: float
    bus_bandwidth: float


@dataclass(frozen=True, slots=True)
class Auto:
    """What AUTO takes for one size."""

    algorithm: str
    shards: int
    figure: Figure


@dataclass(frozen=True, slots=True)
class Line:
    """One size; `lower_bound` in seconds."""

    nbytes: int
    lower_bound: float
    figures: Mapping[str, Figure]
    auto: Auto


@dataclass(frozen=True, slots=True)
class Study:
    """`table` is what AUTO decides by, with `algorithm` as these hosts would run it."""

    question: Question
    table: tuple[Row, ...]
    lines: tuple[Line, ...]


def study(question: Question) -> Study:
    """Answer the question; every figure comes from the plans themselves."""
    hosts = question.hosts
    table = auto(hosts, question.model)
    return Study(question, table, tuple(_line(question, table, nbytes) for nbytes in question.sizes))


def auto(hosts: tuple[int, ...], model: Model) -> tuple[Row, ...]:
    """What the coordinator would have AUTO do on such hosts, with algorithms as these hosts would run them."""
    peers = [Peer(task, "", "", "", tuple(ranks)) for task, ranks in enumerate(participants(hosts))]
    tiers = tables.table(peers, model)
    return tuple(Row(tier.limit, of_auto(tier.algorithm, hosts), tier.shards, tier.bytes_per_pack) for tier in tiers)


def figure(question: Question, name: str, nbytes: int, shards: int) -> Figure:
    """One algorithm at one size."""
    hosts, count = participants(question.hosts), nbytes // ITEMSIZE
    parts = Span(0, count).split(shards)
    model = through(question.model, shards)
    if shards == 1:
        predicted = simulate(lambda me: plan(name, hosts, me, parts[0]), hosts, count, ITEMSIZE, model)
    else:
        predicted = simulate(lambda me: side_by_side(name, hosts, me, parts), hosts, count, ITEMSIZE, model)
    return told(predicted.seconds, predicted.rounds, nbytes, sum(question.hosts))


def told(seconds: float, rounds: int, nbytes: int, devices: int) -> Figure:
    rate = nbytes / seconds if seconds else 0.0
    return Figure(seconds, rounds, rate, rate * bus_factor(devices))


def through(model: Model, connections: int) -> Model:
    """The same costs where a host has that many connections to each peer: they may not fill the link."""
    bandwidth = min(model.across.bandwidth, connections * model.stream)
    return replace(model, across=replace(model.across, bandwidth=bandwidth))


def _line(question: Question, table: tuple[Row, ...], nbytes: int) -> Line:
    figures = {name: figure(question, name, nbytes, question.shards) for name in question.algorithms}
    row = pick(table, nbytes)
    known = figures.get(row.algorithm) if row.shards == question.shards else None
    auto = Auto(row.algorithm, row.shards, known or figure(question, row.algorithm, nbytes, row.shards))
    return Line(nbytes, lower_bound(question.hosts, nbytes, question.model), figures, auto)
