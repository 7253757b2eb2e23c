"""Descriptors: the limit is raised as far as it may be, and a reserve stays for those who are in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from collectived_runtime.limits.descriptors import (
    RESERVED_DESCRIPTORS,
    compute_connection_limit,
    has_descriptor_room,
)

RAISING = """
import resource
from collectived_runtime.limits.descriptors import raise_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, min(hard, 900)))
print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_becomes_the_hard_one() -> None:
    said = subprocess.run([sys.executable, "-c", RAISING], capture_output=True, text=True, check=True).stdout
    assert said == "900 (900, 900)\n"


@pytest.mark.parametrize(
    ("limit", "descriptor", "admits"),
    [
        (20_000, 20_000 - RESERVED_DESCRIPTORS - 1, True),
        (20_000, 20_000 - RESERVED_DESCRIPTORS, False),
        (400, 299, True),
        (400, 300, False),
    ],
)
def test_a_reserve_stays_of_a_quarter_at_most(limit: int, descriptor: int, admits: bool) -> None:
    assert has_descriptor_room(limit, descriptor) == admits


@pytest.mark.parametrize(
    ("wanted", "available", "addresses", "each"),
    [(8192, 10_000, 1, 8192), (8192, 10_000, 2, 5000), (0, 10_000, 2, 5000), (20, 10_000, 2, 20), (8192, 1, 2, 1)],
)
def test_connections_never_take_more_than_is_there(wanted: int, available: int, addresses: int, each: int) -> None:
    assert compute_connection_limit(wanted, available, addresses) == each
