"""The timed loops, and orders: what is called how often, and what is kept."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from collectived.bench.__main__ import USAGE, main
from collectived.bench.config import BenchConfig
from collectived.bench.loops import as_user_code, time_calls


class Done:
    """A piece of work that knows how many were started before it was waited for."""

    def __init__(self, number: int, started: list[int], waited: Callable[[int, int], None]) -> None:
        self._number, self._started, self._waited = number, started, waited
        started.append(number)

    def result(self) -> int:
        self._waited(self._number, len(self._started))
        return self._number


def test_a_blocking_loop_times_every_call_and_returns_the_last_result() -> None:
    results = itertools.count()
    ticks, last = time_calls(lambda: next(results), 7, in_flight=0)
    assert ticks.shape == (7,) and ticks.dtype == np.int64 and np.all(ticks >= 0)
    assert last == 6


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_so_many_are_in_flight_before_the_first_is_waited_for(in_flight: int) -> None:
    started: list[int] = []
    waited: list[tuple[int, int]] = []
    numbers = itertools.count()

    def call() -> Any:
        return Done(next(numbers), started, lambda number, begun: waited.append((number, begun)))

    ticks, last = time_calls(call, 4, in_flight)
    assert ticks.shape == (4,)
    assert waited[:4] == [(number, in_flight + number) for number in range(4)]
    assert [number for number, _ in waited] == started == list(range(in_flight + 3)) and last == in_flight + 2


def test_a_result_is_given_back_before_the_next_is_made() -> None:
    alive: list[int] = []

    class Result:
        def __init__(self) -> None:
            assert not alive
            alive.append(1)

        def __del__(self) -> None:
            alive.clear()

    time_calls(Result, 3, in_flight=0)


def test_a_loop_passes_for_a_users_program() -> None:
    @as_user_code
    def function() -> str:
        return sys._getframe().f_code.co_filename

    assert function() == "bench/test_loops.py"


def test_an_order_travels_as_json() -> None:
    order = BenchConfig("reduce", reduce_op="max", root=3, timeout=2.5, check=False)
    assert BenchConfig.from_json(json.dumps(asdict(order))) == order


@pytest.mark.parametrize("text", ["", "7", "[]", "{}", '{"operation": "sort"}', '{"operation": "reduce", "how": 1}'])
def test_what_is_no_order_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([text]) == USAGE
    said = capsys.readouterr().err
    assert "is no order" in said and "expected a JSON object with keys of operation, dtype" in said
