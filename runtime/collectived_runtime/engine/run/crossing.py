"""The worker's part where ranks meet in their segment: it takes values or partial sums, and brings results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_native import core
from collectived_proto.across import LocalSeats, Share, list_counts, make_shares, moves_across
from collectived_proto.root_value import encode_root_value
from collectived_proto.types import Broadcast, Layout, ReduceOp, Scatter
from collectived_runtime.engine.base.arenas import Workspace
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile.program import CompiledCollective
from collectived_runtime.engine.submit.tracker import Instance
from collectived_runtime.plan.packing import get_reduce_op, layout

_REDUCE_OPS = {op: number for number, op in enumerate(ReduceOp, 1)}  # as on the wire
_DIGEST_BYTES = 16
_MAX_PLANS = 1024

Bytes = NDArray[np.uint8]
Plans = tuple["core.Plan", "core.Plan", list[Share]]
Leaves = Sequence[tuple[int, ...]]


class SegmentInputs:
    """A rank's value, as it was taken out of the segment; a task reads it like `InputBuffers`."""

    is_on_device = is_stream_ordered = keeps_own = takes_parts = may_lend = is_lent = False
    output = None

    def __init__(self, packs: Sequence[Bytes]) -> None:
        self._packs = packs

    def contiguous_pack(self, pack_number: int) -> Bytes:
        return self._packs[pack_number]


class WorkerSeat:
    """The seat of this worker, the last one, behind those of its ranks."""

    def __init__(self, engine: core.Engine, topology: GroupTopology) -> None:
        self.engine = engine
        self.local = LocalSeats(topology.own_ranks, topology.group.size)
        self._automatic_pack_bytes = topology.automatic_pack_bytes
        self._plans: dict[bytes | tuple[object, ...], Plans] = {}

    def get_plans(self, instance: Instance, program: CompiledCollective) -> Plans:
        """The plans that take values or partial sums out of the segment and bring results, with sizes, by pack."""
        key = instance.form
        plans = self._plans.get(key)
        if plans is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plans = self._plans[key] = self._make_plans(instance, program)
        return plans

    def find_layout(self, instance: Instance) -> Layout:
        """As ranks know it that know what comes."""
        known = instance.reference
        if known is not None and not known.collective.open:
            return known.layout
        return layout(instance.collective, self.local.ranks[0], self._automatic_pack_bytes)

    def encode_blob(self, instance: Instance) -> bytes:
        """The description of the value for ranks that take any value; nothing where none can."""
        if not isinstance(instance.collective.operation, (Broadcast, Scatter)):
            return b""
        return encode_root_value(instance.collective, self.find_layout(instance))

    def _make_plans(self, instance: Instance, program: CompiledCollective) -> Plans:
        packs, is_folded = self.find_layout(instance), not moves_across(instance.collective)
        shares = make_shares(instance.collective, packs, self.local)
        counts = [list_counts(share, -1, self.local, is_folded) for share in shares]
        taken = [(share.given[0] if is_folded else sum(share.given),) for share in shares]
        nothing: Leaves = [()] * len(counts)
        results = [(share.brought,) for share in shares] if program.receivers else nothing
        gathers = self._make_plan(instance, packs, counts, nothing, taken)
        return gathers, self._make_plan(instance, packs, counts, results, nothing), shares

    def _make_plan(
        self, instance: Instance, packs: Layout, counts: Leaves, leaves_in: Leaves, leaves_out: Leaves
    ) -> core.Plan:
        assert instance.reference is not None
        reduce_op = get_reduce_op(instance.collective)
        dtypes = [int(pack.dtype) for pack in packs.packs]
        return self.engine.plan(
            core.ACROSS,
            _REDUCE_OPS[reduce_op] if reduce_op else 0,
            len(self.local.ranks),
            tuple(zip(dtypes, counts, leaves_in, leaves_out, strict=True)),
            instance.contract.ljust(_DIGEST_BYTES, b"\0"),
            int.from_bytes(instance.reference.terms, "little"),
            False,
            core.MEETS_NOT,
            0,
        )

    def take_values(self, instance: Instance) -> bool:
        """Take what ranks have brought to an instance that is not carried out by the segment after all.

        Returns:
            False where the segment's word says that the generation is over.
        """
        for rank, arrival in instance.arrivals.items():
            if arrival.inputs is not None:
                continue
            values: list[Bytes] = []
            known = arrival.prepared
            if known.collective.contributes(rank):
                packs, seats = known.layout.packs, self.local.ranks
                wanted = [(pack.count,) for pack in packs]
                counts = [(*(count * (one == rank) for one in seats), 0, 0) for (count,) in wanted]
                values = [np.empty(pack.count * pack.dtype.itemsize, np.uint8) for pack in packs]
                plan = self._make_plan(instance, known.layout, counts, [()] * len(counts), wanted)
                if self.engine.gather(plan, instance.number, tuple(values)) != core.COMPLETE:
                    return False
            arrival.inputs = SegmentInputs(values)
        return True

    def close(self) -> None:
        self._plans.clear()
        self.engine.detach()


