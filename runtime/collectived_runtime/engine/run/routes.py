"""Routes: how the instances of one contract go to other workers and back, with all that can be known beforehand.

The native core carries them (`core.Crossings`). Moves become places in memory and headers of frames, in which only
instance and chain are missing. The exchange of workers before the values is the same each time: of a broadcast or
scatter the announcement, of a gather the lengths, which are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from collectived_native import core
from collectived_proto.across import Share
from collectived_proto.rows import extract_rows
from collectived_proto.types import Collective
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile import negotiation
from collectived_runtime.engine.compile.partition import Partition
from collectived_runtime.engine.compile.program import CompiledCollective, PackTask
from collectived_runtime.plan.moves import Buffer, FinishMove, FoldMove, RecvMove, SendMove, Span
from collectived_runtime.plan.wide_moves import CollectMove, WideMove
from collectived_runtime.transport.frame import Frame, FrameKind, FrameTemplate

MAX_ROUTE_BYTES = 16 << 20  # of values or results that a worker holds, and of what it receives, in one instance
CHANNEL = 0
_NO_HEADER = bytes(len(FrameTemplate(0, 0, 0, 0, 0, bytes(8), bytes(8)).header(0, 0, 0)))
_MEMORY = {Buffer.INPUT: 0, Buffer.SCRATCH: 1, Buffer.OUTPUT: 2}
_CONSTANTS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Prelude:
    """The exchange before a program: by round the places of peers, whether it is sent, and the frame."""

    rounds: tuple[tuple[tuple[int, bool, bytes, bytes], ...], ...] = ()


def has_route(program: CompiledCollective, places: int) -> bool:
    """Whether the native core can carry a program: one small pack, over one link to each peer."""
    task = program.tasks[0]
    if len(program.tasks) > 1 or len(program.layout.packs) > 1 or places > core.MOST_WIRES:
        return False
    is_plain = task.blocks is None and task.channel == CHANNEL and not program.nccl_task_count
    if task.partition is not None and program.arithmetic[0] is not None and not task.partition.is_in_order:
        return False
    most = max(_count_held(task), _count_received(task)) * max(_find_rows(program).values())
    is_small = 0 < most <= MAX_ROUTE_BYTES
    known = (SendMove, RecvMove, CollectMove, FinishMove)
    return is_plain and is_small and all(isinstance(move, known) for moves in task.plan for move in moves)


def measure_route(program: CompiledCollective) -> int:
    """The most bytes that the core takes for a route: three buffers, and what two instances receive."""
    task = program.tasks[0]
    row = max(_find_rows(program).values())
    return (3 * _count_held(task) + 2 * _count_received(task)) * row


def _count_held(task: PackTask) -> int:
    """The most elements of a pack that a worker has before it sends, or when all have come."""
    cut = task.partition
    if cut is None:
        return task.pack.count
    return max(cut.output_count, sum(part.stop - part.start for part in (*cut.local_copies, *cut.outgoing)))


def _count_received(task: PackTask) -> int:
    """Elements that come from all peers."""
    moves = [move for moves in task.plan for move in moves]
    kept = sum(len(move.span) * (len(move.order) - 1) for move in moves if isinstance(move, CollectMove))
    return kept + sum(len(move.span) for move in moves if isinstance(move, RecvMove))


def make_template(key: int, generation: int, program: CompiledCollective) -> FrameTemplate:
    """The common part of the headers of a program's frames, without instance and chain."""
    task = program.tasks[0]
    return FrameTemplate(key, generation, 0, task.pack_number, task.shard, task.plan_hash, bytes(8))


def _find_rows(program: CompiledCollective) -> dict[Buffer, int]:
    """Bytes of an element in each buffer."""
    task, arithmetic = program.tasks[0], program.arithmetic[0]
    given = task.pack.dtype.itemsize if arithmetic is None else arithmetic.partial_bytes
    return {Buffer.INPUT: given, Buffer.SCRATCH: given, Buffer.OUTPUT: task.pack.result_dtype.itemsize}


def announce(template: FrameTemplate, task: PackTask, word: bytes) -> Prelude:
    """An announcement: `word` goes along the plan of `task`."""
    frame = Frame(FrameKind.ANNOUNCEMENT, 0, 0, 0, template.key, template.generation, 0, task.plan_hash, bytes(8), 0, 0)
    header = replace(frame, length=len(word)).encode()
    rounds = [
        tuple(
            (move.peer, isinstance(move, SendMove), header, word)
            for move in moves
            if isinstance(move, (SendMove, RecvMove))
        )
        for moves in task.plan
    ]
    return Prelude(tuple(rounds))


