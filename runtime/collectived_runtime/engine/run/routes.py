"""Routes: how the instances of one contract go to other workers and back, with all that can be known beforehand.

The native core carries them (`core.Crossings`). Moves become places in memory and headers of frames, in which only
instance and chain are missing. What workers tell each other before the values is the same each time: of a broadcast the
announcement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from collectived_native import core
from collectived_runtime.engine.compile.program import CompiledCollective, PackTask
from collectived_runtime.plan.moves import Buffer, FinishMove, FoldMove, RecvMove, SendMove, Span
from collectived_runtime.plan.wide_moves import CollectMove, WideMove
from collectived_runtime.transport.frame import Frame, FrameKind, FrameTemplate

MAX_ROUTE_BYTES = 64 << 10  # of partial sums: what is larger spends its time elsewhere
CHANNEL = 0
_NO_HEADER = bytes(len(FrameTemplate(0, 0, 0, 0, 0, bytes(8), bytes(8)).header(0, 0, 0)))
_MEMORY = {Buffer.INPUT: 0, Buffer.SCRATCH: 1, Buffer.OUTPUT: 2}
_CONSTANTS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Prelude:
    """What is sent and received before a program: by round the places of peers, whether it is sent, and the frame."""

    rounds: tuple[tuple[tuple[int, bool, bytes, bytes], ...], ...] = ()


def has_route(program: CompiledCollective, places: int) -> bool:
    """Whether the native core can carry a program: one small pack, over one link to each peer."""
    task = program.tasks[0]
    if len(program.tasks) > 1 or len(program.layout.packs) > 1 or places > core.MOST_WIRES:
        return False
    is_plain = (
        task.partition is None and task.blocks is None and task.channel == CHANNEL and not program.nccl_task_count
    )
    is_small = 0 < task.pack.count * max(_find_rows(program).values()) <= MAX_ROUTE_BYTES
    known = (SendMove, RecvMove, CollectMove, FinishMove)
    return is_plain and is_small and all(isinstance(move, known) for moves in task.plan for move in moves)


def make_template(key: int, generation: int, program: CompiledCollective) -> FrameTemplate:
    """What the headers of a program's frames have in common, without instance and chain."""
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


@dataclass(frozen=True, slots=True, eq=False)
class CompiledRoute:
    """What `core.Crossings.add` takes, behind the contract; the moves by which values travel, and round before them."""

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
        at, number = span.start, number + self._first_round
        terms = kind, number, max(0, peer), _MEMORY[buffer], mine, left, at, len(span), header, parts
        self._moves.append(terms)
        return len(self._moves) - 1

    def _copy(self, number: int, span: Span, source: Buffer) -> None:
        number += self._first_round
        to, source_memory, at = _MEMORY[Buffer.OUTPUT], _MEMORY[source], span.start
        self._moves.append((core.MOVE_COPY, number, 0, to, source_memory, at, at, len(span), _NO_HEADER, ()))

    def _add_move(self, number: int, move: WideMove) -> None:
        match move:
            case FinishMove(span, source):
                if self._program.arithmetic[0] is None:
                    self._copy(number, span, source)
                else:
                    self.add(core.MOVE_FINISH, number, span, source)
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

    def compile(self) -> CompiledRoute:
        task, arithmetic = self._program.tasks[0], self._program.arithmetic[0]
        for number, moves in enumerate(task.plan):
            for move in sorted(moves, key=lambda one: not isinstance(one, FinishMove)):  # which the others may send
                self._add_move(number, move)
        count = task.pack.count
        how = (0, 1) if arithmetic is None else (arithmetic.number, arithmetic.contributions)
        given = count if arithmetic is not None or self._program.contributors else 0
        terms = int(task.pack.dtype), *how, given, count, count, _MEMORY[Buffer.OUTPUT]
        return CompiledRoute(terms, tuple(self._moves), bytes(self._constants), self._first_round)


def compile_route(program: CompiledCollective, template: FrameTemplate, prelude: Prelude) -> CompiledRoute:
    """Compile the route of a program that `has_route`."""
    return _Compiler(program, template, prelude).compile()
