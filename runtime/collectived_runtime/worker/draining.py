"""Draining, as a worker takes part in it: see `core/draining.py` for the whole.

A group loop is *quiet* when nothing runs in it and a verdict refuses what would begin next: then nothing can run there
any more. A worker that drains as a whole takes no new ranks meanwhile, and ends afterwards unless it is to stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import grpc
import grpc.aio

from collectived_proto.deadline import MAX_DRAIN_SECONDS, check_drain_timeout
from collectived_proto.error_status import describe_failure
from collectived_proto.errors import UnavailableError
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import status_pb2
from collectived_runtime.engine.loop.group_loop import GroupLoop

log = logging.getLogger("collectived.worker")

POLL_SECONDS = 0.02  # how often group loops are looked at while a drain lasts
VERDICT_SECONDS = 1.0  # in which ranks get the verdict about collectives that are cut
ANSWER_SECONDS = 7.0  # beyond its timeout, until an answer to a drain is not waited for any more
REPLY_SECONDS = 1.0  # in which the caller at this worker gets its answer, before it ends
_AWAY_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED)


class DrainState:
    """Of one worker. Runs in its event loop.

    Args:
        name: of this worker, for people.
        group_loops: those that run.
        say: sends a message to the coordinator.
        ask: asks the coordinator to see to a drain.
        began: called when this whole worker takes nothing new any more.
    """

    def __init__(
        self,
        task: int,
        name: str,
        group_loops: Callable[[], Sequence[GroupLoop]],
        say: Callable[[pb.WorkerMessage], None],
        ask: Callable[[status_pb2.DrainRequest, float], Awaitable[status_pb2.DrainReply]],
        began: Callable[[], Awaitable[None]],
    ) -> None:
        self.refusal = ""
        """Why no new rank is taken; '' while they are."""
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the worker is to end, because it is drained."""
        self._task, self._name = task, name
        self._list_loops, self._send, self._request_drain, self._on_begin = group_loops, say, ask, began
        self._order_tasks: set[asyncio.Task[None]] = set()
        self._open_requests = 0

    def check_accepting(self) -> None:
        """Raise UnavailableError where no new rank is taken."""
        if self.refusal:
            raise UnavailableError(self.refusal)

    async def handle_request(self, request: status_pb2.DrainRequest) -> status_pb2.DrainReply:
        """Handle a request to drain at this worker; the coordinator carries it out.

        Raises:
            grpc.aio.AioRpcError: the coordinator refuses. UnavailableError: it is away, and others are concerned.
            InvalidArgumentError: no clock can count to the timeout.
        """
        check_drain_timeout(request.timeout_seconds)
        mine = not request.host and not request.group
        wish = status_pb2.DrainRequest()
        wish.CopyFrom(request)
        if mine:
            wish.task = self._task
        self._open_requests += 1
        try:
            return await self._request_drain(wish, request.timeout_seconds + ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _AWAY_CODES:
                raise
            if not mine:
                raise UnavailableError(
                    f"the coordinator does not answer ({describe_failure(error)}), and it alone can drain a host or a "
                    "group: drain workers one by one, or try again when it is back"
                ) from None
            return await self._drain_without_coordinator(request)
        finally:
            self._open_requests -= 1

    async def drain_itself(self, seconds: float) -> status_pb2.DrainReply:
        """A drain of this worker before it ends, as by `handle_request`; more than a year is a year."""
        return await self.handle_request(status_pb2.DrainRequest(timeout_seconds=min(seconds, MAX_DRAIN_SECONDS)))

    def start_order(self, order: pb.DrainOrder) -> None:
        """Follow an order to drain. The coordinator refuses new collectives, and this worker waits for running ones."""
        task = asyncio.get_running_loop().create_task(self._execute_order(order))
        self._order_tasks.add(task)
        task.add_done_callback(self._order_tasks.discard)

    async def _execute_order(self, order: pb.DrainOrder) -> None:
        if order.leave:
            await self._begin()
        mine = [group_loop for group_loop in self._list_loops() if group_loop.tracker.generation in order.generations]
        cut = await self._wait_and_list_cut(mine, order.timeout_seconds, _is_quiet)
        self._send(pb.WorkerMessage(drained=pb.Drained(drain=order.drain, cut=cut)))
        if order.leave and not order.stay:
            # Ranks get the verdict before their worker is gone.
            await self._wait_for_loops(mine, VERDICT_SECONDS, _is_quiet)
            for group_loop in [group_loop for group_loop in self._list_loops() if group_loop in mine]:
                group_loop.send_final_verdicts()
            await self._end()

    async def _drain_without_coordinator(self, request: status_pb2.DrainRequest) -> status_pb2.DrainReply:
        """Wait for a quiet moment: without a coordinator new collectives cannot be refused on all ranks alike."""
        await self._begin()
        mine = list(self._list_loops())
        cut = await self._wait_and_list_cut(mine, request.timeout_seconds, _is_idle)
        if not request.stay:
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._end()))
        note = "the coordinator is away: other workers learn of the drain when this one has ended"
        return status_pb2.DrainReply(
            workers=[self._task], groups=sorted({group_loop.name for group_loop in mine}), cut=cut, notes=[note]
        )

    async def _begin(self) -> None:
        if not self.refusal:
            self.refusal = (
                f"{self._name} is draining and takes no new ranks: connect to another worker, or wait until it has "
                "been started again"
            )
            log.info("%s is draining", self._name)
            await self._on_begin()

    async def _end(self) -> None:
        deadline = time.monotonic() + REPLY_SECONDS
        while self._open_requests and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        if not self.finished.done():
            self.finished.set_result(None)

    async def _wait_and_list_cut(
        self, group_loops: Sequence[GroupLoop], timeout: float, ended: Callable[[GroupLoop], bool]
    ) -> list[status_pb2.Cut]:
        """Return what has not finished within `timeout` seconds."""
        left = await self._wait_for_loops(group_loops, timeout, ended)
        return [cut for group_loop in left for cut in _list_unfinished(group_loop)]

    async def _wait_for_loops(
        self, group_loops: Sequence[GroupLoop], timeout: float, ended: Callable[[GroupLoop], bool]
    ) -> list[GroupLoop]:
        """Wait for group loops; those that are not done in time."""
        deadline = time.monotonic() + timeout
        while True:
            here = self._list_loops()
            left = [group_loop for group_loop in group_loops if group_loop in here and not ended(group_loop)]
            if not left or time.monotonic() >= deadline:
                return left
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        for task in self._order_tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._order_tasks, return_exceptions=True)


