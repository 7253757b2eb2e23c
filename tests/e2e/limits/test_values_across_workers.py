"""Values that go to other workers by the segment, on workers with little memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.e2e.conftest import Cluster

import collectived as cd


@pytest.mark.parametrize("limit", ["20MiB", "32MiB", "64MiB", "256MiB"])
def test_values_of_megabytes_go_on_however_little_memory_there_is(
    make_cluster: Callable[..., Cluster], limit: str
) -> None:
    """With so little no rank may be shown out for what its segment takes."""
    cluster = make_cluster(2, worker_options=("--memory-limit", limit))

    def body(group: cd.Group) -> list[float]:
        value = np.ones(1_000_000, np.float32)
        return [float(group.all_reduce("sum", value, timeout=30)[-1]) for _ in range(12)]

    assert cluster.run(2, body) == [[2.0] * 12] * 2