def exchange(template: FrameTemplate, collective: Collective, topology: GroupTopology) -> Prelude:
    """The exchange of lengths, where those of all ranks are equal: what travels follows from all plans."""
    places = range(len(topology.peers))
    programs = [negotiation.compile_length_exchange(collective, replace(topology, place=place)) for place in places]
    tasks = [program.tasks[0] for program in programs]
    rows = np.array(extract_rows(collective), np.int64)
    values: list[dict[Buffer, NDArray[np.int64]]] = []
    for peer in topology.peers:
        table = np.zeros((topology.group.size, len(rows)), np.int64)
        table[list(peer.ranks)] = rows
        values.append({buffer: table.reshape(-1).copy() for buffer in Buffer})
    own, task = topology.place, tasks[topology.place]
    shared = replace(template, pack=task.pack_number, shard=task.shard, plan=task.plan_hash)
    rounds = []
    for number in range(max(len(one.plan) for one in tasks)):
        rounds.append(
            tuple(
                (peer, is_sent, shared.header(number, span.start * 8, len(span) * 8), word)
                for peer, is_sent, span, word in _carry_round(tasks, values, number, own)
            )
        )
    return Prelude(tuple(rounds))


Transfer = tuple[int, bool, Span, bytes]


def _carry_round(
    tasks: Sequence[PackTask], values: Sequence[dict[Buffer, NDArray[np.int64]]], number: int, own: int
) -> list[Transfer]:
    """Carry a round of a sum out at all places. Return the transfers of `own` in it."""
    plans = [task.plan[number] if number < len(task.plan) else () for task in tasks]
    sent: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
    found: list[Transfer] = []
    for place, moves in enumerate(plans):
        for move in moves:
            if isinstance(move, FinishMove):
                part = slice(move.span.start, move.span.stop)
                values[place][Buffer.OUTPUT][part] = values[place][move.source][part]
    for place, moves in enumerate(plans):
        for move in moves:
            if isinstance(move, SendMove):
                content = values[place][move.source][move.span.start : move.span.stop].copy()
                sent.setdefault((place, move.peer), []).append(content)
                if place == own:
                    found.append((move.peer, True, move.span, content.tobytes()))
    for place, moves in enumerate(plans):
        for move in moves:
            if not isinstance(move, (RecvMove, CollectMove)):
                continue
            part, sources = (
                slice(move.span.start, move.span.stop),
                [move.peer] if isinstance(move, RecvMove) else move.order,
            )
            arrived = [(one, sent[one, place].pop(0)) for one in sources if one != place]
            if place == own:
                found += [(one, False, move.span, content.tobytes()) for one, content in arrived]
            total = sum((content for _, content in arrived), np.zeros(len(move.span), np.int64))
            if isinstance(move, CollectMove):
                values[place][Buffer.SCRATCH][part] = total + values[place][move.mine][part]
            else:
                mine = 0 if move.fold is None else values[place][move.fold.mine][part]
                values[place][move.target][part] = total + mine
    return found


@dataclass(frozen=True, slots=True, eq=False)
class CompiledRoute:
    """The arguments of `core.Crossings.add` after the contract, the moves of values, and the rounds before."""

    terms: tuple[int, int, int, int, int, int, int]
    moves: tuple[core.RouteMove, ...]
    constants: bytes
    first_round: int