def _is_quiet(group_loop: GroupLoop) -> bool:
    """Return whether nothing runs there, nor can begin."""
    tracker = group_loop.tracker
    return tracker.find_verdict(tracker.next_number) is not None and _is_idle(group_loop)


def _is_idle(group_loop: GroupLoop) -> bool:
    """Return whether nothing runs there now."""
    return group_loop.execution is None and not group_loop.tracker.list_open() and not group_loop.pending_ops


def _list_unfinished(group_loop: GroupLoop) -> Iterator[status_pb2.Cut]:
    """The collectives to cut: the first unfinished instance, which stands for later ones too, and letters."""
    tracker = group_loop.tracker
    number = tracker.next_number
    instance = tracker.instances.get(number)
    if tracker.find_verdict(number) is None:
        arrival = next(iter(instance.arrivals.values()), None) if instance else None
        yield status_pb2.Cut(
            group=group_loop.name,
            generation=tracker.generation,
            instance=number,
            op=arrival.prepared.op if arrival else "",
            site=arrival.prepared.collective.site if arrival else "",
            missing=[rank for rank in list(tracker.progress) if not tracker.has_come(rank, number)],
        )
    for post in group_loop.pending_ops:
        site = post.prepared.collective.site
        yield status_pb2.Cut(
            group=group_loop.name, generation=tracker.generation, instance=-1, op=post.prepared.op, site=site
        )
