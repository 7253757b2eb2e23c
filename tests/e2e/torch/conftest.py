"""Workers for programs of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.e2e.conftest import Cluster


@pytest.fixture(params=[1, 2], ids=["one-host", "two-hosts"])
def cluster(request: pytest.FixtureRequest, grown: Callable[[int], Cluster]) -> Any:
    """Ranks of one host meet in a segment of shared memory, those of two over their workers."""
    return grown(request.param)
