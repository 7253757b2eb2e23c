"""Prepared collectives: what a call looks like but for its data, described to the worker once and found again.

The *signature* of a call is its operation, the spec of its value, kind, dtype and shape of every leaf, the options that
are part of the contract, and the caller's line. Equal signatures share one `Prepared`.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectived.arguments import sendable
from collectived.calls.parcel import Form
from collectived.calls.places import Address, Describe, DeviceRoom, Place, Room, Slot
from collectived.errors import InternalError, InvalidArgumentError
from collectived.gpu.array import fetched
from collectived.values import axes, nest
from collectived.values.indexed_slices import IndexedSlices
from collectived.values.leaves import ARRAY, Array, Kind, UnknownLeaf, check_reducible, element_type, kind_of, shown
from collectived.values.sparse import expanded
from collectived_proto.deadline import Deadline
from collectived_proto.numpy_types import to_numpy
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import (
    AllReduce,
    Broadcast,
    Collective,
    Cutting,
    Gather,
    Layout,
    Leaf,
    Operation,
    Packing,
    Recv,
    Reduce,
    Reduction,
    Send,
    Tier,
)

MOST = 2048  # signatures of a group; the worker keeps the latest 4096 of a rank
_MOST_VIEWS = 64  # places in one memory of results whose views are kept; a group uses few, in turn
_FEW = 8  # leaves that are read where they lie, however small
_SMALL_BYTES = 16 << 10  # a leaf of this size is copied as quickly as its address is followed
_MOST_DIRECT = 8191  # addresses that fit in one message, beside that of the result
_ON_DEVICES = (AllReduce, Reduce, Broadcast)  # what is carried from and to GPUs


class Value(NamedTuple):
    """A caller's value taken apart; `sparse` are the leaves of each `IndexedSlices` in it."""

    spec: nest.Spec
    arrays: list[Array]
    metas: tuple[tuple[Kind, np.dtype[Any], tuple[int, ...]], ...]
    sparse: tuple[range, ...] = ()


OPEN = Value(nest.OPEN, [], ())  # of a rank that takes what comes


class Special(NamedTuple):
    """Parts of the contract that only cross-device operations choose."""

    all_reduce_spec: tuple[Tier, ...] = ()
    packing: Packing | None = None


def take_apart(value: object, flat: tuple[nest.Spec, list[Any]] | None = None) -> Value:
    """The spec, the leaves as host arrays, and what is known of each without its data.

    Args:
        flat: the same flattened, if it has been.

    Raises:
        TypeError: a leaf is nothing that collectives carry; the message names its path.
    """
    spec, leaves = flat or nest.flatten(value)
    arrays: list[Array] = []
    metas = []
    for leaf in leaves:
        if type(leaf) is np.ndarray:  # nearly always
            arrays.append(leaf)
            metas.append((ARRAY, leaf.dtype, leaf.shape))
            continue
        try:
            kind = kind_of(leaf)
            array = kind.array(leaf)
        except (UnknownLeaf, ValueError) as error:
            if isinstance(leaf, IndexedSlices):
                spec, leaves, sparse = expanded(spec, leaves)
                return take_apart(None, (spec, leaves))._replace(sparse=sparse)
            path = shown(nest.paths(spec)[len(arrays)])
            raise (TypeError if isinstance(error, UnknownLeaf) else ValueError)(f"{path} is {error}") from None
        arrays.append(array)
        metas.append((kind, array.dtype, array.shape))
    return Value(spec, arrays, tuple(metas))


def cut(operation: Cutting, value: Value) -> tuple[Cutting, Value]:
    """An operation along an axis and its value as ranks compare them: arrays with that axis first.

    Raises:
        ValueError: an array has no such axis, or not as many rows as `sizes` hands out.
        TypeError: there are sparse values.
    """
    if value.sparse:
        path = shown(nest.paths(value.spec)[value.sparse[0][0]].removesuffix(".values"))
        raise TypeError(
            f"{path} is IndexedSlices, which {operation} does not take: all_reduce, reduce, broadcast and send do; "
            "give its values and indices as arrays"
        )
    operation, arrays = axes.moved(operation, value.spec, on_host(value).arrays)
    metas = [(kind, dtype, array.shape) for (kind, dtype, _), array in zip(value.metas, arrays, strict=True)]
    return operation, Value(value.spec, arrays, tuple(metas))


