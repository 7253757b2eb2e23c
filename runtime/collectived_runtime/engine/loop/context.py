"""What the generations of a group loop have in common: its members, its memory, and the programs made so far."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from collectived_proto.types import CommunicationImplementation, Report
from collectived_runtime.engine.base.arenas import MemoryBudget, ResultArenas
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.compile import negotiation
from collectived_runtime.engine.compile.program import CompiledCollective, compile_program
from collectived_runtime.engine.gpu.communicator import NcclContext
from collectived_runtime.engine.gpu.input_events import InputEvents
from collectived_runtime.engine.gpu.stream_order import StreamOrder
from collectived_runtime.engine.record.counters import Counters
from collectived_runtime.engine.record.flight_recorder import FlightRecorder, GroupRecorder
from collectived_runtime.engine.record.rates import RateWindow
from collectived_runtime.engine.run.fold_pool import FoldPool
from collectived_runtime.engine.run.host_task import TaskTools
from collectived_runtime.engine.run.links import LinkProvider
from collectived_runtime.engine.submit.tracker import Instance
from collectived_runtime.limits.rejections import RejectionCounters

log = logging.getLogger("collectived.group_loop")

MAX_PROGRAMS = 1024  # kept per group loop; the oldest is made again when it is needed again


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a group loop needs of its worker. `report` and `on_closed` may be called from the group loop's thread."""

    name: str
    link_provider: LinkProvider
    budget: MemoryBudget
    fold_pool: FoldPool
    stall_after: float
    idle_after: float  # seconds after which a group loop gives back memory that nobody uses
    report: Callable[[Report], None]
    on_closed: Callable[[Any], None]  # with the group loop
    recorder: FlightRecorder = field(default_factory=FlightRecorder)
    refusals: RejectionCounters = field(default_factory=RejectionCounters)
    nccl: NcclContext | None = None  # where this worker has GPUs and NCCL
    worker_timeout: float = 10.0  # seconds in which the coordinator finds out that a silent worker is lost
    is_connected: Callable[[], bool] = lambda: True  # whether the coordinator can be reached; from any thread


@dataclass(slots=True)
class GroupContext:
    """What the generations of a group loop have in common."""

    topology: GroupTopology
    name: str
    worker: WorkerContext
    poller: Poller
    doorbells: Doorbells
    results: ResultArenas
    tools: TaskTools
    recorder: GroupRecorder
    stream_order: StreamOrder
    input_events: InputEvents
    programs: dict[Any, CompiledCollective] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what users should know; said once in the log, and in status
    rate_window: RateWindow = field(default_factory=lambda: RateWindow(time.monotonic()))

    @property
    def counters(self) -> Counters:
        return self.tools.counters

    def get_program(self, instance: Instance) -> CompiledCollective:
        """What carries out an instance of which everything is known."""
        strangers = instance.open_ranks if negotiation.can_be_open(instance.collective.operation) else ()
        key = (instance.contract, instance.rows, strangers) if instance.rows or strangers else instance.contract
        program = self.programs.get(key)
        if program is None:
            program = compile_program(instance.collective, self.topology, instance.rows, strangers)
            self.cache_program(key, program)
            if instance.collective.implementation is CommunicationImplementation.NCCL and not program.nccl_task_count:
                where = f"on GPUs, but {self.topology.nccl_unavailable_reason or 'not for NCCL'}"
                self.add_note(
                    f"{where if self.topology.has_gpus else 'on CPU devices'}: the hint NCCL falls back to RING"
                )
        return program

    def add_note(self, text: str) -> None:
        """Says something about the group that its users should know, once."""
        if text not in self.notes:
            self.notes.append(text)
            log.warning("group %s is %s", self.name, text)

    def cache_program(self, key: Any, program: CompiledCollective) -> None:
        if len(self.programs) >= MAX_PROGRAMS:  # somebody's shapes change with every call
            del self.programs[next(iter(self.programs))]
        self.programs[key] = program
