"""Routes: how the instances of one contract go to other workers and back, with all that can be known beforehand.

The native core carries them (`core.Crossings`). Moves become places in memory and headers of frames, in which only
instance and chain are missing.
"""

from __future__ import annotations

from collectived_native import core
from collectived_runtime.engine.compile.program import CompiledCollective
from collectived_runtime.plan.moves import Buffer, FinishMove, FoldMove, RecvMove, SendMove, Span
from collectived_runtime.plan.wide_moves import CollectMove, WideMove
from collectived_runtime.transport.frame import FrameTemplate

MAX_ROUTE_BYTES = 64 << 10  # of partial sums: what is larger spends its time elsewhere
CHANNEL = 0
_NO_HEADER = bytes(len(FrameTemplate(0, 0, 0, 0, 0, bytes(8), bytes(8)).header(0, 0, 0)))
_MEMORY = {Buffer.INPUT: 0, Buffer.SCRATCH: 1, Buffer.OUTPUT: 2}


def has_route(program: CompiledCollective, places: int) -> bool:
    """Whether the native core can carry a program: one small pack that is folded, over one link to each peer."""
    task, arithmetic = program.tasks[0], program.arithmetic[0]
    if len(program.tasks) > 1 or len(program.layout.packs) > 1 or arithmetic is None or places > core.MOST_WIRES:
        return False
    is_plain = (
        task.partition is None and task.blocks is None and task.channel == CHANNEL and not program.nccl_task_count
    )
    is_small = 0 < task.pack.count * arithmetic.partial_bytes <= MAX_ROUTE_BYTES
    known = (SendMove, RecvMove, CollectMove, FinishMove)
    return is_plain and is_small and all(isinstance(move, known) for moves in task.plan for move in moves)


def make_template(key: int, generation: int, program: CompiledCollective) -> FrameTemplate:
    """What the headers of a program's frames have in common, without instance and chain."""
    task = program.tasks[0]
    return FrameTemplate(key, generation, 0, task.pack_number, task.shard, task.plan_hash, bytes(8))


def compile_moves(program: CompiledCollective, template: FrameTemplate) -> tuple[core.RouteMove, ...]:
    """The moves of a program that `has_route`, as `core.Crossings.add` takes them."""
    task, arithmetic = program.tasks[0], program.arithmetic[0]
    assert arithmetic is not None
    rows = {
        Buffer.INPUT: arithmetic.partial_bytes,
        Buffer.SCRATCH: arithmetic.partial_bytes,
        Buffer.OUTPUT: task.pack.result_dtype.itemsize,
    }
    found: list[core.RouteMove] = []

    def add(
        kind: int,
        number: int,
        span: Span,
        buffer: Buffer,
        peer: int = -1,
        fold: FoldMove | None = None,
        parts: tuple[int, ...] = (),
    ) -> int:
        row, travels = rows[buffer], peer >= 0
        header = template.header(number, span.start * row, len(span) * row) if travels else _NO_HEADER
        mine, left = (-1, False) if fold is None else (_MEMORY[fold.mine], fold.received_left)
        found.append((kind, number, max(0, peer), _MEMORY[buffer], mine, left, span.start, len(span), header, parts))
        return len(found) - 1

    def add_move(number: int, move: WideMove) -> None:
        match move:
            case FinishMove(span, source):
                add(core.MOVE_FINISH, number, span, source)
            case SendMove(peer, span, source):
                add(core.MOVE_SEND, number, span, source, peer)
            case RecvMove(peer, span, target, fold):
                add(core.MOVE_RECEIVE, number, span, target, peer, fold)
            case CollectMove(order, span, mine):
                peers = task.peers
                parts = tuple(
                    add(core.MOVE_KEEP, number, span, Buffer.SCRATCH, place) if place in peers else -1
                    for place in order
                )
                add(core.MOVE_FOLD, number, span, Buffer.SCRATCH, fold=FoldMove(mine, False), parts=parts)

    for number, moves in enumerate(task.plan):
        for move in sorted(moves, key=lambda one: not isinstance(one, FinishMove)):  # which the others may send
            add_move(number, move)
    return tuple(found)
