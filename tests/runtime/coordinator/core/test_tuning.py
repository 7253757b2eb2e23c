"""What the table of a generation says of one shot, which keeps apart what arrives."""

from __future__ import annotations

import pytest

from collectived_proto.types import Peer, Tier
from collectived_runtime.coordinator.core.events import WorkerHello
from collectived_runtime.coordinator.core.tuning import make_table, measure_crowd
from collectived_runtime.plan.cost_model import LinkClass, Model

FAR = Model(LinkClass(0.1, 1.25e9))  # links on which rounds cost most


def find_limit(workers: int, model: Model | None = None) -> int:
    """Bytes of the largest vector that goes by one shot."""
    table = make_table([Peer(task, "i", "host", "", (task,)) for task in range(workers)], model)
    return max((tier.limit for tier in table if tier.algorithm == "one_shot"), default=0)


@pytest.mark.parametrize(("workers", "limit"), [(2, 512 << 10), (3, 32 << 10), (4, 16 << 10), (8, 8 << 10)])
def test_few_workers_exchange_larger_vectors_in_one_round(workers: int, limit: int) -> None:
    assert find_limit(workers) == limit


@pytest.mark.parametrize(("workers", "limit"), [(2, 512 << 10), (3, 256 << 10), (4, 128 << 10), (40, 64 << 10)])
def test_what_arrives_stays_in_the_cache_however_far_the_workers_are(workers: int, limit: int) -> None:
    assert find_limit(workers, FAR) == limit


def test_larger_vectors_go_as_on_any_number_of_workers() -> None:
    table = make_table([Peer(task, "i", "host", "", (task,)) for task in range(2)])
    assert table == (Tier("one_shot", 1, 512 << 10, 1 << 20), Tier("halving_doubling", 1, -1, 1 << 20))


def hello(machine: str, processors: int, of: int = 0) -> WorkerHello:
    return WorkerHello(0, "i", "host", 1, clock=machine, processors=processors, machine_processors=of or processors)


@pytest.mark.parametrize(
    ("workers", "crowd"),
    [
        ([hello("a", 64), hello("b", 64)], 1 / 64),
        ([hello("a", 2)] * 3 + [hello("b", 64)], 1.5),
        ([hello("a", 8, of=64)] * 8, 1 / 8),
        ([hello("a", 8, of=64)] * 9, 9 / 8),
        ([hello("", 2)] * 8, 0.0),
        ([hello("a", 0)] * 8, 0.0),
        ([], 0.0),
    ],
    ids=[
        "machines of their own",
        "three on one",
        "shares of one",
        "more than one has",
        "machine not known",
        "processors not told",
        "nobody",
    ],
)
def test_the_most_crowded_machine_counts(workers: list[WorkerHello], crowd: float) -> None:
    assert measure_crowd(workers) == crowd


def test_workers_that_share_processors_send_fewer_messages() -> None:
    peers = [Peer(task, "i", "host", "", (task,)) for task in range(8)]
    assert make_table(peers)[0].algorithm == "one_shot"
    assert make_table(peers, crowd=4.0)[0].algorithm == "tree"
    assert make_table(peers, crowd=0.1) == make_table(peers)
