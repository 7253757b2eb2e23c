"""The tools that a worker gives to each of its group loops, and a group loop to each of its generations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collectived_proto.ipc import messages
from collectived_proto.types import Broadcast
from collectived_runtime.device.gpus import Region
from collectived_runtime.engine.base.arenas import ResultArenas, ResultSlot
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.result_parts import MIN_RESULT_BYTES, ResultParts
from collectived_runtime.engine.compile.program import CompiledCollective
from collectived_runtime.engine.failure.reporter import CoordinatorAccess
from collectived_runtime.engine.gpu.communicator import NcclContext
from collectived_runtime.engine.gpu.input_events import InputEvents
from collectived_runtime.engine.gpu.stream_order import StreamOrder
from collectived_runtime.engine.loop.execution import ResultDelivery
from collectived_runtime.engine.loop.programs import ProgramCache
from collectived_runtime.engine.record.flight_recorder import FlightRecorder
from collectived_runtime.engine.record.group_records import GroupRecords
from collectived_runtime.engine.run.fold_pool import FoldPool
from collectived_runtime.engine.run.links import LinkProvider
from collectived_runtime.engine.run.task import TaskTools
from collectived_runtime.engine.submit.tracker import Instance
from collectived_runtime.limits.rejections import RejectionCounters


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """Resources that all group loops of a worker share; may be used from any thread.

    Attributes:
        nccl: None where this worker has no GPUs, or no NCCL.
    """

    link_provider: LinkProvider
    budget: MemoryBudget
    fold_pool: FoldPool
    recorder: FlightRecorder = field(default_factory=FlightRecorder)
    rejections: RejectionCounters = field(default_factory=RejectionCounters)
    nccl: NcclContext | None = None


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The parts of a worker that a group loop needs.

    Attributes:
        stall_after: seconds of waiting after which an instance counts as stalled.
        idle_after: seconds after which a group loop gives back memory that is not in use.
        on_closed: called with the group loop, from its thread.
    """

    name: str
    resources: WorkerResources
    coordinator: CoordinatorAccess
    stall_after: float
    idle_after: float
    on_closed: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class RankResources:
    """Resources of a group loop for its local ranks: doorbells, result slots, and events of GPUs."""

    doorbells: Doorbells
    results: ResultArenas
    input_events: InputEvents
    stream_order: StreamOrder

    def prepare_delivery(self, instance: Instance, program: CompiledCollective) -> ResultDelivery:
        """Decide where the result of an instance goes; take a result slot where some rank reads it there.

        Raises:
            MemoryExhausted, OSError: there is no memory for a result slot.
        """
        readers, outputs, event = program.receivers, (), None
        rows_outputs: dict[int, tuple[Region, ...]] = {}
        is_on_device = any([arrival.inputs.is_on_device for arrival in instance.arrivals.values()])
        if is_on_device:
            inputs = {rank: instance.arrivals[rank].inputs for rank in readers}
            written = {
                rank: one.output
                for rank, one in inputs.items()
                if one.output is not None and program.fits_device_rows(rank, one.prepared.device_rows)
            }
            outputs = tuple(written.values())
            rows_outputs = {rank: inputs[rank].split_output() for rank in written if inputs[rank].prepared.device_rows}
            readers = tuple(rank for rank in readers if rank not in written)
            ordered = {rank: output for rank, output in written.items() if inputs[rank].is_stream_ordered}
            if ordered:
                event = self.stream_order.create_completion_event(instance.number, ordered, len(program.tasks))
        elif isinstance(instance.collective.operation, Broadcast):
            readers = tuple(rank for rank in readers if not instance.arrivals[rank].inputs.keeps_own)
        if not readers:
            return ResultDelivery((), None, None, outputs, is_on_device, event, rows_outputs=rows_outputs)
        slot = self.results.acquire(program.slot_bytes, readers)
        memory = slot.memory
        if program.header:
            memory[: len(program.header)] = np.frombuffer(program.header, np.uint8)
            memory = memory[len(program.header) :]
        parts = None if is_on_device else self._make_parts(instance, program, readers, slot)
        return ResultDelivery(readers, slot, memory, outputs, is_on_device, event, parts, rows_outputs=rows_outputs)

    def _make_parts(
        self, instance: Instance, program: CompiledCollective, readers: Iterable[int], slot: ResultSlot
    ) -> ResultParts | None:
        """The receivers of messages about parts of the result; None where there are none."""
        if program.is_single_worker or program.slot_bytes < MIN_RESULT_BYTES:
            return None
        data = len(program.header)
        taking = [rank for rank in readers if instance.arrivals[rank].inputs.takes_parts]
        begins = {rank: program.header_offsets.get(rank, data) for rank in taking}
        return ResultParts(self.doorbells, instance.number, slot, begins, data) if begins else None

    def release(self, rank: int, numbers: Iterable[int]) -> None:
        """Take back result slots, and events, that a rank needs no longer."""
        for number in numbers:
            if number < messages.WORKER_EVENT_BASE:
                self.results.release(number, rank)
            else:
                self.stream_order.release(rank, number)

    def release_unheard(self, delivery: ResultDelivery, is_told: bool) -> None:
        """Take back the result slot of an instance for those ranks that will not: others may be reading it."""
        if delivery.slot is not None:
            for rank in delivery.readers:
                if not is_told or self.doorbells.local_ranks[rank].closed:
                    self.results.release(delivery.slot.number, rank)

    def release_rank(self, rank: int) -> None:
        """Take back all that a rank had: it is gone."""
        self.input_events.remove_rank(rank)
        self.stream_order.remove_rank(rank)
        self.results.release_rank(rank)

    def close(self) -> None:
        self.doorbells.close()
        self.input_events.close()
        self.stream_order.close()
        self.results.close()


@dataclass(frozen=True, slots=True)
class GroupContext:
    """The tools that a group loop gives to each of its generations, which passes them on to its parts."""

    topology: GroupTopology
    worker: WorkerContext
    poller: Poller
    ranks: RankResources
    records: GroupRecords
    tools: TaskTools
    programs: ProgramCache
