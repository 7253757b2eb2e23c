"""Draining, as a worker takes part in it: see `coordinator/draining.py` for the whole.

A lane is *quiet* when nothing runs in it and a verdict refuses what would begin next: then nothing can run there any
more. A worker that drains as a whole takes no new ranks meanwhile, and ends afterwards unless it is to stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import grpc
import grpc.aio

from collectived_proto.errors import UnavailableError
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import status_pb2
from collectived_runtime.engine.lane import Lane

log = logging.getLogger("collectived.worker")

LOOK_SECONDS = 0.02  # how often lanes are looked at while a drain lasts
VERDICT_SECONDS = 1.0  # in which what is cut has been told to the ranks
ANSWER_SECONDS = 7.0  # beyond its timeout, until an answer to a drain is not waited for any more
REPLY_SECONDS = 1.0  # in which who asked through this worker has been answered, before it ends
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED)


class Drainage:
    """Of one worker. Runs in its event loop.

    Args:
        name: of this worker, for people.
        lanes: those that run.
        say: sends a message to the coordinator.
        ask: asks the coordinator to see to a drain.
        began: called when this whole worker takes nothing new any more.
    """

    def __init__(
        self,
        task: int,
        name: str,
        lanes: Callable[[], Sequence[Lane]],
        say: Callable[[pb.WorkerMessage], None],
        ask: Callable[[status_pb2.DrainRequest, float], Awaitable[status_pb2.DrainReply]],
        began: Callable[[], Awaitable[None]],
    ) -> None:
        self.refusal = ""
        """Why no new rank is taken; '' while they are."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the worker is to end, because it is drained."""
        self._task, self._name = task, name
        self._lanes, self._say, self._ask, self._began = lanes, say, ask, began
        self._orders: set[asyncio.Task[None]] = set()
        self._relays = 0

    def check(self) -> None:
        """Raises UnavailableError where no new rank is taken."""
        if self.refusal:
            raise UnavailableError(self.refusal)

    async def asked(self, request: status_pb2.DrainRequest) -> status_pb2.DrainReply:
        """A drain that somebody asks of this worker; the coordinator sees to it.

        Raises:
            grpc.aio.AioRpcError: the coordinator refuses. UnavailableError: it is away, and others are concerned.
        """
        mine = not request.host and not request.group
        wish = status_pb2.DrainRequest()
        wish.CopyFrom(request)
        if mine:
            wish.task = self._task
        self._relays += 1
        try:
            return await self._ask(wish, request.timeout_seconds + ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _AWAY:
                raise
            if not mine:
                raise UnavailableError(
                    f"the coordinator does not answer ({error.details()}), and it alone can drain a host or a group: "
                    "drain workers one by one, or try again when it is back"
                ) from None
            return await self._alone(request)
        finally:
            self._relays -= 1

    def ordered(self, order: pb.DrainOrder) -> None:
        """The coordinator has refused what is to come; what runs is ours to wait for."""
        task = asyncio.get_running_loop().create_task(self._carry_out(order))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _carry_out(self, order: pb.DrainOrder) -> None:
        if order.leave:
            await self._begin()
        mine = [lane for lane in self._lanes() if lane.ledger.generation in order.generations]
        cut = await self._finished(mine, order.timeout_seconds, _quiet)
        self._say(pb.WorkerMessage(drained=pb.Drained(drain=order.drain, cut=cut)))
        if order.leave and not order.stay:
            await self._wait(mine, VERDICT_SECONDS, _quiet)  # ranks hear why, before their worker is gone
            for lane in [lane for lane in self._lanes() if lane in mine]:
                lane.last_words()
            await self._end()

    async def _alone(self, request: status_pb2.DrainRequest) -> status_pb2.DrainReply:
        """Without a coordinator nobody can refuse what is to come on all ranks alike: it waits for a quiet moment."""
        await self._begin()
        mine = list(self._lanes())
        cut = await self._finished(mine, request.timeout_seconds, _at_rest)
        if not request.stay:
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._end()))
        note = "the coordinator is away: other workers hear of it when this one has ended"
        return status_pb2.DrainReply(
            workers=[self._task], groups=sorted({lane.name for lane in mine}), cut=cut, notes=[note]
        )

    async def _begin(self) -> None:
        if not self.refusal:
            self.refusal = (
                f"{self._name} is draining and takes no new ranks: connect to another worker, or wait until it has "
                "been started again"
            )
            log.info("%s is draining", self._name)
            await self._began()

    async def _end(self) -> None:
        deadline = time.monotonic() + REPLY_SECONDS
        while self._relays and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
        if not self.over.done():
            self.over.set_result(None)

    async def _finished(
        self, lanes: Sequence[Lane], timeout: float, ended: Callable[[Lane], bool]
    ) -> list[status_pb2.Cut]:
        """What has not finished within `timeout` seconds."""
        left = await self._wait(lanes, timeout, ended)
        return [cut for lane in left for cut in _unfinished(lane)]

    async def _wait(self, lanes: Sequence[Lane], timeout: float, ended: Callable[[Lane], bool]) -> list[Lane]:
        """Waits for lanes; those that are not done in time."""
        deadline = time.monotonic() + timeout
        while True:
            here = self._lanes()
            left = [lane for lane in lanes if lane in here and not ended(lane)]
            if not left or time.monotonic() >= deadline:
                return left
            await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        for task in self._orders:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._orders, return_exceptions=True)


def _quiet(lane: Lane) -> bool:
    """Whether nothing runs there, nor can begin."""
    ledger = lane.ledger
    return ledger.verdict_on(ledger.next) is not None and _at_rest(lane)


def _at_rest(lane: Lane) -> bool:
    """Whether nothing runs there now."""
    return lane.running is None and not lane.ledger.open() and not lane.posts


def _unfinished(lane: Lane) -> Iterator[status_pb2.Cut]:
    """What is to be cut: the first instance that has not finished, with which those after it go, and letters."""
    ledger = lane.ledger
    number = ledger.next
    instance = ledger.instances.get(number)
    if ledger.verdict_on(number) is None:
        arrival = next(iter(instance.arrivals.values()), None) if instance else None
        yield status_pb2.Cut(
            group=lane.name,
            generation=ledger.generation,
            instance=number,
            op=arrival.prepared.op if arrival else "",
            site=arrival.prepared.collective.site if arrival else "",
            missing=[rank for rank, standing in list(ledger.standings.items()) if standing.submitted < number],
        )
    for post in lane.posts:
        site = post.prepared.collective.site
        yield status_pb2.Cut(group=lane.name, generation=ledger.generation, instance=-1, op=post.prepared.op, site=site)
