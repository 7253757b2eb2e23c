"""Prepared collectives: what a call looks like but for its data, described to the worker once and found again.

The *signature* of a call is its operation, the spec of its value, kind, dtype and shape of every leaf, the options that
are part of the contract, and the caller's line. Equal signatures share one `Prepared`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectived import nest
from collectived.arguments import sendable
from collectived.errors import InternalError
from collectived.leaves import Array, Kind, UnknownLeaf, check_reducible, element_type, kind_of, shown
from collectived.memory import Memory
from collectived.places import Place
from collectived.results import ResultSlot
from collectived_proto.deadline import Deadline
from collectived_proto.numpy_types import to_numpy
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import Collective, Layout, Leaf, Operation, Reduce

MOST = 2048  # signatures of a group; the worker keeps the latest 4096 of a rank
_MOST_VIEWS = 4  # result slots whose views are kept; a group uses few, in turn


class Value(NamedTuple):
    """A caller's value taken apart."""

    spec: nest.Spec
    arrays: list[Array]
    metas: tuple[tuple[Kind, np.dtype[Any], tuple[int, ...]], ...]


def take_apart(value: object) -> Value:
    """The spec, the leaves as host arrays, and what is known of each without its data.

    Raises:
        TypeError: a leaf is nothing that collectives carry; the message names its path.
    """
    spec, leaves = nest.flatten(value)
    arrays: list[Array] = []
    metas = []
    for leaf in leaves:
        try:
            kind = kind_of(leaf)
            array = kind.array(leaf)
        except (UnknownLeaf, ValueError) as error:
            path = shown(nest.paths(spec)[len(arrays)])
            raise (TypeError if isinstance(error, UnknownLeaf) else ValueError)(f"{path} is {error}") from None
        arrays.append(array)
        metas.append((kind, array.dtype, array.shape))
    return Value(spec, arrays, tuple(metas))


class Prepared:
    """A collective as the worker knows it, and where its leaves lie in staging and result slots.

    Attributes:
        id: the worker's number for it.
        direct: whether leaves may be read where they lie (their byte order is the wire's).
        receives: whether this rank gets a result.
        current: whether it is still found by its signature.
    """

    __slots__ = (
        "_views", "current", "direct", "id", "kinds", "layout", "memory", "op", "paths", "receives", "result_places",
        "site", "spec", "staging_places",
    )  # fmt: skip

    def __init__(
        self, id: int, layout: Layout, collective: Collective, value: Value, memory: Memory, rank: int
    ) -> None:
        self.id = id
        self.current = True
        self.layout = layout
        self.memory = memory
        self.op = str(collective.operation)
        self.site = collective.site
        self.spec = value.spec
        self.paths = tuple(leaf.path for leaf in collective.leaves)
        self.kinds = tuple(kind for kind, _, _ in value.metas)
        self.direct = bool(value.metas) and all(dtype.isnative for _, dtype, _ in value.metas)
        operation = collective.operation
        self.receives = not isinstance(operation, Reduce) or operation.root == rank
        self.staging_places: list[Place] = []
        self.result_places: list[Place] = []
        for leaf, place in zip(collective.leaves, layout.places, strict=True):
            pack = layout.packs[place.pack]
            given, got = to_numpy(pack.dtype), to_numpy(pack.result_dtype)
            self.staging_places.append((pack.staging_offset + place.offset * given.itemsize, given, leaf.shape))
            self.result_places.append((pack.result_offset + place.offset * got.itemsize, got, leaf.shape))
        self._views: dict[tuple[int, int], list[Array]] = {}

    def views(self, slot: ResultSlot) -> list[Array]:
        """All leaves in a result slot. They do not hold it: copy from them, do not hand them out."""
        where = (slot.arena.number, slot.offset)
        views = self._views.get(where)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            memory, start = slot.arena.memory, slot.offset
            views = [np.ndarray(shape, dtype, memory, start + offset) for offset, dtype, shape in self.result_places]
            self._views[where] = views
        return views

    def leaves_of(self, pack: int) -> list[int]:
        """Numbers of the leaves that travel in a pack, last leaves first."""
        places = self.layout.places
        return [index for index in reversed(range(len(places))) if places[index].pack == pack]

    def forget(self) -> None:
        """Lets go of mapped memory."""
        self._views.clear()


