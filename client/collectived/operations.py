"""The operation that a call asks for. The same arguments give the same object, by which a repeated call is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, SupportsIndex, TypeVar, cast

import numpy as np

from collectived.arguments import check_integer
from collectived.values.axes import check_axis
from collectived_proto.types import (
    ANY_SOURCE,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    Operation,
    Recv,
    Reduce,
    ReduceOp,
    ReduceScatter,
    Scatter,
    Send,
)

_MOST_REMEMBERED = 1024  # of each
_MAX_TAG = (1 << 32) - 1

Op = ReduceOp | str
Sizes = tuple[int, ...]  # checked
Maker = TypeVar("Maker", bound=Callable[..., Operation])


def _remember(make: Maker) -> Maker:
    """`make`, whose arguments are checked the first time. Those of another type are others: True is no rank 1."""

    @lru_cache(maxsize=_MOST_REMEMBERED, typed=True)
    def known(*arguments: Any) -> Operation:
        if any(hasattr(one, "__array__") and not isinstance(one, np.generic) for one in arguments):
            raise TypeError("an array, or a tensor, may hold another number the next time")
        return make(*arguments)

    @wraps(make)
    def find(*arguments: Any) -> Operation:
        try:
            return known(*arguments)
        except TypeError:  # one is refused, or cannot be remembered
            pass
        return make(*arguments)

    return cast(Maker, find)


_sums: dict[Op, AllReduce] = {}  # by name in any case, and by enumeration: some hundreds at most


def all_reduce(reduce_op: Op) -> AllReduce:
    # Looked up here, for the way of `_remember` takes five times as long.
    known = _sums.get(reduce_op) if type(reduce_op) in (str, ReduceOp) else None
    if known is None:
        checked = ReduceOp.of(reduce_op, "all_reduce")
        known = _sums.setdefault(checked, AllReduce(checked))
        if type(reduce_op) is str:  # another library's may have no hash
            _sums[reduce_op] = known
    return known


@_remember
def reduce(reduce_op: Op, root: SupportsIndex, size: int) -> Reduce:
    return Reduce(ReduceOp.of(reduce_op, "reduce"), _check_rank(root, "root", size))


@_remember
def reduce_scatter(reduce_op: Op, axis: SupportsIndex, sizes: Sizes) -> ReduceScatter:
    return ReduceScatter(ReduceOp.of(reduce_op, "reduce_scatter"), check_axis(axis), sizes)


@_remember
def broadcast(root: SupportsIndex, size: int) -> Broadcast:
    return Broadcast(_check_rank(root, "root", size))


@_remember
def all_gather(axis: SupportsIndex) -> AllGather:
    return AllGather(check_axis(axis))


@_remember
def gather(root: SupportsIndex, axis: SupportsIndex, size: int) -> Gather:
    return Gather(_check_rank(root, "root", size), check_axis(axis))


@_remember
def scatter(root: SupportsIndex, axis: SupportsIndex, sizes: Sizes, size: int) -> Scatter:
    return Scatter(_check_rank(root, "root", size), check_axis(axis), sizes)


@_remember
def all_to_all(axis: SupportsIndex, sizes: Sizes) -> AllToAll:
    return AllToAll(check_axis(axis), sizes)


@_remember
def send(to: SupportsIndex, tag: SupportsIndex, size: int) -> Send:
    return Send(_check_rank(to, "to", size), _check_tag(tag))


@_remember
def recv(source: SupportsIndex | None, tag: SupportsIndex, size: int) -> Recv:
    return Recv(ANY_SOURCE if source is None else _check_rank(source, "source", size), _check_tag(tag))


def _check_rank(rank: SupportsIndex, name: str, size: int) -> int:
    return check_integer(rank, name, 0, size - 1, f"a rank of this group, 0 to {size - 1}")


def _check_tag(tag: SupportsIndex) -> int:
    return check_integer(tag, "tag", 0, _MAX_TAG, f"a whole number from 0 to {_MAX_TAG}")
