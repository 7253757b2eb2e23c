"""A prepared collective as the native core runs it: its plan, and those that follow from blobs of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from collectived.calls.prepare import PreparedCall
from collectived.errors import ResourceExhaustedError
from collectived.shared import segment_plan
from collectived.shared.segment_plan import NOTHING, Schedule
from collectived_native import core
from collectived_proto import root_value
from collectived_proto.across import LocalSeats, list_counts, make_shares, moves_across
from collectived_proto.rows import decode_rows, encode_rows, extract_rows
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Gather,
    Layout,
    Operation,
    Reduce,
    ReduceOp,
    ReduceScatter,
    Reduction,
    Scatter,
)

_OPERATIONS: dict[type[Operation], int] = {
    AllReduce: core.ALL_REDUCE,
    Reduce: core.REDUCE,
    Broadcast: core.BROADCAST,
    AllGather: core.ALL_GATHER,
    Gather: core.GATHER,
    Scatter: core.SCATTER,
    ReduceScatter: core.REDUCE_SCATTER,
    AllToAll: core.ALL_TO_ALL,
    Barrier: core.BARRIER,
}
_REDUCE_OPS = {op: number for number, op in enumerate(ReduceOp, 1)}  # as on the wire
_MAX_VARIANTS = 16
_DIGEST_BYTES = 16


class Variant(NamedTuple):
    """One way in which a prepared collective runs: for some lengths, or for what its root sends.

    Attributes:
        blob: the root's description of it.
    """

    plan: core.Plan
    schedule: Schedule
    collective: Collective
    blob: bytes | None


class SegmentProgram:
    """A prepared collective in one engine.

    Attributes:
        first: the way that is tried first: all ranks have the lengths that this one has.
        blob: this rank's description for the others.
        may_describe: whether the blobs of the others may ask for another way than the first.
    """

    def __init__(
        self, engine: core.Engine, prepared: PreparedCall, rank: int, size: int, local: LocalSeats | None = None
    ) -> None:
        """
        Args:
            local: the ranks that meet in the segment, where their worker carries it to other hosts; None: all do.

        Raises:
            ResourceExhaustedError: the blob of this rank is too large.
        """
        self.engine = engine
        self._prepared = prepared
        self._rank = rank
        self._size = size
        self._local = local
        self._variants: dict[tuple[bytes, ...], Variant] = {}
        collective, layout = prepared.collective, prepared.layout
        self.blob = self._make_blob() if local is None or collective.lengths_differ else None
        rows: Sequence[Sequence[int]] = ()
        meets = core.MEETS_NOT
        if collective.lengths_differ:
            rows = [extract_rows(collective)] * size
        if local is None:  # else its worker says what it brings, or says by the doorbell what has come
            if collective.lengths_differ:
                same = not isinstance(collective.operation, AllToAll) or len(set(rows[0])) == 1
                meets = core.MEETS_EQUAL if same else core.MEETS_ANY
            elif isinstance(collective.operation, (Broadcast, Scatter)):
                meets = core.MEETS_ANY if collective.open else core.MEETS_KNOWN
        self._meets = meets
        self.may_describe = meets in (core.MEETS_EQUAL, core.MEETS_ANY) or (local is not None and collective.open)
        known = NOTHING if collective.open else segment_plan.schedule(collective, layout, rank, size, rows)
        self.first = self._make_variant(collective, layout, known, None)

    def describe(self, blobs: tuple[bytes, ...]) -> Variant:
        """Return the way that follows from the blobs of all ranks.

        Raises:
            ValueError: no honest rank publishes that.
        """
        if (known := self._variants.get(blobs)) is not None:
            return known
        collective, layout = self._prepared.collective, self._prepared.layout
        rows: Sequence[Sequence[int]] = ()
        blob = None
        if collective.open:
            operation = collective.operation
            assert isinstance(operation, (Broadcast, Scatter))
            blob = blobs[operation.root if self._local is None else -1]
            collective, layout = root_value.decode_root_value(blob)
            if type(collective.operation) is not type(operation):
                raise ValueError(f"{collective.operation} where {operation} was expected")
        else:
            count = len(extract_rows(collective))
            rows = [decode_rows(blob, count) for blob in blobs]
        if len(self._variants) >= _MAX_VARIANTS:
            self._variants.clear()
        schedule = segment_plan.schedule(collective, layout, self._rank, self._size, rows)
        made = self._variants[blobs] = self._make_variant(collective, layout, schedule, blob)
        return made

    def _make_blob(self) -> bytes | None:
        collective = self._prepared.collective
        operation = collective.operation
        if collective.lengths_differ:
            blob = encode_rows(extract_rows(collective))
        elif isinstance(operation, (Broadcast, Scatter)) and operation.root == self._rank:
            blob = root_value.encode_root_value(collective, self._prepared.layout)
        else:
            return None
        if len(blob) <= core.MAX_BLOB:
            return blob
        if isinstance(operation, Broadcast):
            return None  # only ranks without a template need it, and their error says that it is missing
        raise ResourceExhaustedError(
            f"{operation} of {len(collective.leaves)} arrays takes {len(blob)} bytes to describe to the other ranks, "
            f"and there may be {core.MAX_BLOB}: give fewer, larger arrays"
        )

    def _make_variant(self, collective: Collective, layout: Layout, schedule: Schedule, blob: bytes | None) -> Variant:
        description, operation = self._prepared.description, collective.operation
        local, phases = self._local, schedule.phases
        if local is not None and not collective.open:
            shares, is_folded = make_shares(collective, layout, local), not moves_across(collective)
            phases = tuple(
                (dtype, list_counts(share, self._rank, local, is_folded), given, got)
                for share, (dtype, _, given, got) in zip(shares, phases, strict=True)
            )
        plan = self.engine.plan(
            _OPERATIONS[type(operation)] if local is None else core.ACROSS,
            _REDUCE_OPS[operation.reduce_op] if isinstance(operation, Reduction) else 0,
            getattr(operation, "root", 0) if local is None else len(local.ranks),
            phases,
            description.contract.ljust(_DIGEST_BYTES, b"\0"),
            int.from_bytes(description.terms, "little"),
            self._prepared.collective.open,
            self._meets,
            description.id,
        )
        return Variant(plan, schedule, collective, blob)
