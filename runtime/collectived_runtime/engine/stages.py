"""The stages of an instance, in this order, each of them a `Running`.

1. Where some rank takes what comes, the root's worker *announces* it.
2. Where lengths differ, the workers *exchange* them.
3. The *program* itself runs.

Which of them an instance needs, and what follows on each, is for the generation to say (`Generation._begin`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.device.gpus import Region
from collectived_runtime.engine import device_strand, preliminary
from collectived_runtime.engine import strand as strands
from collectived_runtime.engine.announce import announce
from collectived_runtime.engine.execute import Judge
from collectived_runtime.engine.ledger import Instance, Mark
from collectived_runtime.engine.program import Program, Strand
from collectived_runtime.engine.results import Slot
from collectived_runtime.engine.running import Running, Start
from collectived_runtime.engine.strand import Wait
from collectived_runtime.engine.workshop import Workshop
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link


class Stages:
    """Of one generation.

    Args:
        disputed: told of an instance whose announcement is not what was agreed here.
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
                instance.disputed = True
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
        carry = strands.run if outputs is None else partial(device_strand.run, outputs)
        start = self._starter(instance, program, sources, memory, instance.marks, carry)
        self.chain = self._next(instance)
        return Running(instance, program, slot, start, readers=readers)

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
