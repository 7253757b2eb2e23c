"""The stages of an instance, in this order, each of them a `Running`.

1. Where some rank takes what comes, the root's worker *announces* it.
2. Where lengths differ, the workers *exchange* them.
3. Where NCCL carries it out, the workers *agree* that all have come, and in which order it is launched. Where NCCL does
   so inside of a worker alone, that worker makes its communicator.
4. The *program* itself runs.

Which of them an instance needs, and what follows on each, is for the generation to say (`Generation._begin`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.device.gpus import Region
from collectived_runtime.device.nccl.communicators import Rank
from collectived_runtime.engine import device_strand, native, preliminary, two_levels
from collectived_runtime.engine import strand as strands
from collectived_runtime.engine.agreement import Talk, agree, meet, partners
from collectived_runtime.engine.announce import announce
from collectived_runtime.engine.carriers import NCCL
from collectived_runtime.engine.execute import Judge
from collectived_runtime.engine.ledger import Instance, Mark
from collectived_runtime.engine.meeting import Engine, LaunchOrder, Meeting, ranks_here, ranks_inside
from collectived_runtime.engine.native import patiently
from collectived_runtime.engine.program import Program, Strand
from collectived_runtime.engine.results import Slot
from collectived_runtime.engine.running import Running, Start
from collectived_runtime.engine.strand import Wait
from collectived_runtime.engine.stream_order import Finale
from collectived_runtime.engine.tickets import Key
from collectived_runtime.engine.workshop import Workshop
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link


class Stages:
    """Of one generation.

    Args:
        disputed: disputes an instance whose announcement is not what was agreed here.
        judge: as of `execute`.

    Attributes:
        chain: of all contracts that have been carried out. Ranks of one worker have compared their contracts: it is
            for peers, and stays as it is where there are none.
    """

    def __init__(self, shop: Workshop, number: int, disputed: Callable[[Instance], None], judge: Judge) -> None:
        self.chain = bytes(8)
        self._shop = shop
        self._number = number
        self._disputed = disputed
        self._judge = judge
        self._ranks = ranks_here(shop.topology)  # of a communicator of all GPUs of the group,
        self._inside = ranks_inside(shop.topology)  # and of one of this worker's alone
        self._order: LaunchOrder | None = None  # of the instance that NCCL carries out
        self._kept = (shop.topology.group.key, number)  # by which the communicators are kept,
        self._kept_inside = (*self._kept, "inside")  # and those of this worker alone

    def announcement(self, instance: Instance, root: int, then: Callable[[], None]) -> Running:
        """What the root is about to send, told to all; then `instance` is described as the root describes it."""
        collective, topology = instance.collective, self._shop.topology
        strand = preliminary.announcement(topology, root)
        known = not collective.open
        word = preliminary.word(collective) if root in topology.ranks else None
        frame = frames.Frame(
            kind=frames.FrameKind.WORD,
            pack=0,
            shard=0,
            round=0,
            key=topology.group.key,
            generation=self._number,
            instance=instance.number,
            plan=strand.plan_hash,
            chain=self._next(instance) if known else bytes(8),
            offset=0,
            length=0,
        )

        def heard(word: bytes, chain: bytes) -> None:
            told, contract = preliminary.told(word)
            model = instance.model
            agrees = model is None or preliminary.agrees(model, told, contract)
            instance.described(told, contract)
            if not agrees or chain != self._next(instance):  # or we have agreed on other things before
                self._disputed(instance)

        def start(_: Strand, links: dict[int, Link]) -> Iterator[Wait]:
            return announce(strand.plan, links, frame, word, known, heard, self._judge)

        def announced() -> None:
            instance.announced = True
            if not instance.disputed:
                then()

        return Running(instance, preliminary.alone(strand), None, start, announced)

    def exchange(self, instance: Instance, own: Mapping[int, tuple[int, ...]], then: Callable[[], None]) -> Running:
        """The rows of all ranks, of which the local ones are `own`; then they are the instance's."""
        topology = self._shop.topology
        columns = preliminary.rows_per_rank(instance.collective, topology.group)
        program = self._shop.programs.get(columns)
        if program is None:
            program = preliminary.lengths(instance.collective, topology)
            self._shop.keep(columns, program)
        mine = np.zeros((topology.group.size, columns), np.int64)
        for rank, rows in own.items():
            mine[rank] = rows
        all_rows = np.empty_like(mine)

        def exchanged() -> None:
            instance.rows = tuple(map(tuple, all_rows.tolist()))
            then()

        start = self._starter(instance, program, [preliminary.Table(mine)], all_rows.reshape(-1).view(np.uint8))
        return Running(instance, program, None, start, exchanged)

    def program(
        self,
        instance: Instance,
        program: Program,
        slot: Slot | None,
        sources: Sequence[Any],
        memory: Any,
        readers: tuple[int, ...],
        outputs: Sequence[Region] | None = None,
    ) -> Running:
        """What the instance is about; from here on its contract is part of the chain.

        Args:
            sources: what the contributing local ranks submitted. memory: of the result, behind the slot's head.
            readers: the ranks that read it there. outputs: where the result is to be written as well; None: all of it
                is about memory of the host.
        """
        finale = self._finale(instance, program) if outputs else None
        carry = self._carrier(outputs, finale)
        start = self._starter(instance, program, sources, memory, instance.marks, carry)
        self.chain = self._next(instance)
        return Running(instance, program, slot, start, readers=readers, finale=finale)

    def _finale(self, instance: Instance, program: Program) -> Finale | None:
        """Where some ranks go on in stream order."""
        asked = {rank: instance.arrivals[rank].sources for rank in program.receivers}
        outputs = {rank: one.output for rank, one in asked.items() if one.ordered and one.output is not None}
        return self._shop.order.finale(instance.number, outputs, len(program.strands)) if outputs else None

    def preceded(self, program: Program) -> bool:
        """Whether an `agreement` comes before it here."""
        return bool(program.native) or (program.inside and len(self._ranks) > 1)

    def agreement(self, instance: Instance, program: Program, then: Callable[[], None]) -> Running:
        """Before what NCCL carries out: all have come with the same contract, and it is its turn on this worker.

        Where NCCL works inside of this worker alone, there are its communicators; no other worker is asked.
        """
        topology = self._shop.topology
        asked = partners(len(topology.peers), topology.place) if program.native else frozenset()
        strand = replace(preliminary.announcement(topology, 0), peers=asked)

        def start(_: Strand, links: dict[int, Link]) -> Iterator[Wait]:
            return patiently(self._agree(instance, program, links), self._shop.tools.alarms)

        def agreed() -> None:
            instance.agreed = True
            then()

        return Running(instance, preliminary.alone(strand), None, start, agreed)

    def _agree(self, instance: Instance, program: Program, links: dict[int, Link]) -> Iterator[Wait]:
        shop, topology, engine = self._shop, self._shop.topology, self._shop.around.native
        assert engine is not None, "a worker that has told nobody of NCCL is asked for it"
        group = topology.group.key
        stamp = frames.Stamp(group, self._number, instance.number, 0, 0, bytes(8), self._next(instance))
        talk = Talk(len(topology.peers), topology.place, links, stamp, self._judge, shop.tools.wake)
        key = Key(group, self._number, instance.number)
        inside = self._inside
        if program.inside and len(inside) > 1 and engine.communicators.get(self._kept_inside) is None:
            alone = replace(talk, places=1, place=0, links={})
            made = yield from meet(alone, key, engine.turnstile, engine.communicators, len(inside), inside)
            engine.communicators.keep(self._kept_inside, made)
        if not program.native:
            return
        if engine.communicators.get(self._kept) is None:
            size, ranks = len(topology.gpus), self._ranks
            made = yield from meet(talk, key, engine.turnstile, engine.communicators, size, ranks)
            engine.communicators.keep(self._kept, made)
        self.release()  # whatever became of the one before: a ticket that is kept holds up all that come later
        order = self._order = LaunchOrder(key._replace(step=1), program.native, engine.turnstile, shop.tools.wake)
        yield from agree(talk, order.key, engine.turnstile)

    def release(self) -> None:
        """What has not been launched of an instance never will be: nobody waits for its turn any more."""
        if self._order is not None:
            self._order.close()
            self._order = None

    def close(self) -> None:
        """The generation is over: its communicators are ended."""
        self.release()
        self._end_communicators(orderly=True)

    def _end_communicators(self, *, orderly: bool = False) -> None:
        engine = self._shop.around.native
        if engine is not None:
            for kept in (self._kept, self._kept_inside):
                engine.communicators.end(kept, orderly=orderly)

    def _carrier(self, outputs: Sequence[Region] | None, finale: Finale | None) -> Callable[..., Iterator[Wait]]:
        """What carries the strands of a program out, one by one."""
        engine, order = self._shop.around.native, self._order
        other = strands.run if outputs is None else partial(device_strand.run, outputs, finale)
        if engine is None:
            return other
        whole = self._meeting(engine, self._kept, self._ranks)
        inside = self._meeting(engine, self._kept_inside, self._inside)

        def carry(program: Program, strand: Strand, *rest: Any) -> Iterator[Wait]:
            if strand.algorithm == NCCL:
                assert whole is not None and order is not None, "they are made before it is agreed on"
                carried = native.run(whole, order, outputs or (), finale, program, strand, *rest)
            elif strand.inside and inside is not None and outputs is not None:
                carried = two_levels.run(inside, outputs, finale, program, strand, *rest)
            else:
                return other(program, strand, *rest)
            return patiently(carried, self._shop.tools.alarms)

        return carry

    def _meeting(self, engine: Engine, kept: tuple[Any, ...], ranks: Sequence[Rank]) -> Meeting | None:
        made = engine.communicators.get(kept)
        if made is None:
            return None
        return Meeting(engine, self._shop.topology, ranks, made, self._end_communicators)

    def _starter(
        self,
        instance: Instance,
        program: Program,
        sources: Sequence[Any],
        memory: NDArray[np.uint8] | None,
        marks: list[Mark] | None = None,
        carry: Callable[..., Iterator[Wait]] = strands.run,
    ) -> Start:
        shop, number, chain = self._shop, self._number, self._next(instance)

        def start(strand: Strand, links: dict[int, Link]) -> Iterator[Wait]:
            stamp = frames.Stamp(
                key=shop.topology.group.key,
                generation=number,
                instance=instance.number,
                pack=strand.pack_number,
                shard=strand.shard,
                plan=strand.plan_hash,
                chain=chain,
            )
            return carry(program, strand, sources, memory, shop.tools, links, stamp, self._judge, marks)

        return start

    def _next(self, instance: Instance) -> bytes:
        """The chain with this instance."""
        if len(self._shop.topology.peers) == 1:
            return self.chain
        return frames.next_chain(self.chain, instance.contract)
