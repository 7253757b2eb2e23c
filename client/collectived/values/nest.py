"""Nests: lists, tuples, namedtuples and dicts of leaves.

A *spec* is the shape of a nest without its leaves: `LEAF`, `NONE`, or a `Node`. Specs are hashable and compare by
value, so that what was prepared for one is found again. Dicts are walked by sorted key, which every rank does alike,
and are rebuilt in the caller's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

LEAF = "*"
NONE = "None"
_PLAIN = (list, tuple, dict)
ANY = ""  # the spec of a value that this rank does not have: it takes what comes


class Factory:
    """That of a `defaultdict`. It comes back with the dict, and makes no difference between specs."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any] | None) -> None:
        self.make = make

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Factory)

    def __hash__(self) -> int:
        return 0


class Node(NamedTuple):
    """A container. `keys` are a dict's keys as the caller ordered them, `order` the same sorted; else both are ()."""

    kind: type[Any]
    children: tuple[Spec, ...]
    keys: tuple[Hashable, ...] = ()
    order: tuple[Hashable, ...] = ()
    key_types: tuple[type[Any], ...] = ()  # 1, 1.0 and True are equal, but not the same key to a reader
    factory: Factory | None = None


Spec = Node | str
KeyPath = tuple[Hashable, ...]  # keys of dicts, indices, names of fields, down to a leaf

_leaf_types: set[type[Any]] = set()  # of what was met as a leaf: no containers, and not None


def flatten(value: object) -> tuple[Spec, list[Any]]:
    """The spec of `value` and its leaves, dicts by sorted key. Whatever is no container and not None is a leaf.

    Raises:
        TypeError: keys of a dict cannot be sorted.
        ValueError: nested too deeply, which is what a value that contains itself looks like.
    """
    leaves: list[Any] = []
    try:
        return _flatten(value, leaves), leaves
    except RecursionError:
        raise ValueError("the value is nested too deeply; does a list or dict in it contain itself?") from None


def _flatten(value: object, leaves: list[Any]) -> Spec:
    if value is None:
        return NONE
    if isinstance(value, dict):
        kind = type(value)
        keys = tuple(value)
        order = _sort_keys(keys)
        children = _flatten_all([value[key] for key in order], leaves)
        factory = Factory(value.default_factory) if kind is not dict and isinstance(value, defaultdict) else None
        return Node(kind, children, keys, keys if keys == order else order, tuple(map(type, order)), factory)
    if isinstance(value, (list, tuple)):
        return Node(type(value), _flatten_all(value, leaves))
    if type(value) is value.__class__:  # a proxy passes for one thing here and for another there
        _leaf_types.add(type(value))
    leaves.append(value)
    return LEAF


def _flatten_all(children: Sequence[Any], leaves: list[Any]) -> tuple[Spec, ...]:
    if _leaf_types.issuperset(map(type, children)):  # nearly always: many arrays, one by one, would be slow
        leaves += children
        return (LEAF,) * len(children)
    return tuple([_flatten(child, leaves) for child in children])


def _sort_keys(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return tuple(sorted(keys))
    except TypeError:
        shown = ", ".join(f"{key!r} ({type(key).__name__})" for key in keys[:4]) + (", …" if len(keys) > 4 else "")
        raise TypeError(
            f"the keys of a dict must sort, for all ranks go through them in one order; these do not: {shown}; "
            "use keys of one type"
        ) from None


def unflatten(spec: Spec, leaves: Sequence[Any]) -> Any:
    """The nest of that spec over `leaves`, which are in the order in which `flatten` gave them."""
    return leaves[0] if spec == LEAF else _unflatten(spec, iter(leaves))


def _unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    if not isinstance(spec, Node):
        return next(leaves) if spec == LEAF else None
    kind = spec.kind
    children = [next(leaves) if child == LEAF else _unflatten(child, leaves) for child in spec.children]
    return children if kind is list else _build(spec, children)


def _build(spec: Node, children: list[Any]) -> Any:
    kind = spec.kind
    if not issubclass(kind, dict):
        return kind._make(children) if hasattr(kind, "_make") else kind(children)
    items = dict(zip(spec.order, children, strict=True))
    if spec.keys is not spec.order:
        items = {key: items[key] for key in spec.keys}
    if kind is dict:
        return items
    made = kind if spec.factory is None else partial(kind, spec.factory.make)
    return made(items)


def has_custom_classes(spec: Spec) -> bool:
    """Whether there are containers of other classes than list, tuple and dict, which may refuse to be rebuilt."""
    return isinstance(spec, Node) and (spec.kind not in _PLAIN or any(map(has_custom_classes, spec.children)))


def check_rebuildable(spec: Spec, leaves: Sequence[Any]) -> None:
    """Tries to make the containers of a spec of results like `leaves`.

    Raises:
        TypeError: the class of one of them does not; the message names its path.
    """
    _try_build(spec, iter(leaves), "")


def _try_build(spec: Spec, leaves: Iterator[Any], path: str) -> Any:
    if not isinstance(spec, Node):
        return next(leaves) if spec == LEAF else None
    children = [_try_build(child, leaves, path + step) for step, child in zip(_steps(spec), spec.children, strict=True)]
    if not issubclass(spec.kind, _PLAIN):
        return None  # a leaf of several parts
    if spec.kind in _PLAIN:
        return _build(spec, children)
    try:
        return _build(spec, children)
    except MemoryError:  # of this process: the class is not to blame
        raise
    except Exception as error:
        raise TypeError(
            f"{path or 'the value'} is a {spec.kind.__qualname__}, which cannot be made of the results in it: "
            f"{type(error).__name__}: {error}; give a list, tuple or dict of the same"
        ) from error


def structure(spec: Spec) -> str:
    """The canonical text that ranks compare: leaves as `*`, None as `None`, dicts by sorted key."""
    if not isinstance(spec, Node):
        return spec
    parts = [structure(child) for child in spec.children]
    if issubclass(spec.kind, dict):
        return "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(spec.order, parts, strict=True)) + "}"
    if fields := getattr(spec.kind, "_fields", None):
        return f"{spec.kind.__name__}(" + ", ".join(f"{n}={p}" for n, p in zip(fields, parts, strict=True)) + ")"
    if issubclass(spec.kind, tuple):
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    return f"[{', '.join(parts)}]"


def paths(spec: Spec, prefix: str = "") -> tuple[str, ...]:
    """For every leaf how a user would index it: `['layer1'][0]`; '' for a value that is itself the leaf."""
    if not isinstance(spec, Node):
        return (prefix,) if spec == LEAF else ()
    steps = zip(_steps(spec), spec.children, strict=True)
    return tuple(path for step, child in steps for path in paths(child, prefix + step))


def key_paths(spec: Spec, prefix: KeyPath = ()) -> tuple[KeyPath, ...]:
    """The same for programs: `('layer1', 0)`; `()` for a value that is itself the leaf."""
    if not isinstance(spec, Node):
        return (prefix,) if spec == LEAF else ()
    steps = zip(_keys(spec), spec.children, strict=True)
    return tuple(path for key, child in steps for path in key_paths(child, (*prefix, key)))


def _steps(spec: Node) -> list[str]:
    keys = _keys(spec)
    return [f".{key}" for key in keys] if hasattr(spec.kind, "_fields") else [f"[{key!r}]" for key in keys]


def _keys(spec: Node) -> Sequence[Hashable]:
    if issubclass(spec.kind, dict):
        return spec.order
    fields: tuple[str, ...] | None = getattr(spec.kind, "_fields", None)
    return range(len(spec.children)) if fields is None else fields