def on_host(value: Value) -> Value:
    """The same with copies of those arrays that lie on GPUs."""
    if not any(kind.device for kind, _, _ in value.metas):
        return value
    return value._replace(arrays=fetched(value.arrays))


class Prepared:
    """A collective as the worker knows it, and where its leaves lie in staging and result slots.

    Attributes:
        id: the worker's number for it.
        native: whether leaves may be read where they lie (their byte order is the wire's).
        direct: whether they should be, rather than copied side by side: not where they are many and small.
        receives: whether this rank gets a result.
        form: what comes, where the layout does not say it: results have an outline. Else None.
        open: whether this rank takes what comes, all of it at once.
        packs: how many completions are told apart.
        post: whether it is numbered apart from the group's instances.
        current: whether it is still found by its signature.
        room: of the GPU from and to which it is carried; None: it is carried from and to the host.
        fetches: whether its arrays must come from GPUs to the host first.
    """

    __slots__ = (
        "current", "direct", "fetches", "form", "id", "kinds", "layout", "memory", "native", "op", "open", "packs",
        "paths", "post", "receives", "result_places", "room", "site", "spec", "staging_places",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        layout: Layout,
        collective: Collective,
        value: Value,
        memory: Room,
        rank: int,
        room: DeviceRoom | None = None,
    ) -> None:
        carried = isinstance(collective.operation, _ON_DEVICES) and not collective.open and bool(collective.leaves)
        self.room = room if carried else None
        self.fetches = self.room is None and any(kind.device for kind, _, _ in value.metas)
        self.id = id
        self.current = True
        self.layout = layout
        self.memory = self.room or memory
        self.op = str(collective.operation)
        self.site = collective.site
        self.spec = value.spec
        self.paths = tuple(leaf.path for leaf in collective.leaves)
        self.kinds = tuple(kind for kind, _, _ in value.metas)
        leaves = len(value.metas)
        self.native = bool(leaves) and all(dtype.isnative for _, dtype, _ in value.metas)
        large = leaves <= _FEW or layout.staging_bytes >= _SMALL_BYTES * leaves
        self.direct = self.native and large and leaves <= _MOST_DIRECT
        operation = collective.operation
        self.post = isinstance(operation, (Send, Recv))
        self.receives = _receives(operation, rank)
        self.open = collective.open
        self.packs = 1 if self.open else len(layout.packs)
        self.staging_places: list[Place] = []
        self.result_places: list[Place] = []
        for leaf, place in zip(collective.leaves, layout.places, strict=True):
            pack = layout.packs[place.pack]
            given, got = to_numpy(pack.dtype), to_numpy(pack.result_dtype)
            self.staging_places.append((pack.staging_offset + place.offset * given.itemsize, given, leaf.shape))
            self.result_places.append((pack.result_offset + place.offset * got.itemsize, got, leaf.shape))
        self.form = self._form(operation)

    def _form(self, operation: Operation) -> Form | None:
        joined = isinstance(operation, Cutting)
        if not (joined or self.open):
            return None
        leaves = None if self.open else tuple((dtype, shape) for _, dtype, shape in self.result_places)
        return Form(leaves, joined, operation.axis if isinstance(operation, Cutting) else 0)

    def views(self, slot: Slot) -> list[Array]:
        """All leaves in a result slot. They do not hold it: copy from them, do not hand them out."""
        known, here = slot.views, (self.id, slot.offset)
        views = known.get(here)
        if views is None:
            if len(known) >= _MOST_VIEWS:
                known.clear()
            memory, start = slot.memory, slot.offset
            views = [np.ndarray(shape, dtype, memory, start + offset) for offset, dtype, shape in self.result_places]
            known[here] = views
        return views

    def leaves_of(self, pack: int) -> list[int]:
        """Numbers of the leaves that travel in a pack, last leaves first."""
        places = self.layout.places
        return [index for index in reversed(range(len(places))) if places[index].pack == pack]

    def stand_ins(self) -> list[Any]:
        """Leaves of the kinds that a result will have."""
        places = zip(self.kinds, self.result_places, strict=True)
        return [kind.restore(np.zeros(shape, dtype)) for kind, (_, dtype, shape) in places]


