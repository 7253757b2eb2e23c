"""Leaves: which objects collectives carry, seen as host arrays on the way in and given back as what they were.

A new kind of array is one entry of `_KINDS`, named as its class names itself, so that no library is imported for it.
An array without an entry that speaks DLPack, or has `__cuda_array_interface__`, gets a kind made for its class.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from collectived.gpu import libraries as gpus
from collectived.gpu.array import DeviceArray
from collectived.values import libraries
from collectived.values.libraries import Array as Array
from collectived.values.libraries import UnknownLeaf as UnknownLeaf
from collectived_proto.numpy_types import from_numpy
from collectived_proto.types import AllReduce, DType, Operation, Reduce, ReduceOp

_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayKind:
    """One kind of leaf.

    Args:
        to_array: the leaf as a host array, sharing its memory where that is possible.
        restore: a result, in an array of its own, as that kind.
        can_share: results may be read-only views of worker memory if the input lay there.
        restores_view: what `restore` makes looks into the array, and can be written.
        is_device: its elements lie on a GPU: `to_array` gives a `DeviceArray`, and `restore` takes one too.
        is_stream_ordered: what `restore` makes may be handed out before its elements are there, for use in stream
            order.
        current_stream: the handle of the stream that is the caller's current one there; None: arrays themselves say
            theirs.
        resolve: a value's own kind, where not all of its class are of this one.
    """

    to_array: Callable[[Any], Any]
    restore: Callable[[Any], Any]
    can_share: bool = False
    restores_view: bool = False
    is_device: bool = False
    is_stream_ordered: bool = False
    current_stream: Callable[[], int] | None = None
    resolve: Callable[[Any], ArrayKind] | None = None


def _identity(value: Array) -> Array:
    return value


def _item(value: Array) -> Any:
    return value.item()


def _int_to_array(value: int) -> Array:
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise ValueError(f"{value} does not fit in int64; send it as float or in parts") from None


def _make_gpu_kind(
    array: Callable[[Any], Any],
    restore: Callable[[Any, int], Any],
    stream: Callable[[int], int] | None = None,
    *,
    looks: bool = True,
) -> Callable[[int], ArrayKind]:
    """By number of the device, the kind of a library's arrays there."""

    @functools.cache
    def kind(device: int) -> ArrayKind:
        return ArrayKind(
            functools.partial(libraries.import_gpu_array, array),
            lambda result: restore(result, device),
            restores_view=looks,
            is_device=True,
            is_stream_ordered=stream is not None,
            current_stream=None if stream is None else functools.partial(stream, device),
        )

    return kind


def _device_array_kind(array: DeviceArray) -> ArrayKind:
    """Of an array that `Session.empty` has made, or a result: results are like it, in memory of the same worker."""
    origin = array.origin
    if origin.kind is None:

        def restore(result: Any) -> Any:
            if isinstance(result, DeviceArray):
                return result
            made = origin.empty(result.shape, result.dtype)
            made.assign(result)
            return made

        origin.kind = ArrayKind(_identity, restore, restores_view=True, is_device=True, is_stream_ordered=True)
    found: ArrayKind = origin.kind
    return found


