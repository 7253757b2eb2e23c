"""A rank whose worker has no memory for its value: all ranks are told, and no step meets another of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectived as cd

pytestmark = pytest.mark.parametrize("transport", ["shared memory", "grpc"], indirect=True)
MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(make_cluster: Callable[..., Any]) -> Any:
    """Two workers: where all ranks are on one, values are read where they lie, and nobody needs memory for them."""
    return make_cluster(2, worker_options=("--max-session-memory", "16MiB"))


def test_a_rank_that_is_refused_memory_ends_the_generation_with_that_error_on_all(cluster: Any) -> None:
    """Each step sums the same shape; rank 1 has no room for one of its values, catches the error and goes on."""

    def body(group: cd.Group) -> Any:
        sums: list[Any] = []
        for step in range(4):
            large = step == 2 and group.rank == 1
            value = np.full(4 * MIB if large else 3, float(step))
            try:
                sums.append(group.all_reduce("sum", value)[0])
            except cd.errors.CollectiveError as error:
                sums.append((type(error), [member.rank for member in error.missing], error.rejoin))
        return sums

    failed = (cd.errors.ResourceExhaustedError, [1], True)
    assert cluster.run(2, body) == [[0, 2, failed, failed]] * 2
