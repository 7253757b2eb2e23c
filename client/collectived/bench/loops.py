"""The timed loops: nothing is made, printed or gathered in them. The garbage collector runs, as in any program."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectived.bench.operations import Call

Ticks = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])


def as_user_code(function: Function) -> Function:
    """Lets a function pass for a user's program.

    The library notes who calls it: the first frame that is not its own. Here all are, down to the interpreter's, which
    costs more to find than in a program, and says less.
    """
    code = function.__code__
    function.__code__ = code.replace(co_filename=f"bench/{code.co_filename.rpartition('/')[2]}")
    return function


def time_calls(call: Call, iterations: int, in_flight: int) -> tuple[Ticks, Any]:
    """Nanoseconds of each iteration, of shape [iterations], and the result of the last one.

    Args:
        in_flight: 0: `call` blocks, and returns a result; else it returns something with `result()`, and so many are
            started before the first is waited for.
    """
    ticks = np.zeros(iterations + 1, np.int64)
    result = _pipelined(call, ticks, in_flight) if in_flight else _blocking(call, ticks)
    return np.diff(ticks), result


@as_user_code
def _blocking(call: Call, ticks: Ticks) -> Any:
    clock, result = time.perf_counter_ns, None
    ticks[0] = clock()
    for number in range(1, len(ticks)):
        result = None  # given back before the next one is made
        result = call()
        ticks[number] = clock()
    return result


@as_user_code
def _pipelined(call: Call, ticks: Ticks, in_flight: int) -> Any:
    """The pipe is full when the clock starts, and is emptied when it has stopped."""
    clock, result = time.perf_counter_ns, None
    works = deque(call() for _ in range(in_flight - 1))
    ticks[0] = clock()
    for number in range(1, len(ticks)):
        works.append(call())
        result = None
        result = works.popleft().result()
        ticks[number] = clock()
    while works:
        result = works.popleft().result()
    return result