ARRAY = ArrayKind(_identity, _identity, can_share=True, restores_view=True)
CUPY = _make_gpu_kind(gpus.from_cupy, gpus.to_cupy, gpus.stream_of_cupy)
TORCH_ON_GPU = _make_gpu_kind(gpus.from_torch, gpus.to_torch, gpus.stream_of_torch)
_TORCH_ON_HOST = ArrayKind(libraries.from_torch, libraries.to_torch, restores_view=True)
_TORCH = dataclasses.replace(
    _TORCH_ON_HOST, resolve=lambda tensor: TORCH_ON_GPU(tensor.device.index) if tensor.is_cuda else _TORCH_ON_HOST
)
_JAX_ON_HOST = ArrayKind(libraries.from_jax, libraries.to_jax)
_JAX_ON_GPU = _make_gpu_kind(gpus.from_dlpack, gpus.to_jax, looks=False)
_JAX = dataclasses.replace(
    _JAX_ON_HOST,
    resolve=lambda array: _JAX_ON_HOST if (number := libraries.gpu_of_jax(array)) is None else _JAX_ON_GPU(number),
)
_KINDS = {
    "numpy.ndarray": ARRAY,
    "torch.Tensor": _TORCH,
    "cupy.ndarray": ArrayKind(
        _identity, _identity, restores_view=True, is_device=True, resolve=lambda value: CUPY(value.device.id)
    ),
    "collectived.gpu.array.DeviceArray": ArrayKind(
        _identity, _identity, restores_view=True, is_device=True, resolve=_device_array_kind
    ),
    "jaxlib._jax.ArrayImpl": _JAX,
    "jaxlib.xla_extension.ArrayImpl": _JAX,  # before JAX 0.6
    "numpy.generic": ArrayKind(np.asarray, lambda value: value[()]),
    "builtins.bool": ArrayKind(np.asarray, _item),
    "builtins.int": ArrayKind(_int_to_array, _item),
    "builtins.float": ArrayKind(np.asarray, _item),
    "builtins.complex": ArrayKind(np.asarray, _item),
}
_CUDA_INTERFACE_KIND = _make_gpu_kind(gpus.from_interface, gpus.to_dlpack(None))
_GPU_KINDS = {"cupy": CUPY, "torch": TORCH_ON_GPU}
_MODULES = {"numpy": ARRAY, "torch": _TORCH, "jax": _JAX_ON_HOST, "jax.numpy": _JAX_ON_HOST}
_REFUSAL_HINTS = {
    "jax._src.core.Tracer": "it stands for values yet to come: call collectives outside of jit, grad and vmap",
    "jax._src.prng.PRNGKeyArray": "send jax.random.key_data(key)",
    "jax._src.random.prng.PRNGKeyArray": "send jax.random.key_data(key)",
    "numpy.ma.MaskedArray": "the mask would be lost: use .filled()",
    "builtins.str": "text cannot be reduced or sent: send numbers",
    "builtins.bytes": "send numpy.frombuffer(value, numpy.uint8)",
    "builtins.generator": "it can be walked only once: make a list of it first",
    "builtins.set": "a set has no order that ranks could agree on: make a sorted list of it",
}
_EXPECTED = (
    "expected NumPy arrays, or those of PyTorch, JAX or DLPack, numbers or None, in lists, tuples, namedtuples or "
    "dicts; convert it with numpy.asarray or dict()"
)
_WRITABLE = ("data_ptr", "__cuda_array_interface__")  # by which it is seen that a view is no copy
_by_type: dict[type[Any], ArrayKind] = {np.ndarray: ARRAY}


def kind_of(value: object) -> ArrayKind:
    """The kind of a leaf.

    Raises:
        UnknownLeaf: collectives do not carry such objects.
    """
    kind = _by_type.get(type(value))
    if kind is None:
        kind = _lookup_kind(value)
    return kind if kind.resolve is None else kind.resolve(value)


def _lookup_kind(value: object) -> ArrayKind:
    cls = type(value)
    for base in cls.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in _REFUSAL_HINTS:
            raise UnknownLeaf(f"a {cls.__name__}: {_REFUSAL_HINTS[name]}")
        if name in _KINDS:
            return _by_type.setdefault(cls, _KINDS[name])
    if hasattr(cls, "__dlpack__"):
        return _by_type.setdefault(cls, _make_dlpack_kind(libraries.find_from_dlpack(value)))
    if hasattr(cls, "__cuda_array_interface__"):
        return _by_type.setdefault(cls, _CUDA_INTERFACE_KIND(0))
    raise UnknownLeaf(f"a {cls.__module__}.{cls.__qualname__}: {_EXPECTED}")


