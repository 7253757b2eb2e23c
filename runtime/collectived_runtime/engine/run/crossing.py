"""What a worker does for ranks that fold in their segment: takes partial sums out of it, and brings results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_native import core
from collectived_proto.types import ReduceOp
from collectived_runtime.engine.base.arenas import Workspace
from collectived_runtime.engine.compile.program import CompiledCollective
from collectived_runtime.engine.submit.tracker import Instance
from collectived_runtime.plan.packing import get_reduce_op

_REDUCE_OPS = {op: number for number, op in enumerate(ReduceOp, 1)}  # as on the wire
_DIGEST_BYTES = 16
_MAX_PLANS = 1024

Plans = tuple["core.Plan", "core.Plan"]
Leaves = Sequence[tuple[int, ...]]


class WorkerSeat:
    """The seat of this worker, the last one."""

    def __init__(self, engine: core.Engine, seat: int) -> None:
        self.engine = engine
        self._seat = seat
        self._plans: dict[bytes, Plans] = {}  # by contract

    def get_plans(self, instance: Instance, program: CompiledCollective) -> Plans:
        """What takes partial sums out of the segment, and what brings results into it."""
        plans = self._plans.get(instance.contract)
        if plans is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            counts = [(pack.count,) for pack in program.layout.packs]
            nothing: Leaves = [()] * len(counts)
            gathers = self._make_plan(instance, program, nothing, counts)
            plans = gathers, self._make_plan(instance, program, counts if program.receivers else nothing, nothing)
            self._plans[instance.contract] = plans
        return plans

    def _make_plan(
        self, instance: Instance, program: CompiledCollective, leaves_in: Leaves, leaves_out: Leaves
    ) -> core.Plan:
        reduce_op = get_reduce_op(program.collective)
        assert instance.reference is not None
        packs = zip(program.layout.packs, leaves_in, leaves_out, strict=True)
        return self.engine.plan(
            core.ACROSS,
            _REDUCE_OPS[reduce_op] if reduce_op else 0,
            self._seat,
            tuple((int(pack.dtype), (pack.count,), given, got) for pack, given, got in packs),
            instance.contract.ljust(_DIGEST_BYTES, b"\0"),
            int.from_bytes(instance.reference.terms, "little"),
            False,
            core.MEETS_NOT,
            0,
        )

    def close(self) -> None:
        self._plans.clear()
        self.engine.detach()


class Crossing:
    """One instance on its way.

    Attributes:
        result: memory for the results of all packs, as in a result slot; None where no local rank receives one.
        partials: the bytes of each pack's partial sums; where they may, they lie in `result`.
    """

    def __init__(self, seat: WorkerSeat, instance: Instance, program: CompiledCollective, workspace: Workspace) -> None:
        self._engine = seat.engine
        self._number = instance.number
        self._gathers, self._brings = seat.get_plans(instance, program)
        self._workspace = workspace
        self._names: list[Any] = []
        self._packs = program.layout.packs
        has_result = program.receivers and self._packs
        self.result = self._get_buffer(-1, program.layout.result_bytes) if has_result else None
        self.partials: list[NDArray[np.uint8]] = []
        for number, pack in enumerate(self._packs):
            arithmetic = program.arithmetic[number]
            assert arithmetic is not None
            nbytes = pack.count * arithmetic.partial_bytes
            if self.result is not None and arithmetic.can_finish_in_place:
                self.partials.append(self.result[pack.result_offset : pack.result_offset + nbytes])
            else:
                self.partials.append(self._get_buffer(number, nbytes))

    def _get_buffer(self, pack: int, nbytes: int) -> NDArray[np.uint8]:
        name = ("crossing", pack)
        self._workspace.acquire(name)
        self._names.append(name)
        return self._workspace.get_buffer(name, nbytes)

    def gather(self) -> bool:
        """Take the partial sums; False where the segment's word says that the generation is over."""
        return self._engine.gather(self._gathers, self._number, tuple(self.partials)) == core.COMPLETE

    def bring(self) -> bool:
        """Let the ranks have the results, which completes the instance; False where the generation is over."""
        results: list[NDArray[np.uint8]] = []
        if self.result is not None:
            for pack in self._packs:
                end = pack.result_offset + pack.count * pack.result_dtype.itemsize
                results.append(self.result[pack.result_offset : end])
        return self._engine.bring(self._brings, self._number, tuple(results)) == core.COMPLETE

    def close(self) -> None:
        """Give the memory back."""
        while self._names:
            self._workspace.release(self._names.pop())