class Crossing:
    """One instance on its way.

    Attributes:
        result: memory for the results of all packs, as in a result slot; None where no local rank receives one.
        partials: the bytes of each pack's partial sums; where they may, they lie in `result`.
        sources: what the contributing ranks have, where it is moved as it is.
    """

    def __init__(self, seat: WorkerSeat, instance: Instance, program: CompiledCollective, workspace: Workspace) -> None:
        self._engine = seat.engine
        self._number = instance.number
        self._gathers, self._brings, self._shares = seat.get_plans(instance, program)
        self._blob = seat.encode_blob(instance) if instance.open_ranks else b""
        self._workspace = workspace
        self._names: list[Any] = []
        self._packs = program.layout.packs
        self._tasks = program.tasks
        has_result = program.receivers and self._packs
        self.result = self._get_buffer(-1, program.layout.result_bytes) if has_result else None
        self.partials: list[Bytes] = []
        self.sources: list[SegmentInputs] = []
        if moves_across(instance.collective):
            self._gathered = self._open_values(seat.local.ranks, program.contributors)
            return
        for number, pack in enumerate(self._packs):
            arithmetic = program.arithmetic[number]
            assert arithmetic is not None
            nbytes = pack.count * arithmetic.partial_bytes
            is_cut = self._tasks[number].partition is not None
            if self.result is not None and arithmetic.can_finish_in_place and not is_cut:
                self.partials.append(self.result[pack.result_offset : pack.result_offset + nbytes])
            else:
                self.partials.append(self._get_buffer(number, nbytes))
        self._gathered = self.partials

    def _open_values(self, ranks: Sequence[int], contributors: Sequence[int]) -> list[Bytes]:
        """Room for the values of the ranks that contribute, one behind the other, by pack."""
        shares = self._shares
        itemsizes = [pack.dtype.itemsize for pack in self._packs]
        gathered = [
            self._get_buffer(number, sum(share.given) * itemsize)
            for number, (share, itemsize) in enumerate(zip(shares, itemsizes, strict=True))
        ]
        ends = [0] * len(shares)
        for seat, rank in enumerate(ranks):
            if rank in contributors:
                sizes = zip(ends, shares, itemsizes, strict=True)
                begins, ends = ends, [end + share.given[seat] * itemsize for end, share, itemsize in sizes]
                parts = zip(gathered, begins, ends, strict=True)
                self.sources.append(SegmentInputs([whole[begin:end] for whole, begin, end in parts]))
        return gathered

    def _get_buffer(self, pack: int, nbytes: int) -> Bytes:
        name = ("crossing", pack)
        self._workspace.acquire(name)
        self._names.append(name)
        return self._workspace.get_buffer(name, nbytes)

    def gather(self) -> bool:
        """Take partial sums or values; False where the segment's word says that the generation is over."""
        return self._engine.gather(self._gathers, self._number, tuple(self._gathered)) == core.COMPLETE

    def bring(self) -> bool:
        """Let the ranks have the results, which completes the instance; False where the generation is over."""
        results: list[Bytes] = []
        if self.result is not None:
            for number, (pack, task) in enumerate(zip(self._packs, self._tasks, strict=False)):
                itemsize, cut = pack.result_dtype.itemsize, task.partition
                whole = self.result[pack.result_offset :]
                if cut is None:
                    results.append(whole[: pack.count * itemsize])
                    continue
                runs = cut.list_runs(self._shares[number].ranks)
                parts = [whole[start * itemsize : stop * itemsize] for start, stop in runs]
                results.append(parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.uint8), *parts]))
        return self._engine.bring(self._brings, self._number, tuple(results), self._blob) == core.COMPLETE

    def close(self) -> None:
        """Give the memory back."""
        while self._names:
            self._workspace.release(self._names.pop())
