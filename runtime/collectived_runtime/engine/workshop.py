"""What the generations of a lane have in common: its members, its memory, and the programs made so far."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from collectived_proto.types import CommunicationImplementation, Report
from collectived_runtime.engine import preliminary
from collectived_runtime.engine.bells import Bells
from collectived_runtime.engine.counters import Counters
from collectived_runtime.engine.crew import Crew
from collectived_runtime.engine.events import Events
from collectived_runtime.engine.ledger import Instance
from collectived_runtime.engine.links import Exchange
from collectived_runtime.engine.meeting import Engine
from collectived_runtime.engine.minute import Minute
from collectived_runtime.engine.program import Program, compose
from collectived_runtime.engine.recorder import Recorder, Tape
from collectived_runtime.engine.results import Budget, Results
from collectived_runtime.engine.strand import Tools
from collectived_runtime.engine.stream_order import StreamOrder
from collectived_runtime.engine.topology import Topology
from collectived_runtime.engine.watch import Watch
from collectived_runtime.limits.refusals import Refusals

log = logging.getLogger("collectived.lane")

MAX_PROGRAMS = 1024  # kept per lane; the oldest is made again when it is needed again


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a lane needs of its worker. `report` and `ended` may be called from the lane's thread."""

    name: str
    exchange: Exchange
    budget: Budget
    crew: Crew
    stall_after: float
    idle_after: float  # seconds after which a lane gives back memory that nobody uses
    report: Callable[[Report], None]
    ended: Callable[[Any], None]  # with the lane
    recorder: Recorder = field(default_factory=Recorder)
    refusals: Refusals = field(default_factory=Refusals)
    native: Engine | None = None  # where this worker has GPUs and NCCL
    lost_after: float = 10.0  # seconds in which the coordinator finds out that a silent worker is lost
    connected: Callable[[], bool] = lambda: True  # whether the coordinator can be reached; from any thread


@dataclass(slots=True)
class Workshop:
    """What the generations of a lane have in common."""

    topology: Topology
    name: str
    around: Surroundings
    watch: Watch
    bells: Bells
    results: Results
    tools: Tools
    tape: Tape
    order: StreamOrder
    events: Events
    programs: dict[Any, Program] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what users should know; said once in the log, and in status
    minute: Minute = field(default_factory=lambda: Minute(time.monotonic()))

    @property
    def counters(self) -> Counters:
        return self.tools.counters

    def program(self, instance: Instance) -> Program:
        """What carries out an instance of which everything is known."""
        strangers = instance.strangers if preliminary.may_be_open(instance.collective.operation) else ()
        key = (instance.contract, instance.rows, strangers) if instance.rows or strangers else instance.contract
        program = self.programs.get(key)
        if program is None:
            program = compose(instance.collective, self.topology, instance.rows, strangers)
            self.keep(key, program)
            if instance.collective.implementation is CommunicationImplementation.NCCL and not program.native:
                where = f"on GPUs, but {self.topology.why_no_nccl or 'not for NCCL'}"
                self.note(f"{where if self.topology.on_gpus else 'on CPU devices'}: the hint NCCL falls back to RING")
        return program

    def note(self, text: str) -> None:
        """Says something about the group that its users should know, once."""
        if text not in self.notes:
            self.notes.append(text)
            log.warning("group %s is %s", self.name, text)

    def keep(self, key: Any, program: Program) -> None:
        if len(self.programs) >= MAX_PROGRAMS:  # somebody's shapes change with every call
            del self.programs[next(iter(self.programs))]
        self.programs[key] = program
