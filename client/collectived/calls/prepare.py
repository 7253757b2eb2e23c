"""Prepared collectives: what a call looks like but for its data, described to the worker once and found again.

The *signature* of a call is its operation, the spec of its value, kind, dtype and shape of every leaf, the options that
are part of the contract, and the caller's line. Equal signatures share one `PreparedCall`.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectived.arguments import escape_surrogates
from collectived.calls.buffers import (
    ArenaAddress,
    Describe,
    Description,
    DeviceStagingArea,
    LeafLocation,
    ResultBuffer,
    StagingArea,
)
from collectived.calls.described_result import ResultSpec
from collectived.errors import InternalError, InvalidArgumentError
from collectived.gpu.array import fetch_to_host
from collectived.values import axes, nest
from collectived.values.indexed_slices import IndexedSlices
from collectived.values.leaves import (
    ARRAY,
    Array,
    ArrayKind,
    UnknownLeaf,
    check_reducible,
    element_type,
    format_path,
    is_host_array,
    kind_of,
)
from collectived.values.sparse import expand_slices
from collectived_proto.deadline import Deadline
from collectived_proto.device_results import is_carried_on_gpus, lay_out_device_rows
from collectived_proto.numpy_types import to_numpy
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import (
    AxisOperation,
    Collective,
    Compression,
    Gather,
    Leaf,
    Operation,
    Packing,
    Recv,
    Reduce,
    Reduction,
    Send,
    Tier,
)

MAX_SIGNATURES = 2048  # signatures of a group; the worker keeps the latest 4096 of a rank
_MAX_CACHED_VIEWS = 64  # places in one memory of results whose views are kept; a group uses few, in turn
_FEW = 8  # leaves that are read where they lie, however small
_SMALL_BYTES = 16 << 10  # a leaf of this size is copied as quickly as its address is followed
_MAX_DIRECT_LEAVES = 8191  # addresses that fit in one message, beside that of the result


class FlatValue(NamedTuple):
    """A caller's value taken apart; `sparse_leaves` are the leaves of each `IndexedSlices` in it."""

    spec: nest.Spec
    arrays: list[Array]
    leaf_types: tuple[tuple[ArrayKind, np.dtype[Any], tuple[int, ...]], ...]
    sparse_leaves: tuple[range, ...] = ()


ANY_VALUE = FlatValue(nest.ANY, [], ())  # of a rank that takes what comes


def may_be_repeated(value: object) -> bool:
    """Whether a value is one array of the host's, a list of NumPy's arrays, or none at all."""
    if type(value) is list:
        return bool(value) and all(type(one) is np.ndarray for one in value)
    return value is None or value is ANY_VALUE or is_host_array(value)


class CrossDeviceTerms(NamedTuple):
    """Parts of the contract that only cross-device operations choose."""

    all_reduce_spec: tuple[Tier, ...] = ()
    packing: Packing | None = None


def flatten_value(value: object, flat: tuple[nest.Spec, list[Any]] | None = None) -> FlatValue:
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
            array = kind.to_array(leaf)
        except (UnknownLeaf, ValueError) as error:
            if isinstance(leaf, IndexedSlices):
                spec, leaves, sparse = expand_slices(spec, leaves)
                return flatten_value(None, (spec, leaves))._replace(sparse_leaves=sparse)
            path = format_path(nest.paths(spec)[len(arrays)])
            raise (TypeError if isinstance(error, UnknownLeaf) else ValueError)(f"{path} is {error}") from None
        arrays.append(array)
        metas.append((kind, array.dtype, array.shape))
    return FlatValue(spec, arrays, tuple(metas))


def move_value_axis_first(operation: AxisOperation, value: FlatValue) -> tuple[AxisOperation, FlatValue]:
    """An operation along an axis and its value as ranks compare them: arrays with that axis first.

    Raises:
        ValueError: an array has no such axis, or not as many rows as `sizes` hands out.
        TypeError: there are sparse values.
    """
    if value.sparse_leaves:
        path = format_path(nest.paths(value.spec)[value.sparse_leaves[0][0]].removesuffix(".values"))
        raise TypeError(
            f"{path} is IndexedSlices, which {operation} does not take: all_reduce, reduce, broadcast and send do; "
            "give its values and indices as arrays"
        )
    operation = axes.resolve_axis(operation, value.spec, value.arrays)
    if operation.axis == 0:
        return operation, value  # it may stay on a GPU
    arrays = axes.move_axis_first(operation.axis, fetch_value_to_host(value).arrays)
    metas = [(kind, dtype, array.shape) for (kind, dtype, _), array in zip(value.leaf_types, arrays, strict=True)]
    return operation, FlatValue(value.spec, arrays, tuple(metas))


def fetch_value_to_host(value: FlatValue) -> FlatValue:
    """The same with copies of those arrays that lie on GPUs."""
    if not any(kind.is_device for kind, _, _ in value.leaf_types):
        return value
    return value._replace(arrays=fetch_to_host(value.arrays))


