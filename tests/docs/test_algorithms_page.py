"""The figures of docs/guide/algorithms.md and simulate.md are the simulator's and the checker's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from collectived_proto.all_reduce_spec import ALGORITHMS
from collectived_runtime.plan.catalog import FLAT_ALGORITHMS


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
