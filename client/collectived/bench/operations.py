"""How each operation is called: with everything but the call itself done before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from collectived.bench.answers import block, fill
from collectived.bench.config import BenchConfig
from collectived.bench.operation_kinds import Extent

Call = Callable[[], Any]


class BenchRanks(Protocol):
    """What is asked of a group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class BenchMemory(Protocol):
    """What is asked of a session."""

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
