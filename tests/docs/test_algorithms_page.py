"""The figures of docs/guide/algorithms.md and simulate.md are the simulator's and the checker's."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.docs.blocks import claimed, of_language

import collectived as cd
from collectived_proto.all_reduce_spec import ALGORITHMS
from collectived_runtime.plan.catalog import FLAT_ALGORITHMS
from collectived_runtime.plan.double_tree import all_reduce
from collectived_runtime.plan.moves import Buffer, SendMove, Span


def _load_page() -> ModuleType:
    name = "algorithms_page"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("algorithms_page.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


page = _load_page()
TEXT, COSTS = (path.read_text() for path in page.PAGES)


def test_the_figures_are_what_the_commands_print() -> None:
    assert (page.fresh(TEXT), page.fresh(COSTS)) == (TEXT, COSTS), "run `make docs` and commit the result"


def test_a_changed_figure_is_noticed() -> None:
    assert COSTS.count("$ collectived simulate") >= 2
    assert page.fresh(COSTS.replace("332 µs", "331 µs")) == COSTS


def test_every_algorithm_is_described() -> None:
    for name in (*FLAT_ALGORITHMS, *ALGORITHMS):
        if name not in ("rechd",):
            assert f"### {name}\n" in TEXT or f"`{name}`" in TEXT, name


def test_every_session_of_the_simulator_is_one_of_these() -> None:
    sessions = of_language(claimed(__file__), "console")
    assert sessions and all(session.startswith("$ collectived simulate ") for session in sessions)


def test_the_trees_of_four_are_those_of_the_plan() -> None:
    (drawing,) = of_language(claimed(__file__), "text")
    halves = [{(int(a), int(b)) for a, b in re.findall(r"(\d)→(\d)", half)} for half in drawing.split("second half:")]
    found: list[set[tuple[int, int]]] = [set(), set()]
    for me in range(4):
        sent = [move for moves in all_reduce(range(4), me, Span(0, 4)) for move in moves if isinstance(move, SendMove)]
        for move in sent:
            if move.source is not Buffer.OUTPUT:  # on the way up
                found[move.span.start // 2].add((me, move.peer))
    assert halves == found


def test_the_tiers_of_the_page_are_taken_and_packs_go_where_they_say() -> None:
    (text,) = of_language(claimed(__file__), "python")
    spec = eval(text)
    cd.contrib.distribute.MultiWorkerAllReduce(["/job:worker/task:0"], 0, all_reduce_spec=spec)
    with pytest.raises(ValueError, match="must be -1"):
        cd.contrib.distribute.MultiWorkerAllReduce(["/job:worker/task:0"], 0, all_reduce_spec=spec[:1])
