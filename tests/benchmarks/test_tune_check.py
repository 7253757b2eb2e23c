"""What `make tune-check` makes of its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.tune_check import (
    Cell,
    choose,
    fit,
    judge,
    make_cell,
    make_model,
    predict,
    predict_seconds,
    table_of,
)

from collectived_proto.types import Tier
from collectived_runtime.plan.cost_model import Model

RING, TREE = ("ring", 1), ("tree", 1)
MIB = 1 << 20


def cell(workers: int, nbytes: int, ring: float, tree: float, tuned: tuple[str, int] = RING) -> Cell:
    return Cell("loopback", workers, nbytes, {RING: ring, TREE: tree}, TREE, tuned)


def test_a_choice_is_judged_by_the_best() -> None:
    cells = [cell(2, 4, 2e-3, 1e-3, TREE), cell(2, MIB, 1e-2, 1.2e-2), cell(4, MIB, 1e-2, 2e-2)]
    by_model, worst, by_links, worst_by_links, error = judge(cells, {cells[0]: 1.2e-3, cells[1]: 1e-2})
    assert by_model.measured == pytest.approx(1 / 3) and not by_model.met
    assert worst.measured == 2.0 and not worst.met and worst.note == "4 workers, loopback, 1 MiB"
    assert by_links.measured == worst_by_links.measured == 1.0 and by_links.met and worst_by_links.met
    assert error.measured == pytest.approx(0.1) and error.met


def predicted_cells(model: Model, counts: tuple[int, ...]) -> list[Cell]:
    """Cells of that many workers on two processors each, whose rings take as long as the model says."""
    cells = [
        Cell("loopback", workers, nbytes, {RING: 1.0}, RING, RING, workers / 2)
        for workers in counts
        for nbytes in (4, 1 << 16, MIB)
    ]
    return [replace(one, seconds={RING: predict_seconds(one, model, RING)}) for one in cells]


def test_a_model_is_found_by_the_times_that_it_predicts() -> None:
    cells = predicted_cells(make_model(30e-6, 20e-6, 1e9, 8e8), (2, 3, 4))
    found = fit(cells)["loopback"]
    errors = [abs(predict_seconds(one, found, RING) / one.seconds[RING] - 1) for one in cells]
    assert sum(errors) / len(errors) < 0.05, errors


def test_a_cell_is_predicted_by_the_cells_of_other_numbers_of_workers() -> None:
    cells = predicted_cells(make_model(30e-6, 20e-6, 1e9, 8e8), (2, 3, 4))
    odd = Cell("loopback", 4, MIB, {RING: 1.0}, RING, RING, 2.0)
    predicted = predict([*cells, odd])
    assert len(predicted) == len(cells) + 1
    same = next(one for one in cells if (one.workers, one.nbytes) == (4, MIB))
    assert predicted[odd] == predicted[same] == pytest.approx(same.seconds[RING], rel=0.2), "its own time counts not"
    assert not predict(cells[:3]), "there are no others"


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
    cells = [cell(2, 4, 2e-4, 1e-3), cell(2, MIB, 1e-2, 2e-2), cell(4, MIB, 2e-2, 1.5e-2)]
    lines = table_of(cells, {cells[2]: 1.6e-2}).splitlines()
    assert lines[0] == "| | 4 B | 1 MiB |"
    assert lines[2] == "| 2 workers, loopback | ring 200 µs (5.00 / 1.00) | ring 10 ms (2.00 / 1.00) |"
    assert lines[3] == "| 4 workers, loopback |  | tree 15 ms (1.00 / 1.33; 16 ms) |"
