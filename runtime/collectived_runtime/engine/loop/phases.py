"""The phases of an instance, in this order, each of them an `Execution`.

1. Where some rank takes what comes, the root's worker *announces* it.
2. Where lengths differ, the workers *exchange* them.
3. Where NCCL has a part in it, its communicators are made, and the workers *agree* that all have come, and in which
   order it is launched.
4. The *program* itself runs.

Which of them an instance needs, and what follows on each, is for the generation to say (`Generation._carry_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from collectived_proto.rows import extract_rows
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile import negotiation
from collectived_runtime.engine.compile.program import CompiledCollective, PackTask
from collectived_runtime.engine.gpu.gpu_task import GpuTask
from collectived_runtime.engine.gpu.group_communicators import GroupCommunicators
from collectived_runtime.engine.gpu.launch_agreement import AgreementContext, compute_peers
from collectived_runtime.engine.gpu.nccl_task import with_grace_period
from collectived_runtime.engine.gpu.rows_task import RowsTask
from collectived_runtime.engine.loop.execution import Execution, ResultDelivery
from collectived_runtime.engine.loop.programs import ProgramCache
from collectived_runtime.engine.run import host_task
from collectived_runtime.engine.run.announce import announce
from collectived_runtime.engine.run.crossing import Crossing, WorkerSeat
from collectived_runtime.engine.run.schedule import OnUnexpectedFrame, PlanTransport, Wait
from collectived_runtime.engine.run.task import TaskContext, TaskTools
from collectived_runtime.engine.submit.tracker import Instance
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link


class Phases:
    """Makes the phases of the instances of one generation.

    Args:
        on_dispute: called with an instance whose announcement is not what was agreed here.

    Attributes:
        chain: of all contracts that have been carried out. Ranks of one worker have compared their contracts: it is
            for peers, and stays as it is where there are none.
    """

    def __init__(
        self,
        topology: GroupTopology,
        generation: int,
        programs: ProgramCache,
        tools: TaskTools,
        communicators: GroupCommunicators,
        on_dispute: Callable[[Instance], None],
        on_unexpected_frame: OnUnexpectedFrame,
    ) -> None:
        self.chain = bytes(8)
        self._topology = topology
        self._generation = generation
        self._programs = programs
        self._tools = tools
        self._communicators = communicators
        self._on_dispute = on_dispute
        self._on_unexpected_frame = on_unexpected_frame

    def announce(self, instance: Instance, root: int) -> Iterator[Execution]:
        """Announce the root's value to all workers, and describe `instance` as the root describes it."""
        collective, topology = instance.collective, self._topology
        task = negotiation.compile_announcement(topology, root)
        known = not collective.open
        word = negotiation.encode_announcement(collective) if root in topology.own_ranks else None
        frame = frames.Frame(
            kind=frames.FrameKind.ANNOUNCEMENT,
            pack=0,
            shard=0,
            round=0,
            key=topology.group.key,
            generation=self._generation,
            instance=instance.number,
            plan=task.plan_hash,
            chain=self._next_chain(instance) if known else bytes(8),
            offset=0,
            length=0,
        )

        def heard(word: bytes, chain: bytes) -> None:
            told, contract = negotiation.decode_announcement(word)
            model = instance.reference
            agrees = model is None or negotiation.matches_announcement(model, told, contract)
            if model is None or model.collective.open:
                site = instance.collective.site
                instance.describe(replace(told, site=site), contract)
            if not agrees or chain != self._next_chain(instance):  # or we have agreed on other things before
                self._on_dispute(instance)

        def start(_: PackTask, links: dict[int, Link]) -> Iterator[Wait]:
            return announce(task.plan, links, frame, word, known, heard, self._on_unexpected_frame)

        yield Execution(instance, negotiation.single_task_program(task), start, is_prelude=True)

    def exchange_lengths(self, instance: Instance) -> Iterator[Execution]:
        """Give the instance the rows of all ranks, which the workers of other ranks have to be asked for."""
        own = {rank: extract_rows(one.prepared.collective) for rank, one in instance.arrivals.items()}
        if len(self._topology.peers) == 1:
            instance.rows = tuple(own[rank] for rank in sorted(own))
            return
        program = self._programs.get_length_exchange(instance)
        size = self._topology.group.size
        mine = np.zeros((size, negotiation.rows_per_rank(instance.collective, self._topology.group)), np.int64)
        for rank, rows in own.items():
            mine[rank] = rows
        all_rows = np.empty_like(mine)
        sources: list[Any] = [negotiation.LengthTable(mine)]
        result = all_rows.reshape(-1).view(np.uint8)
        chain = self._next_chain(instance)

        def start(task: PackTask, links: dict[int, Link]) -> Iterator[Wait]:
            transport = self._make_transport(instance, task, links, chain)
            return host_task.run(TaskContext(program, task, sources, result, self._tools, transport))

        yield Execution(instance, program, start, is_prelude=True)
        instance.rows = tuple(map(tuple, all_rows.tolist()))

    def agree_on_launch(self, instance: Instance, program: CompiledCollective) -> Iterator[Execution]:
        """Before what NCCL has a part in: its communicators, and its turn on this worker among all others."""
        if not program.nccl_task_count and not program.is_hierarchical:
            return
        places, place = len(self._topology.peers), self._topology.place
        asked = compute_peers(places, place) if program.nccl_task_count else frozenset()
        task = replace(negotiation.compile_announcement(self._topology, 0), peers=asked)

        def start(task: PackTask, links: dict[int, Link]) -> Iterator[Wait]:
            transport = self._make_transport(instance, task, links, self._next_chain(instance))
            workers = AgreementContext(places, place, transport, self._tools.wake)
            agreeing = self._communicators.agree(instance.number, program, workers)
            return with_grace_period(agreeing, self._tools.timers)

        yield Execution(instance, negotiation.single_task_program(task), start, is_prelude=True)

    def carry_across(self, instance: Instance, program: CompiledCollective, seat: WorkerSeat) -> Iterator[Execution]:
        """Carry values of the local ranks from their segment to the other workers, and results back.

        Where the segment says that the generation is over, the instance is barred.
        """
        crossing = Crossing(seat, instance, program, self._tools.workspace)
        try:
            if not crossing.gather():
                instance.bar()
                return
            value_bytes = sum(leaf.nbytes for leaf in instance.collective.leaves)
            if crossing.partials:
                self._tools.counters.folded_bytes += len(instance.arrivals) * value_bytes
            delivery = ResultDelivery(memory=crossing.result, is_shared=True)
            yield self.execute(instance, program, crossing.sources, delivery, crossing.partials)
            if not crossing.bring():
                instance.bar()
        finally:
            crossing.close()

    def prepare(self, instance: Instance, waits: Iterator[Wait]) -> Execution:
        """Wait for something that comes before the program, and asks no other worker."""
        task = replace(negotiation.compile_announcement(self._topology, 0), peers=frozenset())
        return Execution(instance, negotiation.single_task_program(task), lambda *_: waits, is_prelude=True)

    def execute(
        self,
        instance: Instance,
        program: CompiledCollective,
        sources: Sequence[Any],
        delivery: ResultDelivery,
        partials: Sequence[Any] = (),
        run: Callable[[TaskContext], Iterator[Wait]] = host_task.run,
    ) -> Execution:
        """Execute the program of an instance. From here on its contract is part of the chain.

        Args:
            sources: what the contributing local ranks submitted.
            partials: or what they have folded themselves, by pack.
            run: carries out tasks on memory of the host.
        """
        self.chain = chain = self._next_chain(instance)

        def start(task: PackTask, links: dict[int, Link]) -> Iterator[Wait]:
            transport = replace(self._make_transport(instance, task, links, chain), marks=instance.marks)
            context = TaskContext(
                program,
                task,
                sources,
                delivery.memory,
                self._tools,
                transport,
                delivery.outputs,
                delivery.completion_event,
                partials,
                delivery.parts,
                delivery.rows_outputs,
            )
            nccl_task = self._communicators.create_task(context)
            if nccl_task is not None:
                return with_grace_period(nccl_task.run(), self._tools.timers)
            if not delivery.is_on_device:
                return run(context)
            return (GpuTask if task.partition is None else RowsTask)(context).run()

        return Execution(instance, program, start, delivery)

    def _make_transport(
        self, instance: Instance, task: PackTask, links: dict[int, Link], chain: bytes
    ) -> PlanTransport:
        key, generation, number = self._topology.group.key, self._generation, instance.number
        shared = frames.FrameTemplate(
            key, generation, number, task.pack_number, task.shard, plan=task.plan_hash, chain=chain
        )
        return PlanTransport(links, shared, self._on_unexpected_frame)

    def _next_chain(self, instance: Instance) -> bytes:
        """The chain with this instance."""
        if len(self._topology.peers) == 1:
            return self.chain
        return frames.next_chain(self.chain, instance.contract)
