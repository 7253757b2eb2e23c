"""What the table of a generation says of one shot, which keeps apart what arrives."""

from __future__ import annotations

import pytest

from collectived_proto.types import Peer, Tier
from collectived_runtime.coordinator.core.tuning import make_table
from collectived_runtime.plan.cost_model import LinkClass, Model

FAR = Model(LinkClass(0.1, 1.25e9))  # links on which rounds cost most


def find_limit(workers: int, model: Model | None = None) -> int:
    """Bytes of the largest vector that goes by one shot."""
    table = make_table([Peer(task, "i", "host", "", (task,)) for task in range(workers)], model)
    return max((tier.limit for tier in table if tier.algorithm == "one_shot"), default=0)


@pytest.mark.parametrize(("workers", "limit"), [(2, 512 << 10), (3, 128 << 10), (4, 64 << 10), (8, 32 << 10)])
def test_few_workers_exchange_larger_vectors_in_one_round(workers: int, limit: int) -> None:
    assert find_limit(workers) == limit


@pytest.mark.parametrize(("workers", "limit"), [(2, 512 << 10), (3, 256 << 10), (4, 128 << 10), (40, 64 << 10)])
def test_what_arrives_stays_in_the_cache_however_far_the_workers_are(workers: int, limit: int) -> None:
    assert find_limit(workers, FAR) == limit


def test_larger_vectors_go_as_on_any_number_of_workers() -> None:
    table = make_table([Peer(task, "i", "host", "", (task,)) for task in range(2)])
    assert table == (Tier("one_shot", 1, 512 << 10, 1 << 20), Tier("halving_doubling", 1, -1, 1 << 20))
