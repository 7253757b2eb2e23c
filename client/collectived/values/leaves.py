"""Leaves: which objects collectives carry, seen as host arrays on the way in and given back as what they were.

A new kind of array is one entry of `_KINDS`, named as its class names itself, so that no library is imported for it.
What has no name here but speaks DLPack gets a kind made for its class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from collectived.values import libraries
from collectived.values.libraries import Array as Array
from collectived.values.libraries import UnknownLeaf as UnknownLeaf
from collectived_proto.numpy_types import from_numpy
from collectived_proto.types import AllReduce, DType, Operation, Reduce, ReduceOp

_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """One kind of leaf.

    Args:
        array: the leaf as a host array, sharing its memory where that is possible.
        restore: a result, in an array of its own, as that kind.
        shares: results may be read-only views of worker memory if the input lay there.
        looks: what `restore` makes looks into the array, and can be written.
    """

    array: Callable[[Any], Array]
    restore: Callable[[Array], Any]
    shares: bool = False
    looks: bool = False


def _same(value: Array) -> Array:
    return value


def _item(value: Array) -> Any:
    return value.item()


def _integer(value: int) -> Array:
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise ValueError(f"{value} does not fit in int64; send it as float or in parts") from None


ARRAY = Kind(_same, _same, shares=True, looks=True)
_TORCH = Kind(libraries.from_torch, libraries.to_torch, looks=True)
_JAX = Kind(libraries.from_jax, libraries.to_jax)
_KINDS = {
    "numpy.ndarray": ARRAY,
    "torch.Tensor": _TORCH,
    "jaxlib._jax.ArrayImpl": _JAX,
    "jaxlib.xla_extension.ArrayImpl": _JAX,  # before JAX 0.6
    "numpy.generic": Kind(np.asarray, lambda value: value[()]),
    "builtins.bool": Kind(np.asarray, _item),
    "builtins.int": Kind(_integer, _item),
    "builtins.float": Kind(np.asarray, _item),
    "builtins.complex": Kind(np.asarray, _item),
}
_MODULES = {"numpy": ARRAY, "torch": _TORCH, "jax": _JAX, "jax.numpy": _JAX}
_REFUSED = {
    "jax._src.core.Tracer": "it stands for values yet to come: call collectives outside of jit, grad and vmap",
    "jax._src.prng.PRNGKeyArray": "send jax.random.key_data(key)",
    "jax._src.random.prng.PRNGKeyArray": "send jax.random.key_data(key)",
    "numpy.ma.MaskedArray": "the mask would be lost: use .filled()",
    "builtins.str": "text cannot be reduced or sent: send numbers",
    "builtins.bytes": "send numpy.frombuffer(value, numpy.uint8)",
    "builtins.generator": "it can be walked only once: make a list of it first",
    "builtins.set": "a set has no order that ranks could agree on: make a sorted list of it",
}
_OTHERWISE = (
    "expected NumPy arrays, or those of PyTorch, JAX or DLPack, numbers or None, in lists, tuples, namedtuples or "
    "dicts; convert it with numpy.asarray or dict()"
)
_by_type: dict[type[Any], Kind] = {np.ndarray: ARRAY}


def kind_of(value: object) -> Kind:
    """The kind of a leaf.

    Raises:
        UnknownLeaf: collectives do not carry such objects.
    """
    kind = _by_type.get(type(value))
    return kind if kind is not None else _find(value)


def _find(value: object) -> Kind:
    cls = type(value)
    for base in cls.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in _REFUSED:
            raise UnknownLeaf(f"a {cls.__name__}: {_REFUSED[name]}")
        if name in _KINDS:
            return _by_type.setdefault(cls, _KINDS[name])
    libraries.check_no_gpu(value)
    if hasattr(cls, "__dlpack__"):
        return _by_type.setdefault(cls, Kind(libraries.from_dlpack, libraries.to_dlpack(value), looks=True))
    raise UnknownLeaf(f"a {cls.__module__}.{cls.__qualname__}: {_OTHERWISE}")


def writable_view(leaf: object) -> Array:
    """An array through which results are written into a caller's own: a NumPy array, or a PyTorch tensor on the CPU.

    Raises:
        UnknownLeaf: it is neither.
        ValueError: it cannot be written.
    """
    kind = kind_of(leaf)
    if kind is not ARRAY and kind is not _TORCH:
        raise UnknownLeaf(f"a {type(leaf).__name__}: expected a NumPy array or a PyTorch tensor")
    view = kind.array(leaf)
    if kind is _TORCH:
        libraries.check_writable(leaf)
    elif not view.flags.writeable:
        raise ValueError("read-only: it cannot be written")
    return view


class Template(NamedTuple):
    """What an array in worker memory is to be like; None where the template does not say."""

    kind: Kind
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None


def template(like: object) -> Template:
    """What `session.empty(like=...)` asks for: an array's kind, shape and dtype, a library's kind, or NumPy's.

    Raises:
        TypeError: `like` is neither, or arrays of its kind cannot look into memory that is written.
    """
    if like is None:
        return Template(ARRAY, None, None)
    if isinstance(like, ModuleType):
        kind = _MODULES.get(like.__name__)
        if kind is None:
            known = ", ".join(sorted(_MODULES))
            raise TypeError(f"like is the module {like.__name__}: expected an array, or one of the modules {known}")
        found = Template(kind, None, None)
    else:
        try:
            kind = kind_of(like)
            array = kind.array(like)
        except UnknownLeaf as error:
            raise TypeError(f"like is {error}") from None
        found = Template(kind, array.shape, array.dtype)
    if kind is _JAX:
        raise TypeError("like is of JAX, whose arrays are never written: take a NumPy array, and make JAX arrays of it")
    if not kind.looks:
        raise TypeError(f"like is a {type(like).__name__}: expected an array, or the module of a library")
    return found


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """NumPy's dtype for what a caller named, be it a `torch.dtype`.

    Raises:
        TypeError: there is none.
    """
    try:
        if f"{type(dtype).__module__}.{type(dtype).__qualname__}" == "torch.dtype":
            return libraries.dtype_of_torch(dtype)
    except (UnknownLeaf, RuntimeError):
        raise TypeError(f"collectives do not carry {dtype}: expected one of {_labels()}") from None
    found: np.dtype[Any] = np.dtype(dtype)
    return found


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
        raise TypeError(f"{shown(path)} has dtype {dtype}: expected one of {_labels()}; {advice}")
    return found


def _labels() -> str:
    return ", ".join(kind.label for kind in DType)


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
