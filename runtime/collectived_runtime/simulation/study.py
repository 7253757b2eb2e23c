"""A study: what each algorithm costs at each size on given hosts, and what AUTO makes of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from collectived_proto.types import Peer
from collectived_runtime.coordinator.core import tuning
from collectived_runtime.plan.auto import Row, select_row
from collectived_runtime.plan.cost_model import Model, bus_factor, lower_bound
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.simulate import simulate
from collectived_runtime.simulation.algorithms import make_plan, merge_shard_plans, participants, qualify_auto_name

ITEMSIZE = 4
"""All figures are for float32."""


@dataclass(frozen=True, slots=True)
class SimulationSpec:
    """All-reduce of `sizes` (bytes) over hosts with that many devices, in `shards` side by side."""

    hosts: tuple[int, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    model: Model = Model()
    shards: int = 1


@dataclass(frozen=True, slots=True)
class AlgorithmCost:
    """The costs of one algorithm for one size; bandwidths in bytes per second, as nccl-tests count them."""

    seconds: float
    rounds: int
    algorithm_bandwidth: float
    bus_bandwidth: float


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """The choice of AUTO for one size."""

    algorithm: str
    shards: int
    cost: AlgorithmCost


@dataclass(frozen=True, slots=True)
class SizeResult:
    """One size; `lower_bound` in seconds."""

    nbytes: int
    lower_bound: float
    costs: Mapping[str, AlgorithmCost]
    auto: AutoChoice


@dataclass(frozen=True, slots=True)
class Study:
    """`table` is what AUTO decides by, with `algorithm` as these hosts would run it."""

    spec: SimulationSpec
    table: tuple[Row, ...]
    results: tuple[SizeResult, ...]


def run_study(question: SimulationSpec, on_size: Callable[[int], object] = lambda nbytes: None) -> Study:
    """Answer the question; every figure comes from the plans themselves.

    Args:
        on_size: called with each size when that is answered.
    """
    hosts = question.hosts
    table = auto_table(hosts, question.model)
    results = []
    for nbytes in question.sizes:
        results.append(_study_size(question, table, nbytes))
        on_size(nbytes)
    return Study(question, table, tuple(results))


def auto_table(hosts: tuple[int, ...], model: Model) -> tuple[Row, ...]:
    """The table that the coordinator would make for these links, with algorithms as these hosts run them."""
    peers = [Peer(task, "", "", "", tuple(ranks)) for task, ranks in enumerate(participants(hosts))]
    tiers = tuning.make_table(peers, model, model.crowd)
    return tuple(
        Row(tier.limit, qualify_auto_name(tier.algorithm, hosts), tier.shards, tier.bytes_per_pack) for tier in tiers
    )


def predict_cost(question: SimulationSpec, name: str, nbytes: int, shards: int) -> AlgorithmCost:
    hosts, count = participants(question.hosts), nbytes // ITEMSIZE
    parts = Span(0, count).split(shards)
    model = limit_bandwidth(question.model, shards)
    if shards == 1:
        predicted = simulate(lambda me: make_plan(name, hosts, me, parts[0]), hosts, count, ITEMSIZE, model)
    else:
        predicted = simulate(lambda me: merge_shard_plans(name, hosts, me, parts), hosts, count, ITEMSIZE, model)
    return make_cost(predicted.seconds, predicted.rounds, nbytes, sum(question.hosts))


def make_cost(seconds: float, rounds: int, nbytes: int, devices: int) -> AlgorithmCost:
    rate = nbytes / seconds if seconds else 0.0
    return AlgorithmCost(seconds, rounds, rate, rate * bus_factor(devices))


def limit_bandwidth(model: Model, connections: int) -> Model:
    """The same costs where a host has that many connections to each peer: they may not fill the link."""
    bandwidth = min(model.across.bandwidth, connections * model.stream)
    return replace(model, across=replace(model.across, bandwidth=bandwidth))


def _study_size(question: SimulationSpec, table: tuple[Row, ...], nbytes: int) -> SizeResult:
    figures = {name: predict_cost(question, name, nbytes, question.shards) for name in question.algorithms}
    row = select_row(table, nbytes)
    known = figures.get(row.algorithm) if row.shards == question.shards else None
    auto = AutoChoice(row.algorithm, row.shards, known or predict_cost(question, row.algorithm, nbytes, row.shards))
    return SizeResult(nbytes, lower_bound(question.hosts, nbytes, question.model), figures, auto)
