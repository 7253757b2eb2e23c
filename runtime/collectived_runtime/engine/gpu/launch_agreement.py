"""The agreement of workers over their links before NCCL runs a collective: that all have come, and in which order.

NCCL compares nothing: ranks that differ hang, or fold values that do not belong together. So before anything is
launched the workers of a group exchange two numbers. The frames of the first one carry the chain of contracts, as all
frames do, so that a rank that differs is found out; when it has arrived all have come. The second one is the ticket
(`gpu/launch_queue.py`).

Generators like `execute`; whatever becomes of them, the caller removes their key from the launch queue.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.blocking_thread import BlockingCall
from collectived_runtime.device.nccl.communicators import Communicator, DeviceRank, PendingCommunicators
from collectived_runtime.device.nccl.interface import UNIQUE_ID_BYTES
from collectived_runtime.engine.compile.program import digest, find_peers
from collectived_runtime.engine.gpu.communicator import NcclContext
from collectived_runtime.engine.gpu.launch_queue import LaunchQueue, TicketKey
from collectived_runtime.engine.run.host_task import copy_over, keep_in_place, refuse_fold
from collectived_runtime.engine.run.schedule import Buffers, PlanTransport, Wait, execute
from collectived_runtime.plan import one_shot, tree
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.wide_moves import WidePlan

MAX_DIRECT_WORKERS = 4  # places that send to each other directly
_HIGHEST = Arithmetic(ReduceOp.MAX, DType.INT64, DType.INT64, 1)


@dataclass(frozen=True, slots=True)
class AgreementContext:
    """How the workers of a group talk before an instance.

    Attributes:
        places, place: how many workers there are, and which of them this one is.
        transport: with links at least to `compute_peers(places, place)`; the plan hash of its frames is replaced by
            what is talked about.
        wake: wakes the group loop, from any thread.
    """

    places: int
    place: int
    transport: PlanTransport
    wake: Callable[[], object]

    def all_reduce_max(self, subject: str, number: int) -> Generator[Wait, None, int]:
        """The highest number of all workers, when all of them have sent theirs."""
        mine, scratch, out = np.array([number], np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
        buffers = Buffers(mine, scratch, out, _HIGHEST.fold, _HIGHEST.finish, _HIGHEST.finish_in_place)
        yield from self._execute(subject, _max_plan(self.places, self.place), buffers)
        return int(out[0])

    def broadcast(self, subject: str, word: NDArray[np.uint8]) -> Generator[Wait, None, bytes]:
        """Broadcast `word` of the first worker; those of the others have the same length."""
        buffers = Buffers(word, word, word, refuse_fold, copy_over, keep_in_place)
        yield from self._execute(subject, _broadcast_plan(self.places, self.place, len(word)), buffers)
        return word.tobytes()

    def _execute(self, subject: str, plan: WidePlan, buffers: Buffers) -> Generator[Wait, None, None]:
        frames = replace(self.transport.frames, plan=digest(f"{subject}|{self.places}"))
        yield from execute(plan, buffers, replace(self.transport, frames=frames))


def compute_peers(places: int, place: int) -> frozenset[int]:
    """Whom a worker talks to."""
    if places <= MAX_DIRECT_WORKERS:
        return frozenset(range(places)) - {place}
    return find_peers(_max_plan(places, place)) | find_peers(_broadcast_plan(places, place, 1))


def _max_plan(places: int, place: int) -> WidePlan:
    flat: Callable[[Sequence[int], int, Span], Any] = (
        one_shot.all_reduce if places <= MAX_DIRECT_WORKERS else tree.all_reduce
    )
    return tuple(flat(range(places), place, Span(0, 1)))


def _broadcast_plan(places: int, place: int, length: int) -> WidePlan:
    return tree.broadcast(range(places), place, Span(0, length), 0)


def agree_on_turn(talk: AgreementContext, key: TicketKey, launch_queue: LaunchQueue) -> Generator[Wait, None, None]:
    """Ends when all have come and it is this collective's turn on this worker."""
    yield from talk.all_reduce_max("come", 0)
    ticket = yield from talk.all_reduce_max("ticket", launch_queue.propose(key))
    turn = launch_queue.settle(key, ticket, talk.wake)
    while not turn.done:
        yield [(turn, 0)]


def create_communicators(
    talk: AgreementContext, key: TicketKey, nccl: NcclContext, size: int, ranks: Sequence[DeviceRank]
) -> Generator[Wait, None, tuple[Communicator, ...]]:
    """The communicators of a group, one per local GPU. All workers begin theirs in the order of tickets.

    Args:
        size: ranks of the communicator.
        ranks: the local ones; the first worker has at least one.

    Raises:
        NcclError: NCCL cannot make them.
    """
    communicators, launch_queue = nccl.communicators, nccl.launch_queue
    making: PendingCommunicators | None = None
    try:
        yield from agree_on_turn(talk, key, launch_queue)
        word = np.zeros(UNIQUE_ID_BYTES, np.uint8)
        if talk.place == 0:
            minted: bytes = yield from _result(communicators.create_unique_id(ranks[0].device, talk.wake))
            word[:] = np.frombuffer(minted, np.uint8)
        unique_id = yield from talk.broadcast("meet", word)
        making = communicators.create(size, unique_id, ranks, talk.wake)
        launch_queue.remove(key)  # later tickets are made behind these, here as everywhere
        while not making.done:
            yield [(making, 0)]
        made = making.result()
        making = None
        return made
    finally:
        launch_queue.remove(key)
        if making is not None:
            making.cancel()


def _result(pending_call: BlockingCall) -> Generator[Wait, None, Any]:
    while not pending_call.done:
        yield [(pending_call, 0)]
    if pending_call.error is not None:
        raise pending_call.error
    return pending_call.result