class _Compiler:
    def __init__(self, program: CompiledCollective, template: FrameTemplate, prelude: Prelude) -> None:
        self._program = program
        self._template = template
        self._rows = _find_rows(program)
        self._moves: list[core.RouteMove] = []
        self._constants = bytearray()
        self._first_round = len(prelude.rounds)
        for number, frames in enumerate(prelude.rounds):
            for peer, is_sent, header, word in frames:
                kind = core.MOVE_SEND if is_sent else core.MOVE_RECEIVE
                terms = kind, number, peer, _CONSTANTS, -1, 0, len(self._constants), len(word), header, ()
                self._moves.append(terms)
                self._constants += word

    def add(
        self,
        kind: int,
        number: int,
        span: Span,
        buffer: Buffer,
        peer: int = -1,
        fold: FoldMove | None = None,
        parts: tuple[int, ...] = (),
    ) -> int:
        row, travels = self._rows[buffer], peer >= 0
        header = self._template.header(number, span.start * row, len(span) * row) if travels else _NO_HEADER
        mine, left = (-1, 0) if fold is None else (_MEMORY[fold.mine], int(fold.received_left))
        memory, at = self._find_place(buffer, span.start)
        terms = kind, number + self._first_round, max(0, peer), memory, mine, left, at, len(span), header, parts
        self._moves.append(terms)
        return len(self._moves) - 1

    def _find_place(self, buffer: Buffer, at: int) -> tuple[int, int]:
        """The memory of a buffer, and where in it a position of the plan lies.

        Values that are cut are sent from scratch.
        """
        cut = self._program.tasks[0].partition
        if cut is not None and buffer is Buffer.OUTPUT:
            return _MEMORY[buffer], cut.receive_window.translate(at)
        if cut is None or self._program.arithmetic[0] is not None:
            return _MEMORY[buffer], at
        return _MEMORY[Buffer.SCRATCH], cut.send_window.translate(at)

    def _copy(self, number: int, to: Buffer, at: int, source: Buffer, begin: int, count: int) -> None:
        number += self._first_round
        memories = _MEMORY[to], _MEMORY[source]
        self._moves.append((core.MOVE_COPY, number, 0, *memories, begin, at, count, _NO_HEADER, ()))

    def _finish(self, number: int, span: Span, source: Buffer) -> None:
        _, to = self._find_place(Buffer.OUTPUT, span.start)
        memory, at = self._find_place(source, span.start)
        number += self._first_round
        self._moves.append((core.MOVE_FINISH, number, 0, memory, -1, to, at, len(span), _NO_HEADER, ()))

    def _add_move(self, number: int, move: WideMove) -> None:
        match move:
            case FinishMove(span, source):
                if self._program.arithmetic[0] is not None:
                    self._finish(number, span, source)
                elif self._program.tasks[0].partition is None:  # else what stays here has been copied
                    self._copy(number, Buffer.OUTPUT, span.start, source, span.start, len(span))
            case SendMove(peer, span, source):
                self.add(core.MOVE_SEND, number, span, source, peer)
            case RecvMove(peer, span, target, fold):
                self.add(core.MOVE_RECEIVE, number, span, target, peer, fold)
            case CollectMove(order, span, mine):
                peers = self._program.tasks[0].peers
                parts = tuple(
                    self.add(core.MOVE_KEEP, number, span, Buffer.SCRATCH, place) if place in peers else -1
                    for place in order
                )
                self.add(core.MOVE_FOLD, number, span, Buffer.SCRATCH, fold=FoldMove(mine, False), parts=parts)

    def compile(self, share: Share | None) -> CompiledRoute:
        task, arithmetic = self._program.tasks[0], self._program.arithmetic[0]
        count = task.pack.count
        rooms, brought, cut = [count] * 3, Buffer.OUTPUT, task.partition
        if cut is not None:
            rooms[2] = cut.output_count
        if share is not None and arithmetic is None:
            rooms[0] = sum(share.given)
            if cut is not None:
                rooms[1] = self._begin_cut(cut, share)
        for number, moves in enumerate(task.plan):
            for move in sorted(moves, key=lambda one: not isinstance(one, FinishMove)):  # which the others may send
                self._add_move(number, move)
        if cut is not None and share is not None:
            runs = cut.list_runs(share.ranks)
            if len(runs) > 1:  # in the order in which ranks have them
                brought, at = Buffer.SCRATCH, 0
                for start, stop in runs:
                    self._copy(len(task.plan), brought, at, Buffer.OUTPUT, start, stop - start)
                    at += stop - start
                rooms[1] = max(rooms[1], at)
        how = (0, 1) if arithmetic is None else (arithmetic.number, arithmetic.contributions)
        terms = int(task.pack.dtype), *how, rooms[0], rooms[1], rooms[2], _MEMORY[brought]
        return CompiledRoute(terms, tuple(self._moves), bytes(self._constants), self._first_round)

    def _begin_cut(self, cut: Partition, share: Share) -> int:
        """Copy what stays here, and what is sent; elements of the latter."""
        contributors = self._program.contributors
        given = [count for count in share.given if count] or [0] * len(contributors)
        begins = dict(zip(contributors, accumulate(given, initial=0), strict=False))
        end = 0
        for part in cut.local_copies:
            start, count = begins[part.rank] + part.start, part.stop - part.start
            self._copy(0, Buffer.OUTPUT, part.target, Buffer.INPUT, start, count)
        for part in cut.outgoing:
            start, count, at = (
                begins[part.rank] + part.start,
                part.stop - part.start,
                cut.send_window.translate(part.target),
            )
            self._copy(0, Buffer.SCRATCH, at, Buffer.INPUT, start, count)
            end = max(end, at + count)
        return end


def compile_route(
    program: CompiledCollective, template: FrameTemplate, prelude: Prelude, share: Share | None
) -> CompiledRoute:
    """Compile the route of a program that `has_route`.

    Args:
        share: of its pack, if it has one.
    """
    return _Compiler(program, template, prelude).compile(share)
