"""A rank without a doorbell: what its client submits comes over gRPC, and what its lane says waits here for that.

Submissions may come on several streams at once, in any order; they are rung in the order of their numbers. A rank's
messages to its lane are those of a doorbell, so that every check holds for them too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from collectived_proto.codec import verdict_from_proto
from collectived_proto.errors import (
    AbortedError,
    CollectiveError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
    error_from_verdict,
)
from collectived_proto.local import wire
from collectived_proto.local.arena import Arena
from collectived_proto.types import GroupInfo, Verdict
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine.results import Budget
from collectived_runtime.worker.grpc_alone import uploads
from collectived_runtime.worker.grpc_alone.flights import Flight
from collectived_runtime.worker.grpc_alone.order import Number, Order, remember
from collectived_runtime.worker.grpc_alone.uploads import NOTHING, Uploads
from collectived_runtime.worker.statuses import in_full


class Remote:
    """An `Outlet`, whose three methods its lane calls; everything else is of the event loop.

    Args:
        group: in the generation in which it was joined.
        submit: hands a message to the lane. hang_up: tells it that this rank is gone, and why.
        refused: told of each submission that is too many.
        late: tells it the generation, instance, operation and timeout of what has not come by its own deadline.
    """

    def __init__(
        self,
        group: GroupInfo,
        rank: int,
        budget: Budget,
        submit: Callable[[bytes], None],
        hang_up: Callable[[str], None],
        late: Callable[[int, int, str, float], None],
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._refused = refused
        self.group = group
        self.rank = rank
        self.order = Order(group.name, group.generation, self._check_goes_on, self._raise_verdict, self._older)
        self.uploads = Uploads(budget, self._tidy_later)
        self._tidying: asyncio.TimerHandle | None = None
        self.closed = False
        self._why = (
            f"rank {rank} of group {group.name!r} has lost its place: its worker has let the group go; join again"
        )
        self._submit = submit
        self._hang_up = hang_up
        self._tell_late = late
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[bytes] = deque()
        self._arenas: dict[int, memoryview] = {}
        self._verdicts: dict[int, Verdict] = {}  # the latest of each generation
        self._read: tuple[bytes, Verdict] | None = None
        self._given = 0  # the latest generation whose verdict the client has been given
        self._left = False
        self._waiting = 0  # who wait to join, as the lane said last
        self._aborted: dict[int, str] = {}  # by generation: why
        self._streams = [0, 0]  # submissions that are under way, sends and recvs last
        self._flights: dict[Number, Flight] = {}
        self._late: list[Flight] = []  # whose values have not come, and which the lane is asked to end for all
        self._echoes: deque[asyncio.Event] = deque()
        self._limits: set[asyncio.Timeout] = set()

    # For its lane, in that thread

    def announce(self, arena: Arena) -> None:
        if not self.closed:
            self._arenas[arena.number] = arena.view()

    def withdraw(self, arena: Arena) -> None:
        self._arenas.pop(arena.number, None)

    def tell(self, message: bytes) -> None:
        self._inbox.append(message)
        self._soon(self.hear)

    def close(self) -> None:
        self.closed = True  # seen at once by who copies a result
        self._soon(self._close)

    def _soon(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed, and the worker with it
            self._loop.call_soon_threadsafe(what)

    # Submissions

    @contextlib.contextmanager
    def stream(self, post: bool) -> Iterator[None]:
        """As long as a submission is under way, until its results have been sent.

        Args:
            post: whether it is a send or recv, which are numbered and counted apart.

        Raises:
            ResourceExhaustedError: too many are under way.
        """
        flying = sum((flight.instance >= wire.POST) == post for flight in self._flights.values())
        count = max(flying, self._streams[post])
        if count >= wire.MAX_OUTSTANDING:
            self._refused()
            raise ResourceExhaustedError(
                f"{count} {'sends and recvs' if post else 'collectives'} of group {self.group.name!r} are in flight on "
                f"rank {self.rank}, which is the most there may be: wait for some before starting more"
            )
        self._streams[post] += 1
        try:
            yield
        finally:
            self._streams[post] -= 1
            self._hang_up_if_idle()

    def ring(self, number: Number, ring: wire.Ring) -> Flight:
        """Starts an instance whose turn it is; its upload is the address of `ring`."""
        flight = Flight(*number, ring.addresses[0][0] if ring.addresses else NOTHING)
        self._flights[number] = flight
        self._submit(ring.encode())
        self.order.rung(number)
        return flight

    async def late(self, number: Number, op: str, timeout: float) -> None:
        """An instance was not submitted by its own deadline: that ends it for all ranks, as this raises.

        Args:
            op, timeout: what it was to be, and the seconds that it had, for people.

        Raises:
            CollectiveError: with the verdict; or this rank is lost.
        """
        self.check()
        flight = Flight(*number, NOTHING)
        self._late.append(flight)
        try:
            self._tell_late(*number, op, timeout)
            await flight.next()
        finally:
            self._late.remove(flight)

    def finished(self, flight: Flight) -> None:
        """Nobody reads the results of a flight any more; what is still running goes on."""
        flight.abandoned = True
        if flight.over:
            self._release(flight)

    def given(self, verdict: Verdict) -> None:
        """The client has been given this verdict: with it the successor begins for it, if there is one."""
        self._given = max(self._given, verdict.generation)
        if verdict.successor and verdict.generation == self.order.current:
            self.order.current = verdict.successor

    def arena(self, number: int) -> memoryview:
        """The results of this rank lie in there; raises as `check` does."""
        self.check()
        return self._arenas[number]

    @contextlib.contextmanager
    def limited(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Lets the end of this rank be the end of `limit` too."""
        self._limits.add(limit)
        try:
            yield
        finally:
            self._limits.discard(limit)

    def check(self) -> None:
        """Raises UnavailableError where this rank has no place any more."""
        if self.closed:
            raise self._gone()

    # Other words

    async def abort(self, reason: str) -> None:
        """Ends the generation for all; returns when nothing of it runs here any more."""
        self.check()
        remember(self._aborted, self.order.current, reason)
        self._submit(wire.bare(wire.Kind.ABORT, reason))
        await self._echo()

    async def leave(self) -> Verdict | None:
        """No more submissions; returns a verdict that the client has not been given."""
        if not self._left and not self.closed:
            self._left = True
            try:
                await self._echo()  # with it come verdicts that the lane has told already
            finally:  # whoever asked may have gone meanwhile
                self._submit(wire.bare(wire.Kind.LEAVE))
                self._hang_up_if_idle()
        current = self.order.current
        return self._verdicts.get(current) if self._given != current else None

    def end(self, why: str) -> None:
        """Its session has ended, which is what its streams are told."""
        self._why = f"rank {self.rank} of group {self.group.name!r} has lost its place: {why}; connect again"
        self._hang_up(why)

    def _hang_up_if_idle(self) -> None:
        if self._left and not any(self._streams) and not self._flights:
            self._hang_up("it has left")

    async def _echo(self) -> None:
        if not self.closed:
            echo = asyncio.Event()
            self._echoes.append(echo)
            self._submit(wire.bare(wire.Kind.PING))
            await echo.wait()

    # What its lane has said

    def hear(self) -> None:
        """Takes in what has been said; nothing that its lane said before is unknown afterwards."""
        while self._inbox:
            message = self._inbox.popleft()
            match wire.kind_of(message):
                case wire.Kind.DONE:
                    self._done(wire.parse_done(message))
                case wire.Kind.FAILED:
                    self._failed(*wire.parse_failed(message))
                case wire.Kind.WAITING:
                    self._waiting = wire.parse_waiting(message)
                case wire.Kind.PONG if self._echoes:
                    self._echoes.popleft().set()
                case _:  # of an echo that nobody awaits any more
                    pass

    def _done(self, done: wire.Done) -> None:
        # A completion does not say its generation. It is of the latest: those before had ended when that was rung.
        flying = [flight for flight in self._flights.values() if flight.instance == done.instance]
        if flying:
            flight = max(flying, key=lambda flight: flight.generation)
            flight.waiting = self._waiting
            flight.done(done)
            self._settle(flight)

    def _failed(self, instance: int, serialized: bytes) -> None:
        if self._read is None or self._read[0] != serialized:
            compact = verdict_from_proto(common_pb2.Verdict.FromString(serialized))
            self._read = serialized, in_full(compact, self.group)
        verdict = self._read[1]
        remember(self._verdicts, verdict.generation, verdict)
        if verdict.successor:
            self.order.follows(verdict.successor)
        flight = self._flights.get((verdict.generation, instance))
        if flight is not None:
            flight.failed(verdict)
            self._settle(flight)
        for late in self._late:
            if (late.generation, late.instance) == (verdict.generation, instance):
                late.failed(verdict)
        self.order.stir()

    def _settle(self, flight: Flight) -> None:
        if not flight.over:
            return
        del self._flights[flight.generation, flight.instance]
        self.uploads.give(flight.upload)
        if flight.abandoned:
            self._release(flight)
        if not self._flights:  # a generation that waits for the end of another has its turn
            self.order.stir()
        self._hang_up_if_idle()

    def _release(self, flight: Flight) -> None:
        if flight.slot and not self.closed:
            self._submit(wire.release((flight.slot,)))
        flight.slot = 0

    def _close(self) -> None:
        self.hear()
        for flight in (*self._flights.values(), *self._late):
            flight.lost(self._gone)
        self._flights.clear()
        self.order.stir()
        for echo in self._echoes:
            echo.set()
        for limit in self._limits:
            with contextlib.suppress(RuntimeError):  # it has passed already
                limit.reschedule(self._loop.time())
        self._arenas.clear()
        self.uploads.close()
        if self._tidying is not None:
            self._tidying.cancel()

    def _tidy_later(self) -> None:
        if self._tidying is None:
            self._tidying = self._loop.call_later(uploads.IDLE_SECONDS, self._tidy)

    def _tidy(self) -> None:
        self._tidying = None
        if self.uploads.tidy():
            self._tidy_later()

    def _check_goes_on(self, generation: int) -> None:
        """Raises where this rank must not submit anything more in a generation: its lane would let it go for that."""
        self.check()
        if self._left:
            raise FailedPreconditionError(self._after_leaving)
        reason = self._aborted.get(generation)
        if reason is not None:
            verdict = self._verdicts.get(generation)
            if verdict is not None:
                raise error_from_verdict(verdict)
            raise AbortedError(
                f"rank {self.rank} has aborted group {self.group.name!r} itself: {reason}; join it again"
            )

    def _older(self, generation: int) -> bool:
        """Whether something of an earlier generation is in flight."""
        return any(flight.generation < generation for flight in self._flights.values())

    def _raise_verdict(self, number: Number) -> None:
        verdict = self._verdicts.get(number[0])
        if verdict is not None and (
            not verdict.orderly if number[1] >= wire.POST else number[1] >= verdict.from_instance
        ):
            raise error_from_verdict(verdict)

    def _gone(self) -> CollectiveError:
        return FailedPreconditionError(self._after_leaving) if self._left else UnavailableError(self._why)

    @property
    def _after_leaving(self) -> str:
        return f"rank {self.rank} has left group {self.group.name!r}; join it again"
