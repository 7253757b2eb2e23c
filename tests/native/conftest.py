"""Carriers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.native.carriers import Lonely, Make, keep_ranks, play_peer


@pytest.fixture
def make_ranks() -> Iterator[Make]:
    with keep_ranks() as make:
        yield make


@pytest.fixture
def lonely() -> Iterator[Lonely]:
    with play_peer() as made:
        yield made
