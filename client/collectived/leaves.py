"""Leaves: which objects collectives carry, seen as host arrays on the way in and given back as what they were.

A new kind of array is one entry of `_KINDS`, named as its class names itself, so that no library is imported for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_proto.numpy_types import from_numpy
from collectived_proto.types import AllReduce, DType, Operation, Reduce, ReduceOp

Array = NDArray[Any]
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """One kind of leaf.

    Args:
        array: the leaf as a host array, sharing its memory where that is possible.
        restore: a result, in an array of its own, as that kind.
        shares: results may be read-only views of worker memory if the input lay there.
    """

    array: Callable[[Any], Array]
    restore: Callable[[Array], Any]
    shares: bool = False


def _same(value: Array) -> Array:
    return value


def _item(value: Array) -> Any:
    return value.item()


def _integer(value: int) -> Array:
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise ValueError(f"{value} does not fit in int64; send it as float or in parts") from None


ARRAY = Kind(_same, _same, shares=True)
_KINDS = {
    "numpy.ndarray": ARRAY,
    "numpy.generic": Kind(np.asarray, lambda value: value[()]),
    "builtins.bool": Kind(np.asarray, _item),
    "builtins.int": Kind(_integer, _item),
    "builtins.float": Kind(np.asarray, _item),
    "builtins.complex": Kind(np.asarray, _item),
}
_REFUSED = {
    "numpy.ma.MaskedArray": "the mask would be lost: use .filled()",
    "builtins.str": "text cannot be reduced or sent: send numbers",
    "builtins.bytes": "send numpy.frombuffer(value, numpy.uint8)",
    "builtins.generator": "it can be walked only once: make a list of it first",
    "builtins.set": "a set has no order that ranks could agree on: make a sorted list of it",
}
_OTHERWISE = (
    "expected NumPy arrays, numbers or None, in lists, tuples, namedtuples or dicts; "
    "convert it with numpy.asarray or dict()"
)
_by_type: dict[type[Any], Kind] = {np.ndarray: ARRAY}


class UnknownLeaf(TypeError):
    """An object that collectives do not carry; the message lacks the path, which the caller knows."""


def kind_of(value: object) -> Kind:
    """The kind of a leaf.

    Raises:
        UnknownLeaf: collectives do not carry such objects.
    """
    kind = _by_type.get(type(value))
    return kind if kind is not None else _find(type(value))


def _find(cls: type[Any]) -> Kind:
    for base in cls.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in _REFUSED:
            raise UnknownLeaf(f"a {cls.__name__}: {_REFUSED[name]}")
        if name in _KINDS:
            return _by_type.setdefault(cls, _KINDS[name])
    raise UnknownLeaf(f"a {cls.__module__}.{cls.__qualname__}: {_OTHERWISE}")


def shown(path: str) -> str:
    """A path for a message; the value itself has none."""
    return path or "the value"


def element_type(dtype: np.dtype[Any], path: str) -> DType:
    """The element type of an array; any byte order.

    Raises:
        TypeError: collectives do not carry such elements.
    """
    found = from_numpy(dtype if dtype.isnative else dtype.newbyteorder("="))
    if found is None:
        advice = "give each element as a leaf of its own" if dtype.hasobject else "convert it with .astype()"
        raise TypeError(
            f"{shown(path)} has dtype {dtype}: expected one of {', '.join(kind.label for kind in DType)}; {advice}"
        )
    return found


def check_reducible(operation: Operation, dtype: DType, path: str) -> None:
    """Raises TypeError where `operation` is a reduction that elements of `dtype` do not have."""
    if not isinstance(operation, (AllReduce, Reduce)):
        return
    op = operation.reduce_op
    if dtype is DType.BOOL:
        advice = 'convert it with .astype(numpy.uint8) and use "max" or "min" for any or all'
    elif op in _BITWISE and not dtype.is_integer:
        advice = "bitwise operations take integers"
    elif op in _ORDERED and dtype.is_complex:
        advice = "complex numbers have no order"
    else:
        return
    raise TypeError(f"{shown(path)} has dtype {dtype.label}, which {op.value} does not take: {advice}")
