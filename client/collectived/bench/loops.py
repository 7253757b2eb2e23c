"""How each operation is called, and the timed loops: nothing is made, printed or gathered in them.

The garbage collector runs, as in any program.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectived.bench.answers import block, fill
from collectived.bench.config import BenchConfig
from collectived.bench.operation_kinds import Extent

Ticks = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])
Call = Callable[[], Any]


def as_user_code(function: Function) -> Function:
    """Lets a function pass for a user's program.

    The library notes its caller: the first frame that is not its own. Here all are, down to the interpreter's, which
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


class BenchMemory(Protocol):
    """The part of a session that a benchmark uses."""

    def empty(self, shape: int, dtype: Any) -> NDArray[Any]: ...


class SendRecvPair(NamedTuple):
    """A send and a recv that were started together, as one piece of work."""

    send: Any
    recv: Any

    def result(self) -> Any:
        received = self.recv.result()
        self.send.result()
        return received


def make_input(order: BenchConfig, extent: Extent, memory: BenchMemory, rank: int) -> NDArray[Any]:
    """A rank's input, in the memory that was ordered."""
    make = memory.empty if order.memory == "worker" else np.empty
    array = make(extent.input_count, order.numpy_dtype)
    fill(array, block(order, rank))
    return array


def make_call(order: BenchConfig, group: Any, array: NDArray[Any]) -> Call:
    """Something that carries out the operation once and returns its result, or with `in_flight` something with
    `result()`."""
    flying = bool(order.in_flight)
    if order.operation == "send_recv":
        return partial(_start_send_recv if flying else _send_recv, group, array)
    method = getattr(group, order.operation)
    kind = order.kind
    arguments: list[Any] = []
    if kind.reduces:
        arguments.append(order.reduction)
    if kind.moves_data:
        arguments.append(array if order.operation != "scatter" or group.rank == order.root else None)
    named: dict[str, Any] = {"root": order.root} if kind.has_root else {}
    return partial(method, *arguments, **named, **({"async_op": True} if flying else {}))


def _start_send_recv(group: Any, array: NDArray[Any]) -> SendRecvPair:
    """To the next rank and from the one before, all at once."""
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return SendRecvPair(group.send(array, to, async_op=True), group.recv(source, async_op=True))


def _send_recv(group: Any, array: NDArray[Any]) -> Any:
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sending = group.send(array, to, async_op=True)
    received = group.recv(source)
    sending.result()
    return received
