"""The short form of the drills (`make drills` plays all of them): what must never break, on daemons of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.drills.cell import Cell
from tests.drills.cells import ALL
from tests.drills.play import Stage


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(few=True) as made:
        yield made


@pytest.mark.parametrize("cell", [cell for cell in ALL if cell.short], ids=lambda cell: cell.name)
def test_a_fault_ends_as_promised(stage: Stage, cell: Cell) -> None:
    result = stage.play(cell)
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.failure, result.failure


def test_there_are_at_least_sixty_cells_with_names_of_their_own() -> None:
    names = [cell.name for cell in ALL]
    assert len(set(names)) == len(names)
    assert sum(cell.family == "faults" for cell in ALL) >= 60
