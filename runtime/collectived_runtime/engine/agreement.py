"""What workers agree on over their links before NCCL carries out a collective: that all have come, and in which order.

NCCL compares nothing: ranks that differ hang, or fold what does not belong together. So before anything is launched the
workers of a group exchange two numbers. The frames of the first one carry the chain of contracts, as all frames do, so
that whoever differs is found out; when it has arrived all have come. The second one is the ticket (`tickets.py`).

Generators like `execute`; `over` is to be told to the turnstile whatever becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.attendant import Errand
from collectived_runtime.device.nccl.communicators import Communicator, Communicators, Making, Rank
from collectived_runtime.device.nccl.interface import UNIQUE_ID_BYTES
from collectived_runtime.engine.execute import Buffers, Judge, execute
from collectived_runtime.engine.program import digest, peers_of
from collectived_runtime.engine.strand import Wait, copy_over, never, stays
from collectived_runtime.engine.tickets import Key, Turnstile
from collectived_runtime.plan import one_shot, tree
from collectived_runtime.plan.collect import WidePlan
from collectived_runtime.plan.moves import Span
from collectived_runtime.transport.frame import Stamp
from collectived_runtime.transport.link import Link

FEW = 4  # places that tell each other directly
_HIGHEST = Arithmetic(ReduceOp.MAX, DType.INT64, DType.INT64, 1)


@dataclass(frozen=True, slots=True)
class Talk:
    """How the workers of a group talk before an instance.

    Attributes:
        places, place: how many workers there are, and which of them this one is.
        links: by place, at least those of `partners(places, place)`.
        stamp: of the instance; its plan is replaced by what is talked about.
        wake: wakes the lane, from any thread.
    """

    places: int
    place: int
    links: Mapping[int, Link]
    stamp: Stamp
    judge: Judge
    wake: Callable[[], object]

    def highest(self, subject: str, number: int) -> Generator[Wait, None, int]:
        """The highest number of all workers, when all of them have told theirs."""
        mine, scratch, out = np.array([number], np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
        buffers = Buffers(mine, scratch, out, _HIGHEST.fold, _HIGHEST.finish, _HIGHEST.finish_here)
        yield from self._execute(subject, _told(self.places, self.place), buffers)
        return int(out[0])

    def passed_on(self, subject: str, word: NDArray[np.uint8]) -> Generator[Wait, None, bytes]:
        """What the first worker says, `word` there and as long elsewhere."""
        buffers = Buffers(word, word, word, never, copy_over, stays)
        yield from self._execute(subject, _handed(self.places, self.place, len(word)), buffers)
        return word.tobytes()

    def _execute(self, subject: str, plan: WidePlan, buffers: Buffers) -> Generator[Wait, None, None]:
        stamp = replace(self.stamp, plan=digest(f"{subject}|{self.places}"))
        yield from execute(plan, buffers, self.links, stamp, self.judge)


def partners(places: int, place: int) -> frozenset[int]:
    """Whom a worker talks to."""
    if places <= FEW:
        return frozenset(range(places)) - {place}
    return peers_of(_told(places, place)) | peers_of(_handed(places, place, 1))


def _told(places: int, place: int) -> WidePlan:
    flat: Callable[[Sequence[int], int, Span], Any] = one_shot.all_reduce if places <= FEW else tree.all_reduce
    return tuple(flat(range(places), place, Span(0, 1)))


def _handed(places: int, place: int, length: int) -> WidePlan:
    return tree.broadcast(range(places), place, Span(0, length), 0)


def agree(talk: Talk, key: Key, turnstile: Turnstile) -> Generator[Wait, None, None]:
    """Ends when all have come and it is this collective's turn on this worker."""
    yield from talk.highest("come", 0)
    ticket = yield from talk.highest("ticket", turnstile.propose(key))
    turn = turnstile.settle(key, ticket, talk.wake)
    while not turn.done:
        yield [(turn, 0)]


def meet(
    talk: Talk, key: Key, turnstile: Turnstile, communicators: Communicators, size: int, ranks: Sequence[Rank]
) -> Generator[Wait, None, tuple[Communicator, ...]]:
    """The communicators of a group, one per local GPU. All workers begin theirs in the order of tickets.

    Args:
        size: ranks of the communicator.
        ranks: the local ones; the first worker has at least one.

    Raises:
        NcclError: NCCL cannot make them.
    """
    making: Making | None = None
    try:
        yield from agree(talk, key, turnstile)
        word = np.zeros(UNIQUE_ID_BYTES, np.uint8)
        if talk.place == 0:
            minted: bytes = yield from _result(communicators.mint(ranks[0].device, talk.wake))
            word[:] = np.frombuffer(minted, np.uint8)
        unique_id = yield from talk.passed_on("meet", word)
        making = communicators.make(size, unique_id, ranks, talk.wake)
        turnstile.over(key)  # whoever comes next is made behind these, here as everywhere
        while not making.done:
            yield [(making, 0)]
        made = making.made()
        making = None
        return made
    finally:
        turnstile.over(key)
        if making is not None:
            making.give_up()


def _result(errand: Errand) -> Generator[Wait, None, Any]:
    while not errand.done:
        yield [(errand, 0)]
    if errand.failed is not None:
        raise errand.failed
    return errand.result
