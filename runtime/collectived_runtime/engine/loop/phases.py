"""The phases of an instance, in this order, each of them an `Execution`.

1. Where some rank takes what comes, the root's worker *announces* it.
2. Where lengths differ, the workers *exchange* them.
3. Where NCCL carries it out, the workers *agree* that all have come, and in which order it is launched. Where NCCL does
   so inside of a worker alone, that worker makes its communicator.
4. The *program* itself runs.

Which of them an instance needs, and what follows on each, is for the generation to say (`Generation._carry_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.device.gpus import Region
from collectived_runtime.device.nccl.communicators import DeviceRank
from collectived_runtime.engine.base.arenas import ResultSlot
from collectived_runtime.engine.compile import negotiation
from collectived_runtime.engine.compile.program import CompiledCollective, PackTask
from collectived_runtime.engine.compile.selection import NCCL
from collectived_runtime.engine.gpu import gpu_task, hierarchical_task, nccl_task
from collectived_runtime.engine.gpu.communicator import (
    LaunchOrder,
    LocalCommunicator,
    NcclContext,
    intra_worker_device_ranks,
    local_device_ranks,
)
from collectived_runtime.engine.gpu.launch_agreement import (
    AgreementContext,
    agree_on_turn,
    compute_peers,
    create_communicators,
)
from collectived_runtime.engine.gpu.launch_queue import TicketKey
from collectived_runtime.engine.gpu.nccl_task import with_grace_period
from collectived_runtime.engine.gpu.stream_order import CompletionEvent
from collectived_runtime.engine.loop.context import GroupContext
from collectived_runtime.engine.loop.execution import Execution, TaskFactory
from collectived_runtime.engine.run import host_task as tasks
from collectived_runtime.engine.run.announce import announce
from collectived_runtime.engine.run.host_task import Wait
from collectived_runtime.engine.run.schedule import OnUnexpectedFrame
from collectived_runtime.engine.submit.tracker import Instance, Mark
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link


class Phases:
    """Of one generation.

    Args:
        disputed: disputes an instance whose announcement is not what was agreed here.
        judge: as of `execute`.

    Attributes:
        chain: of all contracts that have been carried out. Ranks of one worker have compared their contracts: it is
            for peers, and stays as it is where there are none.
    """

    def __init__(
        self, context: GroupContext, number: int, disputed: Callable[[Instance], None], judge: OnUnexpectedFrame
    ) -> None:
        self.chain = bytes(8)
        self._context = context
        self._generation = number
        self._on_dispute = disputed
        self._on_unexpected_frame = judge
        self._global_comm_ranks = local_device_ranks(context.topology)  # of a communicator of all GPUs of the group,
        self._local_comm_ranks = intra_worker_device_ranks(context.topology)  # and of one of this worker's alone
        self._launch_order: LaunchOrder | None = None  # of the instance that NCCL carries out
        self._global_comm_key = (context.topology.group.key, number)  # by which the communicators are kept,
        self._local_comm_key = (*self._global_comm_key, "inside")  # and those of this worker alone

    def announce(self, instance: Instance, root: int) -> Iterator[Execution]:
        """What the root is about to send, told to all; then `instance` is described as the root describes it."""
        collective, topology = instance.collective, self._context.topology
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
            instance.describe(told, contract)
            if not agrees or chain != self._next_chain(instance):  # or we have agreed on other things before
                self._on_dispute(instance)

        def start(_: PackTask, links: dict[int, Link]) -> Iterator[Wait]:
            return announce(task.plan, links, frame, word, known, heard, self._on_unexpected_frame)

        yield Execution(instance, negotiation.single_task_program(task), None, start, is_prelude=True)

    def exchange_lengths(self, instance: Instance) -> Iterator[Execution]:
        """Give the instance the rows of all ranks, which the workers of other ranks have to be asked for."""
        topology = self._context.topology
        own = {rank: negotiation.extract_rows(one.prepared.collective) for rank, one in instance.arrivals.items()}
        if len(topology.peers) == 1:
            instance.rows = tuple(own[rank] for rank in sorted(own))
            return
        columns = negotiation.rows_per_rank(instance.collective, topology.group)
        program = self._context.programs.get(columns)
        if program is None:
            program = negotiation.compile_length_exchange(instance.collective, topology)
            self._context.cache_program(columns, program)
        mine = np.zeros((topology.group.size, columns), np.int64)
        for rank, rows in own.items():
            mine[rank] = rows
        all_rows = np.empty_like(mine)

        start = self._make_task_factory(
            instance, program, [negotiation.LengthTable(mine)], all_rows.reshape(-1).view(np.uint8)
        )
        yield Execution(instance, program, None, start, is_prelude=True)
        instance.rows = tuple(map(tuple, all_rows.tolist()))

    def execute(
        self,
        instance: Instance,
        program: CompiledCollective,
        slot: ResultSlot | None,
        sources: Sequence[Any],
        memory: Any,
        readers: tuple[int, ...],
        outputs: Sequence[Region] | None = None,
    ) -> Execution:
        """What the instance is about; from here on its contract is part of the chain.

        Args:
            sources: what the contributing local ranks submitted. memory: of the result, behind the slot's head.
            readers: the ranks that read it there. outputs: where the result is to be written as well; None: all of it
                is about memory of the host.
        """
        finale = self._create_completion_event(instance, program) if outputs else None
        carry = self._select_runner(outputs, finale)
        start = self._make_task_factory(instance, program, sources, memory, instance.marks, carry)
        self.chain = self._next_chain(instance)
        return Execution(instance, program, slot, start, readers=readers, finale=finale)

    def _create_completion_event(self, instance: Instance, program: CompiledCollective) -> CompletionEvent | None:
        """Where some ranks go on in stream order."""
        asked = {rank: instance.arrivals[rank].inputs for rank in program.receivers}
        outputs = {rank: one.output for rank, one in asked.items() if one.is_stream_ordered and one.output is not None}
        return (
            self._context.stream_order.create_completion_event(instance.number, outputs, len(program.tasks))
            if outputs
            else None
        )

    def needs_agreement(self, program: CompiledCollective) -> bool:
        """Whether an `agreement` comes before it here."""
        return bool(program.nccl_task_count) or (program.is_hierarchical and len(self._global_comm_ranks) > 1)

    def agree_on_launch(self, instance: Instance, program: CompiledCollective) -> Execution:
        """Before what NCCL carries out: all have come with the same contract, and it is its turn on this worker.

        Where NCCL works inside of this worker alone, there are its communicators; no other worker is asked.
        """
        topology = self._context.topology
        asked = compute_peers(len(topology.peers), topology.place) if program.nccl_task_count else frozenset()
        task = replace(negotiation.compile_announcement(topology, 0), peers=asked)

        def start(_: PackTask, links: dict[int, Link]) -> Iterator[Wait]:
            return with_grace_period(self._agree(instance, program, links), self._context.tools.timers)

        return Execution(instance, negotiation.single_task_program(task), None, start, is_prelude=True)

    def _agree(self, instance: Instance, program: CompiledCollective, links: dict[int, Link]) -> Iterator[Wait]:
        context, topology, engine = self._context, self._context.topology, self._context.worker.nccl
        assert engine is not None, "a worker that has told nobody of NCCL is asked for it"
        group = topology.group.key
        stamp = frames.FrameTemplate(
            group, self._generation, instance.number, 0, 0, bytes(8), self._next_chain(instance)
        )
        talk = AgreementContext(
            len(topology.peers), topology.place, links, stamp, self._on_unexpected_frame, context.tools.wake
        )
        key = TicketKey(group, self._generation, instance.number)
        inside = self._local_comm_ranks
        if program.is_hierarchical and len(inside) > 1 and engine.communicators.get(self._local_comm_key) is None:
            alone = replace(talk, places=1, place=0, links={})
            made = yield from create_communicators(
                alone, key, engine.launch_queue, engine.communicators, len(inside), inside
            )
            engine.communicators.store(self._local_comm_key, made)
        if not program.nccl_task_count:
            return
        if engine.communicators.get(self._global_comm_key) is None:
            size, ranks = len(topology.gpus), self._global_comm_ranks
            made = yield from create_communicators(talk, key, engine.launch_queue, engine.communicators, size, ranks)
            engine.communicators.store(self._global_comm_key, made)
        self.cancel_launches()  # whatever became of the one before: a ticket that is kept holds up all that come later
        order = self._launch_order = LaunchOrder(
            key._replace(step=1), program.nccl_task_count, engine.launch_queue, context.tools.wake
        )
        yield from agree_on_turn(talk, order.key, engine.launch_queue)

    def cancel_launches(self) -> None:
        """What has not been launched of an instance never will be: nobody waits for its turn any more."""
        if self._launch_order is not None:
            self._launch_order.close()
            self._launch_order = None

    def close(self) -> None:
        """The generation is over: its communicators are ended."""
        self.cancel_launches()
        self._end_communicators(orderly=True)

    def _end_communicators(self, *, orderly: bool = False) -> None:
        engine = self._context.worker.nccl
        if engine is not None:
            for kept in (self._global_comm_key, self._local_comm_key):
                engine.communicators.tear_down(kept, orderly=orderly)

    def _select_runner(
        self, outputs: Sequence[Region] | None, finale: CompletionEvent | None
    ) -> Callable[..., Iterator[Wait]]:
        """What carries the tasks of a program out, one by one."""
        engine, order = self._context.worker.nccl, self._launch_order
        other = tasks.run if outputs is None else partial(gpu_task.run, outputs, finale)
        if engine is None:
            return other
        whole = self._find_communicator(engine, self._global_comm_key, self._global_comm_ranks)
        inside = self._find_communicator(engine, self._local_comm_key, self._local_comm_ranks)

        def carry(program: CompiledCollective, task: PackTask, *rest: Any) -> Iterator[Wait]:
            if task.algorithm == NCCL:
                assert whole is not None and order is not None, "they are made before it is agreed on"
                carried = nccl_task.run(whole, order, outputs or (), finale, program, task, *rest)
            elif task.is_hierarchical and inside is not None and outputs is not None:
                carried = hierarchical_task.run(inside, outputs, finale, program, task, *rest)
            else:
                return other(program, task, *rest)
            return with_grace_period(carried, self._context.tools.timers)

        return carry

    def _find_communicator(
        self, engine: NcclContext, kept: tuple[Any, ...], ranks: Sequence[DeviceRank]
    ) -> LocalCommunicator | None:
        made = engine.communicators.get(kept)
        if made is None:
            return None
        return LocalCommunicator(engine, self._context.topology, ranks, made, self._end_communicators)

    def _make_task_factory(
        self,
        instance: Instance,
        program: CompiledCollective,
        sources: Sequence[Any],
        memory: NDArray[np.uint8] | None,
        marks: list[Mark] | None = None,
        carry: Callable[..., Iterator[Wait]] = tasks.run,
    ) -> TaskFactory:
        context, number, chain = self._context, self._generation, self._next_chain(instance)

        def start(task: PackTask, links: dict[int, Link]) -> Iterator[Wait]:
            stamp = frames.FrameTemplate(
                key=context.topology.group.key,
                generation=number,
                instance=instance.number,
                pack=task.pack_number,
                shard=task.shard,
                plan=task.plan_hash,
                chain=chain,
            )
            return carry(program, task, sources, memory, context.tools, links, stamp, self._on_unexpected_frame, marks)

        return start

    def _next_chain(self, instance: Instance) -> bytes:
        """The chain with this instance."""
        if len(self._context.topology.peers) == 1:
            return self.chain
        return frames.next_chain(self.chain, instance.contract)
