"""A task on arrays that a rank lends: the rank's carrier carries the plan, over the links of this worker.

The frames are those of `schedule.py`: the other workers see no difference. Each of them decides for itself whether it
carries its part or its rank does. While the task runs nothing here reads or writes its links.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NoReturn

from collectived_native import core
from collectived_proto.ipc import carrier_orders as orders
from collectived_proto.ipc.carrier_orders import Answer, AnswerKind, MoveOrder, RunOrder
from collectived_runtime.engine.clients.rank_carrier import Order, RankCarrier
from collectived_runtime.engine.compile.program import CompiledCollective
from collectived_runtime.engine.run.links import LENT_CHANNEL
from collectived_runtime.engine.run.schedule import Wait
from collectived_runtime.engine.run.task import TaskContext, TaskTools
from collectived_runtime.plan.moves import Buffer, FinishMove, RecvMove, SendMove, Span
from collectived_runtime.plan.wide_moves import WideMove
from collectived_runtime.transport.frame import HEADER_BYTES, MAX_PAYLOAD
from collectived_runtime.transport.link import Link, LinkBroken, break_link

ASK_INTERVAL = 0.1  # seconds between two questions to a carrier whether it goes on
MOST_MISSED = 3  # intervals without an answer: a process with little processor time may miss one
REFUSAL_SECONDS = 2.0  # in which a rank whose carrier refuses an order says why

_OWN_ERRORS = errno.EMFILE, errno.ENOMEM  # of its process, which are no word of the peer

OnAnswering = Callable[[bool], None]  # called with whether the carrier still answers


def can_carry(program: CompiledCollective) -> bool:
    """Whether a carrier can carry a program: one array, whose elements are folded as they are."""
    if len(program.tasks) != 1 or len(program.collective.leaves) != 1 or program.header or program.nccl_task_count:
        return False
    task, arithmetic = program.tasks[0], program.arithmetic[0]
    if task.partition is not None or task.blocks is not None or task.is_hierarchical or task.channel != LENT_CHANNEL:
        return False
    if arithmetic is not None and not (arithmetic.needs_no_widening and arithmetic.can_finish_in_place):
        return False
    moves = [move for moves in task.plan for move in moves]
    known = all(isinstance(move, (SendMove, RecvMove, FinishMove)) for move in moves)
    return known and len(moves) < orders.MOST_MOVES and task.pack.count * task.dtype.itemsize <= MAX_PAYLOAD


class _Compiler:
    """Makes the order for a task.

    From an only peer the result is received where it belongs: the first header shows that it agrees. Among more
    workers others may differ, and `out` stays as it is where a call is refused. So it is written where all have
    contributed, or when all of it is there.

    Attributes:
        sent, received: bytes by place, headers included.
    """

    def __init__(self, context: TaskContext, instance: int, places: int) -> None:
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self._context = context
        self._instance = instance
        self._row = context.task.dtype.itemsize
        self._moves: list[MoveOrder] = []
        program = context.program
        keeps_own = bool(context.sources) and context.sources[0].keeps_own
        self._has_result = bool(program.receivers) and not keeps_own
        in_result = self._has_result and places == 2
        held = orders.RESULT if in_result else orders.SCRATCH
        if context.arithmetic is not None:
            self._memory = {Buffer.INPUT: orders.VALUE, Buffer.SCRATCH: held, Buffer.OUTPUT: orders.RESULT}
        else:
            self._memory = dict.fromkeys(Buffer, orders.VALUE if program.contributors else held)

    def compile(self) -> bytes:
        task, arithmetic = self._context.task, self._context.arithmetic
        for number, moves in enumerate(task.plan):
            for move in sorted(moves, key=lambda one: not isinstance(one, FinishMove)):  # which the others may send
                self._add(number, move)
        held = self._memory[Buffer.OUTPUT]
        if arithmetic is None and self._has_result and held != orders.RESULT:
            whole = len(task.plan), 0, 0, len(task.span), orders.encode_place(0)
            self._moves.append(MoveOrder(core.MOVE_COPY, orders.RESULT, held, False, *whole))
        scratch = task.pack.count * self._row if orders.SCRATCH in self._memory.values() else 0
        how = (0, 1) if arithmetic is None else (arithmetic.number, arithmetic.contributions)
        order = RunOrder(self._instance, int(task.pack.dtype), *how, scratch, self._row)
        return order.encode(self._moves)

    def _add(self, number: int, move: WideMove) -> None:
        memory = self._memory
        match move:
            case FinishMove(span, source):
                if self._context.arithmetic is not None:
                    how = core.MOVE_FINISH, memory[source], orders.NOT_FOLDED, False, number, 0
                    self._append(how, span, orders.encode_place(span.start))
            case SendMove(peer, span, source):
                self._count(self.sent, peer, span)
                how = core.MOVE_SEND, memory[source], orders.NOT_FOLDED, False, number, peer
                self._append(how, span, self._header(number, span))
            case RecvMove(peer, span, target, fold):
                self._count(self.received, peer, span)
                folded = (orders.NOT_FOLDED, False) if fold is None else (memory[fold.mine], fold.received_left)
                self._append(
                    (core.MOVE_RECEIVE, memory[target], *folded, number, peer), span, self._header(number, span)
                )

    def _append(self, how: tuple[int, int, int, bool, int, int], span: Span, header: bytes) -> None:
        self._moves.append(MoveOrder(*how, span.start, len(span), header))

    def _header(self, number: int, span: Span) -> bytes:
        return self._context.transport.frames.header(number, span.start * self._row, len(span) * self._row)

    def _count(self, counts: dict[int, int], peer: int, span: Span) -> None:
        counts[peer] = counts.get(peer, 0) + HEADER_BYTES + len(span) * self._row


class _Until:
    """A time, as a task waits for it."""

    def __init__(self, tools: TaskTools, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        tools.timers.wake_at(self._at)

    @property
    def done(self) -> bool:
        return time.monotonic() >= self._at


class _Never:
    done = False


def run(
    context: TaskContext, carrier: RankCarrier, instance: int, places: int, on_answering: OnAnswering
) -> Iterator[Wait]:
    """Have the carrier carry a task that it `can_carry`.

    Args:
        places: how many workers the group has.

    Raises:
        LinkBroken: a peer is gone.
    """
    links = context.transport.links
    made = _Compiler(context, instance, places)
    message = made.compile()
    for place, link in links.items():
        unread = link.take_unread()
        taken = min(len(unread), made.received.get(place, 0))
        link.resume(unread[taken:], 0)
        carrier.lend(place, link, unread[:taken])
        link.lend()
    awaited = [(links[place], select.POLLIN) for place in made.received]  # only to say so: they are not watched
    answer = yield from _await(carrier, carrier.begin(instance, message), context.tools, on_answering, awaited)
    is_done = answer.kind is AnswerKind.DONE
    for place, link in links.items():
        link.take_back(is_whole=is_done)
        link.bytes_sent += is_done * made.sent.get(place, 0)
        link.bytes_received += is_done * made.received.get(place, 0)
    if not is_done:
        yield from _end(context, carrier, answer)


def stage(carrier: RankCarrier, instance: int, tools: TaskTools, on_answering: OnAnswering) -> Iterator[Wait]:
    """Have the carrier copy the value to where this worker reads it."""
    order = carrier.begin(instance, orders.encode_stage(instance))
    answer = yield from _await(carrier, order, tools, on_answering)
    if answer.kind is not AnswerKind.STAGED:
        yield from _refuse(carrier, answer, tools)


def _await(
    carrier: RankCarrier,
    order: Order,
    tools: TaskTools,
    on_answering: OnAnswering,
    awaited: Sequence[tuple[Link, int]] = (),
) -> Generator[Wait, None, Answer]:
    """Wait for an answer. A process that is stopped does not go on, and is found out."""
    missed = 0
    while order.answer is None:
        later = _Until(tools, ASK_INTERVAL)
        yield [(order, 0), (later, 0), *awaited]
        if order.answer is None and later.done:
            carrier.ask()
            missed = 0 if carrier.is_answering else missed + 1
            on_answering(missed < MOST_MISSED)
    on_answering(True)
    return order.answer


def _end(context: TaskContext, carrier: RankCarrier, answer: Answer) -> Iterator[Wait]:
    """Raise the error that has come in place of the end, or wait for the verdict."""
    link = context.transport.links.get(answer.peer)
    if answer.kind is AnswerKind.BROKEN and link is not None and answer.error not in _OWN_ERRORS:
        if answer.error == errno.EPROTO:
            link.resume(answer.header, 0)
            context.transport.on_unexpected_frame(link, b"", answer.header)  # raises where it is nonsense
            yield from _wait_for_verdict()
        _raise_broken(link, answer.error)
    yield from _refuse(carrier, answer, context.tools)


def _raise_broken(link: Link, error: int) -> NoReturn:
    if not error:
        raise LinkBroken("the peer closed the connection", link.peer)
    broken = break_link(OSError(error, os.strerror(error)), os.strerror(error))
    broken.peer = link.peer
    raise broken


def _refuse(carrier: RankCarrier, answer: Answer, tools: TaskTools) -> Iterator[Wait]:
    """The rank has taken back its arrays, and says why in a moment."""
    later = _Until(tools, REFUSAL_SECONDS)
    while not later.done:
        yield [(later, 0)]
    carrier.give_up(f"refused an order: {errno.errorcode.get(answer.error, 'it has ended')}")
    yield from _wait_for_verdict()


def _wait_for_verdict() -> Iterator[Wait]:
    while True:
        yield [(_Never(), 0)]
