"""The communicators of NCCL that one generation uses on this worker, and the order in which it launches there.

One communicator is of all GPUs of the group, one of this worker's GPUs alone. They are made when a program first needs
them, before it runs, and are ended with the generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from collectived_runtime.device.nccl.communicators import DeviceRank
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile.program import CompiledCollective
from collectived_runtime.engine.compile.selection import NCCL
from collectived_runtime.engine.gpu.communicator import (
    LaunchOrder,
    LocalCommunicator,
    NcclContext,
    intra_worker_device_ranks,
    local_device_ranks,
)
from collectived_runtime.engine.gpu.contributions import MultiGpuTask
from collectived_runtime.engine.gpu.hierarchical_task import HierarchicalTask
from collectived_runtime.engine.gpu.launch_agreement import AgreementContext, agree_on_turn, create_communicators
from collectived_runtime.engine.gpu.launch_queue import TicketKey
from collectived_runtime.engine.gpu.nccl_rows_task import NcclRowsTask
from collectived_runtime.engine.gpu.nccl_task import NcclTask
from collectived_runtime.engine.run.schedule import Wait
from collectived_runtime.engine.run.task import TaskContext


class GroupCommunicators:
    """The communicators of one generation. `context` is None where this worker has no NCCL."""

    def __init__(self, context: NcclContext | None, topology: GroupTopology, generation: int) -> None:
        self._nccl_context = context
        self._topology = topology
        self._generation = generation
        self._global_ranks = local_device_ranks(topology)
        self._local_ranks = intra_worker_device_ranks(topology)
        self._global_key = (topology.group.key, generation)  # by which the communicators are kept
        self._local_key = (*self._global_key, "inside")
        self._launch_order: LaunchOrder | None = None  # of the instance that NCCL carries out

    def agree(self, instance: int, program: CompiledCollective, workers: AgreementContext) -> Iterator[Wait]:
        """Make the communicators that a program needs, and wait for its turn among all that NCCL carries out.

        Where NCCL works inside of this worker alone no other worker is asked.
        """
        nccl = self._nccl_context
        assert nccl is not None, "a worker that has announced no NCCL is asked for it"
        key = TicketKey(self._topology.group.key, self._generation, instance)
        if program.is_hierarchical and nccl.communicators.get(self._local_key) is None:
            alone = replace(workers, places=1, place=0, transport=replace(workers.transport, links={}))
            made = yield from create_communicators(alone, key, nccl, len(self._local_ranks), self._local_ranks)
            nccl.communicators.store(self._local_key, made)
        if not program.nccl_task_count:
            return
        if nccl.communicators.get(self._global_key) is None:
            size = len(self._topology.gpus)
            made = yield from create_communicators(workers, key, nccl, size, self._global_ranks)
            nccl.communicators.store(self._global_key, made)
        self.cancel_launches()  # also after a failed one: a ticket that is kept delays all later ones
        order = self._launch_order = LaunchOrder(
            key._replace(step=1), program.nccl_task_count, nccl.launch_queue, workers.wake
        )
        yield from agree_on_turn(workers, order.key, nccl.launch_queue)

    def create_task(self, context: TaskContext) -> MultiGpuTask | None:
        """The task where NCCL has a part in it, else None. `agree` has ended before."""
        task = context.task
        if task.algorithm == NCCL:
            assert self._launch_order is not None, "it is agreed on before"
            numbers = [other for other in context.program.tasks if other.algorithm == NCCL]
            turn = self._launch_order.create_turn(numbers.index(task))
            kind = NcclTask if task.partition is None else NcclRowsTask
            return kind(context, self._get_communicator(self._global_key, self._global_ranks), turn)
        if task.is_hierarchical:
            return HierarchicalTask(context, self._get_communicator(self._local_key, self._local_ranks))
        return None

    def cancel_launches(self) -> None:
        """Give up the turns of an instance: its tasks that have not been launched never will be."""
        if self._launch_order is not None:
            self._launch_order.close()
            self._launch_order = None

    def close(self) -> None:
        """End the communicators: the generation is over."""
        self.cancel_launches()
        self._tear_down(orderly=True)

    def _get_communicator(self, key: tuple[Any, ...], ranks: Sequence[DeviceRank]) -> LocalCommunicator:
        nccl = self._nccl_context
        made = nccl.communicators.get(key) if nccl is not None else None
        assert nccl is not None and made is not None, "it is made before"
        return LocalCommunicator(nccl, self._topology, ranks, made, self._tear_down)

    def _tear_down(self, *, orderly: bool = False) -> None:
        if self._nccl_context is not None:
            for key in (self._global_key, self._local_key):
                self._nccl_context.communicators.tear_down(key, orderly=orderly)