class PreparedCall:
    """A collective as the worker knows it, and where its leaves lie in staging and result slots.

    Attributes:
        id: the worker's number for it, which `description` has too.
        collective: as this rank described it.
        segment_program: how the ranks of this host carry it out by themselves; made by their channel.
        own_rows: in a generation, the rows of each leaf of its value that this rank itself puts into its result.
        is_native_order: whether leaves may be read where they lie (their byte order is the wire's).
        reads_in_place: whether they should be, rather than copied side by side: not where they are many and small.
        contributes: whether its value goes anywhere: else it only says what is to come.
        receives: whether this rank gets a result.
        result_spec: what comes, where the layout does not say it: results have a header. Else None.
        accepts_any: whether this rank takes what comes, all of it at once.
        pack_count: how many completions are told apart.
        is_p2p: whether it is numbered apart from the group's instances.
        is_cached: whether it is still found by its signature.
        device_area: of the GPU from and to which it is carried; None: it is carried from and to the host.
        device_bytes: of its result there.
        needs_host_copy: whether its arrays must come from GPUs to the host first.
    """

    __slots__ = (
        "is_cached", "reads_in_place", "needs_host_copy", "result_spec", "id", "kinds", "layout", "memory",
        "is_native_order", "op", "accepts_any", "contributes", "pack_count", "is_p2p", "receives", "result_locations",
        "collective", "description", "device_area", "device_bytes", "own_rows", "segment_program", "site", "spec",
        "staging_locations",
    )  # fmt: skip

    def __init__(
        self,
        description: Description,
        collective: Collective,
        value: FlatValue,
        memory: StagingArea,
        rank: int,
        room: DeviceStagingArea | None = None,
        size: int = 1,
    ) -> None:
        """`size` is that of the group, which a `room` on a GPU needs."""
        carried = room is not None and is_carried_on_gpus(collective)
        if isinstance(collective.operation, AxisOperation):  # where all of it is on the host it stays there
            carried = (
                carried and collective.operation.axis == 0 and any(kind.is_device for kind, _, _ in value.leaf_types)
            )
        self.device_area = room if carried else None
        self.needs_host_copy = self.device_area is None and any(kind.is_device for kind, _, _ in value.leaf_types)
        self.id = description.id
        self.is_cached = True
        self.description = description
        self.collective = collective
        self.layout = layout = description.layout
        self.memory = self.device_area or memory
        self.segment_program: object = None
        self.own_rows: tuple[int, tuple[range, ...]] | None = None
        self.op = str(collective.operation)
        self.site = collective.site
        self.spec = value.spec
        self.kinds = tuple(kind for kind, _, _ in value.leaf_types)
        leaves = len(value.leaf_types)
        self.is_native_order = bool(leaves) and all(dtype.isnative for _, dtype, _ in value.leaf_types)
        large = leaves <= _FEW or layout.staging_bytes >= _SMALL_BYTES * leaves
        self.reads_in_place = self.is_native_order and large and leaves <= _MAX_DIRECT_LEAVES
        operation = collective.operation
        self.is_p2p = isinstance(operation, (Send, Recv))
        self.receives = _receives(operation, rank)
        self.contributes = collective.contributes(rank)
        self.accepts_any = collective.open
        self.pack_count = 1 if self.accepts_any else len(layout.packs)
        self.staging_locations: list[LeafLocation] = []
        self.result_locations: list[LeafLocation] = []
        rows = lay_out_device_rows(collective, layout, rank, size) if carried else None
        self.device_bytes = layout.result_bytes if rows is None else rows.nbytes
        for leaf, place in zip(collective.leaves, layout.places, strict=True):
            pack, shape = layout.packs[place.pack], leaf.shape
            given, got = to_numpy(pack.dtype), to_numpy(pack.result_dtype)
            self.staging_locations.append((pack.staging_offset + place.offset * given.itemsize, given, shape))
            at = pack.result_offset + place.offset * got.itemsize
            if rows is not None:
                at, shape = rows.offsets[place.pack], (rows.rows[place.pack], *shape[1:])
            self.result_locations.append((at, got, shape))
        self.result_spec = self._form(operation)

    def _form(self, operation: Operation) -> ResultSpec | None:
        joined = isinstance(operation, AxisOperation)
        if not (joined or self.accepts_any):
            return None
        leaves = None if self.accepts_any else tuple((dtype, shape) for _, dtype, shape in self.result_locations)
        return ResultSpec(leaves, joined, operation.axis if isinstance(operation, AxisOperation) else 0)

    def views(self, slot: ResultBuffer) -> list[Array]:
        """All leaves in a result slot. They do not hold it: copy from them, do not hand them out."""
        known, here = slot.views, (self.id, slot.offset)
        views = known.get(here)
        if views is None:
            if len(known) >= _MAX_CACHED_VIEWS:
                known.clear()
            memory, start = slot.memory, slot.offset
            views = [np.ndarray(shape, dtype, memory, start + offset) for offset, dtype, shape in self.result_locations]
            known[here] = views
        return views

    def list_result_types(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """Dtype and shape of each leaf of the result; -1: a length that is not known before the result has come."""
        if self.result_spec is None:
            return [(dtype, shape) for _, dtype, shape in self.result_locations]
        return self.result_spec.list_types()

    def list_pack_leaves(self, pack: int) -> list[int]:
        """Numbers of the leaves that travel in a pack, last leaves first."""
        places = self.layout.places
        return [index for index in reversed(range(len(places))) if places[index].pack == pack]

    def make_placeholders(self) -> list[Any]:
        """Leaves of the kinds that a result will have."""
        places = zip(self.kinds, self.result_locations, strict=True)
        return [kind.restore(np.zeros(shape, dtype)) for kind, (_, dtype, shape) in places]


def _receives(operation: Operation, rank: int) -> bool:
    if isinstance(operation, (Reduce, Gather)):
        return operation.root == rank
    return not isinstance(operation, Send)


class PreparedCallCache:
    """The latest prepared collectives of one group. Calls in flight keep theirs beyond that."""

    def __init__(
        self, describe: Describe, memory: StagingArea, rank: int, room: DeviceStagingArea | None = None, size: int = 1
    ) -> None:
        """`room` is on the rank's own GPU, if it is on one; `size` is that of its group."""
        self._describe = describe
        self._memory = memory
        self._device_area = room
        self._rank = rank
        self._size = size
        self._lock = threading.Lock()  # over changes of `_known`
        self._known: dict[Hashable, PreparedCall] = {}

    def get_or_prepare(
        self,
        operation: Operation,
        value: FlatValue,
        options: CommunicationOptions,
        site: str,
        deadline: Deadline | None,
        special: CrossDeviceTerms | None = None,
        whole: bool = True,
    ) -> PreparedCall:
        """The prepared collective of that signature; the first time, the worker is asked.

        Args:
            whole: whether `value` is all that the caller gave, and is given back.

        Raises:
            TypeError: a leaf's dtype is none that this operation takes, or a container cannot be rebuilt.
            ValueError: the worker says that the call can mean nothing. The other ranks get no error.
            CollectiveError: the worker refuses.
        """
        agreed = options.bytes_per_pack, options.implementation, options.compression
        key = (operation, value.spec, value.leaf_types, agreed, site, special)
        prepared = self._known.get(key)
        if prepared is None:
            collective = _collective(operation, value, options, site, special)
            description = self._describe_to_worker(collective, deadline)
            try:
                where = self._memory, self._rank, self._device_area, self._size
                prepared = PreparedCall(description, collective, value, *where)
            except (ValueError, IndexError) as error:
                raise InternalError(f"the worker's layout does not fit {operation} from {site}: {error}") from error
            if whole and nest.has_custom_classes(value.spec) and not isinstance(operation, Send):
                nest.check_rebuildable(value.spec, prepared.make_placeholders())
            self._add(key, prepared)
        return prepared

    def _describe_to_worker(self, collective: Collective, deadline: Deadline | None) -> Description:
        try:
            return self._describe(collective, deadline)
        except InvalidArgumentError as error:
            if error.verdict is not None:
                raise
            raise ValueError(str(error)) from None  # that class is for errors of all ranks

    def _add(self, key: Hashable, prepared: PreparedCall) -> None:
        with self._lock:
            replaced = self._known.pop(key, None)  # another thread was quicker
            if replaced is None and len(self._known) >= MAX_SIGNATURES:
                replaced = self._known.pop(next(iter(self._known)))
            if replaced is not None:
                replaced.memory.evict(replaced)
            self._known[key] = prepared

    def clear(self) -> None:
        self._known.clear()


def _collective(
    operation: Operation, value: FlatValue, options: CommunicationOptions, site: str, special: CrossDeviceTerms | None
) -> Collective:
    leaves = []
    for path, (_, dtype, shape) in zip(nest.paths(value.spec), value.leaf_types, strict=True):
        element = element_type(dtype, path)
        if isinstance(operation, Reduction):
            check_reducible(Reduce(operation.reduce_op), element, path)
        leaves.append(Leaf(escape_surrogates(path), element, shape))
    return Collective(
        operation,
        escape_surrogates(nest.structure(value.spec)),
        tuple(leaves),
        options.bytes_per_pack,
        options.implementation,
        site,
        *(special or CrossDeviceTerms()),
        open=value.spec == nest.ANY,
        compression=Compression.of(options.compression or Compression.NONE),
    )


def locate(prepared: PreparedCall, arrays: Sequence[Array]) -> list[ArenaAddress | None] | None:
    """(arena, offset) of each leaf that lies in worker memory, None for others; None where no leaf does."""
    if not prepared.is_native_order:
        return None
    memory = prepared.memory
    found = [memory.locate(array) for array in arrays]
    return found if any(found) else None
