"""The programs that a group loop has made so far, one per contract, and what users should know about them."""

from __future__ import annotations

import logging
from typing import Any

from collectived_proto.types import AxisOperation, Collective, CommunicationImplementation, unscoped_name
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile import negotiation
from collectived_runtime.engine.compile.program import CompiledCollective, compile_program
from collectived_runtime.engine.submit.tracker import Instance

log = logging.getLogger("collectived.group_loop")

MAX_PROGRAMS = 1024  # kept per group loop; the oldest is made again when it is needed again


class ProgramCache:
    """Compiles programs, and keeps them for the generations of one group loop.

    Attributes:
        notes: what users should know; said once in the log, and in status.
    """

    def __init__(self, topology: GroupTopology) -> None:
        self.notes: list[str] = []
        self._topology = topology
        self._programs: dict[Any, CompiledCollective] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, instance: Instance) -> CompiledCollective:
        """The program of an instance of which everything is known."""
        strangers = instance.open_ranks if negotiation.can_be_open(instance.collective.operation) else ()
        leaves_own = self._may_leave_own(instance)
        known = instance.rows, strangers, leaves_own
        key = (instance.contract, known) if any(known) else instance.contract
        program = self._programs.get(key)
        if program is None:
            program = compile_program(
                instance.collective, self._topology, instance.rows, strangers, leaves_own=leaves_own
            )
            self._add(key, program)
            if not program.nccl_task_count:
                self.note_hint(instance.collective)
        return program

    def _may_leave_own(self, instance: Instance) -> bool:
        """Whether the only local rank takes its own rows of the result from its own arrays."""
        if not isinstance(instance.collective.operation, AxisOperation):
            return False
        if len(self._topology.own_ranks) > 1 or self._topology.has_gpus:
            return False
        inputs = [arrival.inputs for arrival in instance.arrivals.values()]  # None: its value is in the segment
        return all(one is not None and one.keeps_own for one in inputs)

    def note_hint(self, collective: Collective) -> None:
        """Add a note for users, once, where NCCL is asked for and does not carry a collective out."""
        if collective.implementation is CommunicationImplementation.NCCL:
            where = f"on GPUs, but {self._topology.nccl_unavailable_reason or 'not for NCCL'}"
            self._add_note(
                f"{where if self._topology.has_gpus else 'on CPU devices'}: the hint NCCL falls back to RING"
            )

    def get_length_exchange(self, instance: Instance) -> CompiledCollective:
        """The program by which workers exchange the rows of their ranks."""
        columns = negotiation.rows_per_rank(instance.collective, self._topology.group)
        program = self._programs.get(columns)
        if program is None:
            program = negotiation.compile_length_exchange(instance.collective, self._topology)
            self._add(columns, program)
        return program

    def _add_note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            log.warning("group %s is %s", unscoped_name(self._topology.group.name), text)

    def _add(self, key: Any, program: CompiledCollective) -> None:
        if len(self._programs) >= MAX_PROGRAMS:  # the shapes of some caller change with every call
            del self._programs[next(iter(self._programs))]
        self._programs[key] = program