def _make_dlpack_kind(take: Callable[[Any], Any] | None) -> ArrayKind:
    """Of arrays of a library that is known by DLPack alone, on the host and on GPUs."""
    on_host = ArrayKind(libraries.from_dlpack, take or _identity, restores_view=True)
    on_gpu = _make_gpu_kind(gpus.from_dlpack, gpus.to_dlpack(take))
    return dataclasses.replace(
        on_host, resolve=lambda value: on_host if (number := libraries.gpu_of_dlpack(value)) is None else on_gpu(number)
    )


def is_host_array(value: object) -> bool:
    """Whether a leaf, of a type that has been seen before, is an array of NumPy's or a tensor in host memory."""
    kind = _by_type.get(type(value))
    return kind is ARRAY or (kind is _TORCH and value.is_cpu)  # type: ignore[attr-defined]  # of a tensor


def writable_view(leaf: object) -> Array:
    """An array through which results are written into a caller's own.

    Raises:
        UnknownLeaf: it is none that is known to be written.
        ValueError: it cannot be written.
    """
    kind = kind_of(leaf)
    on_gpu = kind.is_device and kind.restores_view and any(hasattr(type(leaf), name) for name in _WRITABLE)
    if kind is not ARRAY and kind is not _TORCH_ON_HOST and not on_gpu:
        raise UnknownLeaf(f"a {type(leaf).__name__}: expected a NumPy array, a PyTorch tensor or a CuPy array")
    view = kind.to_array(leaf)
    if kind.is_device:
        libraries.check_in_place(leaf, view)
    elif kind is _TORCH_ON_HOST:
        libraries.check_writable(leaf)
    elif not view.flags.writeable:
        raise ValueError("read-only: it cannot be written")
    found: Array = view
    return found


class Template(NamedTuple):
    """The properties of an array in worker memory; None where the template leaves them open."""

    kind: ArrayKind
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None


def make_template(like: object, room: Any = None) -> Template:
    """Read the template of `session.empty(like=...)`: an array's kind, shape and dtype, a library's kind, or NumPy's.

    Args:
        room: memory of a GPU, where the array is to lie there.

    Raises:
        TypeError: `like` is neither, or arrays of its kind cannot look into memory that is written.
    """
    if like is None:
        return Template(ARRAY if room is None else ArrayKind(_identity, _identity), None, None)
    if isinstance(like, ModuleType):
        modules = _MODULES if room is None else {name: make(room.device) for name, make in _GPU_KINDS.items()}
        kind = modules.get(like.__name__)
        if kind is None:
            where = "" if room is None else "on a GPU, "
            raise TypeError(
                f"like is the module {like.__name__}: {where}expected an array, or one of the modules "
                f"{', '.join(sorted(modules))}"
            )
        found = Template(kind, None, None)
    else:
        try:
            kind = kind_of(like)
            array = kind.to_array(like)
        except UnknownLeaf as error:
            raise TypeError(f"like is {error}") from None
        found = Template(kind, array.shape, array.dtype)
    if kind is _JAX_ON_HOST or (kind.is_device and not kind.restores_view):
        raise TypeError("like is of JAX, whose arrays are never written: take a NumPy array, and make JAX arrays of it")
    if not kind.restores_view:
        raise TypeError(f"like is a {type(like).__name__}: expected an array, or the module of a library")
    if not isinstance(like, ModuleType) and kind.is_device != (room is not None):  # as there, but elsewhere
        library = type(like).__module__.partition(".")[0]
        if room is None:
            found = found._replace(kind=_MODULES.get(library, ARRAY))
        else:
            found = found._replace(
                kind=_GPU_KINDS[library](room.device) if library in _GPU_KINDS else ArrayKind(_identity, _identity)
            )
    return found


def find_gpu(like: object) -> int | None:
    """The number, in this process, of the GPU on which an array lies."""
    try:
        kind = kind_of(like)
        return int(kind.to_array(like).device) if kind.is_device else None
    except UnknownLeaf:
        return None


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


def format_path(path: str) -> str:
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
        raise TypeError(f"{format_path(path)} has dtype {dtype}: expected one of {_labels()}; {advice}")
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
    raise TypeError(f"{format_path(path)} has dtype {dtype.label}, which {op.value} does not take: {advice}")
