"""The choices of AUTO in a generation: one table, made here from the topology, so that all workers choose alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from collectived_proto.types import Peer, Tier
from collectived_runtime.coordinator.core.events import LinkMeasured, WorkerHello
from collectived_runtime.plan.auto import HostLayout, Row, choose
from collectived_runtime.plan.cost_model import LinkClass, Model

UNMEASURED = Model(LinkClass(30e-6, 4e8))
"""Links of which nothing is known: about the geometric mean of 1 and 10 Gbit/s."""
CANDIDATES = ("tree", "halving_doubling", "ring", "shuffle")
COLLECTED_BYTES = 512 << 10
"""One shot keeps the parts of all senders apart until it folds: worth it only while that stays in the cache."""
ONE_SHOT_BYTES = 64 << 10
"""Vectors so small go by one shot on any number of workers for which the model finds it the fastest."""

MAX_STORED = 1024
"""Tables of measurements that are kept, by name and shape of the group."""


def add_stored_table(
    known: Mapping[str, tuple[Tier, ...]], name: str, measured: tuple[Tier, ...]
) -> dict[str, tuple[Tier, ...]]:
    """With one more table, or another one of that name; those that were measured longest ago go where there are too
    many. In the order in which they were measured."""
    tables = {other: table for other, table in known.items() if other != name}
    tables[name] = measured
    return dict(list(tables.items())[-MAX_STORED:])


def measure_crowd(workers: Iterable[WorkerHello]) -> float:
    """Workers per processor on the machine where they are most crowded; 0 where that is not known."""
    machines: dict[str, list[WorkerHello]] = {}
    for worker in workers:
        if worker.clock and worker.processors:
            machines.setdefault(worker.clock, []).append(worker)
    return max(map(_measure_machine, machines.values()), default=0.0)


def _measure_machine(workers: Sequence[WorkerHello]) -> float:
    """Return how crowded a machine is.

    If it has too few processors for all workers, they are taken to share the same ones.
    """
    shares = [worker.processors for worker in workers]
    is_own = sum(shares) <= max(worker.machine_processors for worker in workers)
    return 1 / min(shares) if is_own else len(shares) / max(shares)


def make_table(peers: Sequence[Peer], model: Model | None = None, crowd: float = 0.0) -> tuple[Tier, ...]:
    """The table of a generation of these workers.

    Args:
        model: what its links were measured to be, or are said to be; None: `UNMEASURED`.
        crowd: as `measure_crowd` says.
    """
    hosts = tuple(len(peer.ranks) for peer in peers)
    topology = HostLayout(hosts, replace(model or UNMEASURED, crowd=crowd))
    most = _one_shot_limit(len(hosts))
    large = [row for row in choose(topology, CANDIDATES) if row.limit < 0 or row.limit > most]
    rows = choose(topology, ("one_shot", *CANDIDATES))
    small = [
        replace(row, limit=most if row.limit < 0 else min(row.limit, most))
        for row, above in zip(rows, [0, *(row.limit for row in rows)], strict=False)
        if above < most
    ]
    if all(row.algorithm != "one_shot" for row in small):
        small, large = [], list(choose(topology, CANDIDATES))
    table = _merge_rows([*small, *large])
    return tuple(Tier(row.algorithm, row.shards, row.limit, large[-1].bytes_per_pack) for row in table)


def _one_shot_limit(hosts: int) -> int:
    """Bytes of the largest vector that may go by one shot: a power of two, as all limits of a table."""
    most = COLLECTED_BYTES // (hosts - 1) if hosts > 1 else 0
    return max(ONE_SHOT_BYTES, 1 << most.bit_length() >> 1)


def _merge_rows(rows: Sequence[Row]) -> list[Row]:
    """Drop rows that say what the next one says."""
    said = [(row.algorithm, row.shards) for row in rows]
    return [row for index, row in enumerate(rows) if said[index : index + 1] != said[index + 1 : index + 2]]


def worst_case_model(links: Sequence[LinkMeasured]) -> Model:
    """The highest latency and the lowest bandwidth of these links, for a ring is as fast as its slowest link.

    Measurements are those of one connection. Without any link, `UNMEASURED`.
    """
    if not links:
        return UNMEASURED
    across = LinkClass(max(link.latency_seconds for link in links), min(link.bytes_per_second for link in links))
    return Model(across, stream=max(UNMEASURED.stream, across.bandwidth))