# Describes a collective to the worker, which answers with its number and layout.
Describe = Callable[[Collective, Deadline | None], tuple[int, Layout]]


class Signatures:
    """The latest prepared collectives of one group. Calls in flight keep theirs beyond that."""

    def __init__(self, describe: Describe, memory: Memory, rank: int) -> None:
        self._describe = describe
        self._memory = memory
        self._rank = rank
        self._lock = threading.Lock()  # over changes of `_known`
        self._known: dict[Hashable, Prepared] = {}

    def find(
        self, operation: Operation, value: Value, options: CommunicationOptions, site: str, deadline: Deadline | None
    ) -> Prepared:
        """The prepared collective of that signature; the first time, the worker is asked.

        Raises:
            TypeError: a leaf's dtype is none that this operation takes.
            CollectiveError: the worker refuses.
        """
        key = (operation, value.spec, value.metas, options.bytes_per_pack, options.implementation, site)
        prepared = self._known.get(key)
        if prepared is None:
            collective = self._collective(operation, value, options, site)
            number, layout = self._describe(collective, deadline)
            try:
                prepared = Prepared(number, layout, collective, value, self._memory, self._rank)
            except (ValueError, IndexError) as error:
                raise InternalError(f"the worker's layout does not fit {operation} from {site}: {error}") from error
            self._keep(key, prepared)
        return prepared

    def _keep(self, key: Hashable, prepared: Prepared) -> None:
        with self._lock:
            replaced = self._known.pop(key, None)  # another thread was quicker
            if replaced is None and len(self._known) >= MOST:
                replaced = self._known.pop(next(iter(self._known)))
            if replaced is not None:
                self._memory.outdated(replaced)
            self._known[key] = prepared

    def _collective(self, operation: Operation, value: Value, options: CommunicationOptions, site: str) -> Collective:
        leaves = []
        for path, (_, dtype, shape) in zip(nest.paths(value.spec), value.metas, strict=True):
            element = element_type(dtype, path)
            check_reducible(operation, element, path)
            leaves.append(Leaf(sendable(path), element, shape))
        structure = sendable(nest.structure(value.spec))
        return Collective(operation, structure, tuple(leaves), options.bytes_per_pack, options.implementation, site)

    def forget(self) -> None:
        """Lets go of mapped memory."""
        for prepared in self._known.values():
            prepared.forget()
        self._known.clear()


def check_out(prepared: Prepared, out: object) -> list[Array]:
    """The arrays into which results are copied.

    Raises:
        ValueError: `out` has another structure, shape or dtype than the result, or cannot be written.
        TypeError: a leaf of it is no array.
    """
    spec, leaves = nest.flatten(out)
    if nest.structure(spec) != nest.structure(prepared.spec):
        raise ValueError(f"out has the structure {nest.structure(spec)}, expected {nest.structure(prepared.spec)}")
    for path, leaf, (_, dtype, shape) in zip(prepared.paths, leaves, prepared.result_places, strict=True):
        where = f"out{path}"
        if not isinstance(leaf, np.ndarray):
            raise TypeError(f"{where} is a {type(leaf).__name__}: expected a NumPy array of {dtype}{list(shape)}")
        if leaf.shape != shape or leaf.dtype != dtype:
            raise ValueError(f"{where} is {leaf.dtype}{list(leaf.shape)}, the result is {dtype}{list(shape)}")
        if not leaf.flags.writeable:
            raise ValueError(f"{where} cannot be written")
    return leaves


def locate(prepared: Prepared, arrays: Sequence[Array]) -> list[tuple[int, int] | None] | None:
    """(arena, offset) of each leaf that lies in worker memory, None for others; None where no leaf does."""
    if not prepared.direct:
        return None
    memory = prepared.memory
    found = [memory.locate(array) for array in arrays]
    return found if any(found) else None
