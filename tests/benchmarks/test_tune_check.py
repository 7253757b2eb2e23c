"""What `make tune-check` makes of its figures."""

from __future__ import annotations

import pytest
from benchmarks.tune_check import Cell, choose, fit, judge, make_cell, predict, table_of

from collectived_proto.types import Tier
from collectived_runtime.simulation.study import SimulationSpec, predict_cost

RING, TREE = ("ring", 1), ("tree", 1)
MIB = 1 << 20


def cell(workers: int, nbytes: int, ring: float, tree: float, tuned: tuple[str, int] = RING) -> Cell:
    return Cell("loopback", workers, nbytes, {RING: ring, TREE: tree}, TREE, tuned)


def test_a_choice_is_judged_by_the_best() -> None:
    cells = [cell(2, 4, 2e-3, 1e-3, TREE), cell(2, MIB, 1e-2, 1.2e-2), cell(4, MIB, 1e-2, 2e-2)]
    by_model, worst, by_links, worst_by_links, _ = judge(cells)
    assert by_model.measured == pytest.approx(1 / 3) and not by_model.met
    assert worst.measured == 2.0 and not worst.met and worst.note == "4 workers, loopback, 1 MiB"
    assert by_links.measured == worst_by_links.measured == 1.0 and by_links.met and worst_by_links.met


def test_the_model_is_fitted_to_the_ring_of_two_workers() -> None:
    model = fit(4, 200e-6, 16 * MIB, 50e-3)
    for nbytes, seconds in ((4, 200e-6), (16 * MIB, 50e-3)):
        question = SimulationSpec((1, 1), (nbytes,), ("ring",), model)
        assert predict_cost(question, "ring", nbytes, 1).seconds == pytest.approx(
            seconds, rel=0.03
        )  # one element has no two halves


def test_only_cells_that_the_model_was_not_fitted_to_are_predicted() -> None:
    cells = [cell(2, 4, 2e-4, 1e-3), cell(2, MIB, 1e-2, 2e-2), cell(2, 16 * MIB, 5e-2, 1e-1), cell(4, MIB, 2e-2, 3e-2)]
    assert [(one.workers, one.nbytes) for one, _ in predict(cells)] == [(2, MIB), (4, MIB)]
    assert not predict(cells[3:]), "without two workers there is no model"


def test_a_cell_takes_the_slowest_rank_of_each_round_and_the_median_of_the_rounds() -> None:
    by_rank = [
        {MIB: {"ring-1": [1.0, 5.0, 2.0], "tree-1": [9.0, 9.0, 9.0], "tuned": [4.0, 4.0, 4.0]}},
        {MIB: {"ring-1": [3.0, 1.0, 1.0], "tree-1": [8.0, 8.0, 9.5], "tuned": [4.0, 4.0, 4.0]}},
    ]
    tables = [Tier("tree", 1, 1 << 10), Tier("ring")], [Tier("ring", 2)]
    found = make_cell("loopback", 2, MIB, by_rank, [RING, TREE, ("one_shot", 1)], *tables)
    assert found.seconds == {RING: 3.0, TREE: 9.0, ("ring", 2): 4.0}
    assert (found.auto, found.tuned, found.best) == (RING, ("ring", 2), RING)
    assert choose(tables[0], 4) == TREE


def test_the_table_has_a_row_for_each_kind_of_link_and_number_of_workers() -> None:
    lines = table_of([cell(2, 4, 2e-4, 1e-3), cell(2, MIB, 1e-2, 2e-2), cell(4, MIB, 2e-2, 1.5e-2)]).splitlines()
    assert lines[0] == "| | 4 B | 1 MiB |"
    assert lines[2] == "| 2 workers, loopback | ring 200 µs (5.00 / 1.00) | ring 10 ms (2.00 / 1.00) |"
    assert lines[3].startswith("| 4 workers, loopback |  | tree 15 ms (1.00 / 1.33; ")