def _receives(operation: Operation, rank: int) -> bool:
    if isinstance(operation, (Reduce, Gather)):
        return operation.root == rank
    return not isinstance(operation, Send)


class Signatures:
    """The latest prepared collectives of one group. Calls in flight keep theirs beyond that."""

    def __init__(self, describe: Describe, memory: Room, rank: int, room: DeviceRoom | None = None) -> None:
        """`room` is on the rank's own GPU, if it is on one."""
        self._describe = describe
        self._memory = memory
        self._room = room
        self._rank = rank
        self._lock = threading.Lock()  # over changes of `_known`
        self._known: dict[Hashable, Prepared] = {}

    def find(
        self,
        operation: Operation,
        value: Value,
        options: CommunicationOptions,
        site: str,
        deadline: Deadline | None,
        special: Special | None = None,
        whole: bool = True,
    ) -> Prepared:
        """The prepared collective of that signature; the first time, the worker is asked.

        Args:
            whole: whether `value` is all that the caller gave, and is given back.

        Raises:
            TypeError: a leaf's dtype is none that this operation takes, or a container cannot be rebuilt.
            ValueError: the worker says that it can mean nothing. The others are not told.
            CollectiveError: the worker refuses.
        """
        key = (operation, value.spec, value.metas, options.bytes_per_pack, options.implementation, site, special)
        prepared = self._known.get(key)
        if prepared is None:
            collective = _collective(operation, value, options, site, special)
            number, layout = self._described(collective, deadline)
            try:
                prepared = Prepared(number, layout, collective, value, self._memory, self._rank, self._room)
            except (ValueError, IndexError) as error:
                raise InternalError(f"the worker's layout does not fit {operation} from {site}: {error}") from error
            if whole and nest.has_classes(value.spec) and not isinstance(operation, Send):
                nest.check_rebuilds(value.spec, prepared.stand_ins())
            self._keep(key, prepared)
        return prepared

    def _described(self, collective: Collective, deadline: Deadline | None) -> tuple[int, Layout]:
        try:
            return self._describe(collective, deadline)
        except InvalidArgumentError as error:
            if error.verdict is not None:
                raise
            raise ValueError(str(error)) from None  # that class is for what all ranks are told

    def _keep(self, key: Hashable, prepared: Prepared) -> None:
        with self._lock:
            replaced = self._known.pop(key, None)  # another thread was quicker
            if replaced is None and len(self._known) >= MOST:
                replaced = self._known.pop(next(iter(self._known)))
            if replaced is not None:
                replaced.memory.outdated(replaced)
            self._known[key] = prepared

    def forget(self) -> None:
        """Lets go of all of them."""
        self._known.clear()


def _collective(
    operation: Operation, value: Value, options: CommunicationOptions, site: str, special: Special | None
) -> Collective:
    leaves = []
    for path, (_, dtype, shape) in zip(nest.paths(value.spec), value.metas, strict=True):
        element = element_type(dtype, path)
        if isinstance(operation, Reduction):
            check_reducible(Reduce(operation.reduce_op), element, path)
        leaves.append(Leaf(sendable(path), element, shape))
    return Collective(
        operation,
        sendable(nest.structure(value.spec)),
        tuple(leaves),
        options.bytes_per_pack,
        options.implementation,
        site,
        *(special or Special()),
        open=value.spec == nest.OPEN,
    )


def locate(prepared: Prepared, arrays: Sequence[Array]) -> list[Address | None] | None:
    """(arena, offset) of each leaf that lies in worker memory, None for others; None where no leaf does."""
    if not prepared.native:
        return None
    memory = prepared.memory
    found = [memory.locate(array) for array in arrays]
    return found if any(found) else None
