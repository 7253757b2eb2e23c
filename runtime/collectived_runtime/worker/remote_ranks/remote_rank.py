"""A rank without a doorbell: what its client submits comes over gRPC, and what its group loop says waits here for that.

Submissions may come on several streams at once, in any order; they are rung in the order of their numbers. A rank's
messages to its group loop are those of a doorbell, so that every check holds for them too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from collectived_proto.cause import Cause
from collectived_proto.codec import verdict_from_proto
from collectived_proto.errors import (
    AbortedError,
    CollectiveError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    error_from_verdict,
)
from collectived_proto.ipc import messages
from collectived_proto.ipc.arena import Arena
from collectived_proto.types import GroupInfo, Verdict
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.worker.grpc_errors import complete_verdict
from collectived_runtime.worker.remote_ranks import uploads
from collectived_runtime.worker.remote_ranks.in_flight import RemoteInstance
from collectived_runtime.worker.remote_ranks.sequencer import InstanceKey, Sequencer, store_latest
from collectived_runtime.worker.remote_ranks.uploads import NO_UPLOAD, Uploads


class RemoteRankSession:
    """An `CompletionSink`, whose three methods its group loop calls; everything else is of the event loop.

    Args:
        group: in the generation in which it was joined.
        submit: hands a message to the group loop. hang_up: reports to it that this rank is gone, and why.
        refused: called for each submission that is too many.
        late: passes on generation, instance, operation and timeout of a submission that missed its own deadline.
    """

    def __init__(
        self,
        group: GroupInfo,
        rank: int,
        budget: MemoryBudget,
        submit: Callable[[bytes], None],
        hang_up: Callable[[str], None],
        late: Callable[[int, int, str, float], None],
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_refused = refused
        self.group = group
        self.rank = rank
        self.sequencer = Sequencer(
            group.name, group.generation, self._check_can_submit, self._raise_if_ended, self._has_older_in_flight
        )
        self.uploads = Uploads(budget, self._schedule_release)
        self._release_timer: asyncio.TimerHandle | None = None
        self.closed = False
        self._end_reason = (
            f"rank {rank} of group {group.name!r} has lost its place: its worker has let the group go; join again"
        )
        self._submit = submit
        self._disconnect = hang_up
        self._expire_submission = late
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[bytes] = deque()
        self._arenas: dict[int, memoryview] = {}
        self._verdicts: dict[int, Verdict] = {}  # the latest of each generation
        self._last_verdict: tuple[bytes, Verdict] | None = None
        self._delivered_generation = 0  # the latest generation whose verdict the client has been given
        self._has_left = False
        self._waiting_joiners = 0  # processes that wait to join, by the last message of the group loop
        self._abort_reasons: dict[int, str] = {}  # by generation: why
        self._open_streams = [0, 0]  # submissions that are under way, sends and recvs last
        self._instances: dict[InstanceKey, RemoteInstance] = {}
        self._early_cancels: set[InstanceKey] = set()  # of receives whose turn has not come
        self._late_instances: list[
            RemoteInstance
        ] = []  # whose values have not come, and which the group loop is asked to end for all
        self._pending_pings: deque[asyncio.Event] = deque()
        self._timeouts: set[asyncio.Timeout] = set()

    # For its group loop, in that thread

    def add_arena(self, arena: Arena) -> None:
        if not self.closed:
            self._arenas[arena.number] = arena.view()

    def remove_arena(self, arena: Arena) -> None:
        self._arenas.pop(arena.number, None)

    def send(self, message: bytes) -> None:
        self._inbox.append(message)
        self._call_soon_threadsafe(self.process_messages)

    def close(self) -> None:
        self.closed = True  # seen at once by code that copies a result
        self._call_soon_threadsafe(self._on_close)

    def _call_soon_threadsafe(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed, and the worker with it
            self._loop.call_soon_threadsafe(what)

    # Submissions

    @contextlib.contextmanager
    def acquire_stream(self, post: bool) -> Iterator[None]:
        """As long as a submission is under way, until its results have been sent.

        Args:
            post: whether it is a send or recv, which are numbered and counted apart.

        Raises:
            ResourceExhaustedError: too many are under way.
        """
        flying = sum((flight.instance >= messages.P2P_BASE) == post for flight in self._instances.values())
        count = max(flying, self._open_streams[post])
        if count >= (messages.MAX_P2P_OUTSTANDING if post else messages.MAX_OUTSTANDING):
            self._on_refused()
            raise ResourceExhaustedError(
                f"{count} {'sends and recvs' if post else 'collectives'} of group {self.group.name!r} are in flight on "
                f"rank {self.rank}, which is the most there may be: wait for some before starting more"
            )
        self._open_streams[post] += 1
        try:
            yield
        finally:
            self._open_streams[post] -= 1
            self._disconnect_if_idle()

    def start_instance(self, number: InstanceKey, ring: messages.Submit) -> RemoteInstance:
        """Start an instance whose turn it is; its upload is the address of `ring`."""
        flight = RemoteInstance(*number, ring.addresses[0][0] if ring.addresses else NO_UPLOAD)
        self._instances[number] = flight
        self._submit(ring.encode())
        self.sequencer.advance(number)
        if number in self._early_cancels:
            self.cancel(number)
        return flight

    def cancel(self, number: InstanceKey) -> None:
        """Take a receive back, unless a message is there for it. The rank gets the outcome.

        This may come before the receive itself, which comes on another stream.

        Raises:
            InvalidArgumentError: it is no number of a receive.
            ResourceExhaustedError: too many are taken back that do not come.
            CollectiveError: this rank has no place any more.
        """
        self.check_open()
        if number[1] < messages.P2P_BASE:
            raise InvalidArgumentError(f"instance {number[1]} is no recv: these are numbered from 2**62")
        if number in self._instances:
            self._early_cancels.discard(number)
            self._submit(messages.Withdrawal(*number).encode())
        elif self.sequencer.is_to_come(number):
            if len(self._early_cancels) >= messages.MAX_P2P_OUTSTANDING:
                raise ResourceExhaustedError(f"{len(self._early_cancels)} recvs were taken back that have not come")
            self._early_cancels.add(number)

    async def expire_submission(self, number: InstanceKey, op: str, timeout: float) -> None:
        """An instance was not submitted by its own deadline: that ends it for all ranks, as this raises.

        Args:
            op, timeout: what it was to be, and the seconds that it had, for people.

        Raises:
            CollectiveError: with the verdict; or this rank is lost.
        """
        self.check_open()
        flight = RemoteInstance(*number, NO_UPLOAD)
        self._late_instances.append(flight)
        try:
            self._expire_submission(*number, op, timeout)
            await flight.next_completion()
        finally:
            self._late_instances.remove(flight)

    def abandon(self, flight: RemoteInstance) -> None:
        """Note that the results of a flight are not read any more. It still runs to its end."""
        flight.abandoned = True
        if flight.is_over:
            self._release_slot(flight)

    def on_verdict_delivered(self, verdict: Verdict) -> None:
        """The client has been given this verdict: with it the successor begins for it, if there is one."""
        self._delivered_generation = max(self._delivered_generation, verdict.generation)
        if verdict.successor and verdict.generation == self.sequencer.current_generation:
            self.sequencer.current_generation = verdict.successor

    def get_arena(self, number: int) -> memoryview:
        """The results of this rank lie in there; raises as `check_open` does."""
        self.check_open()
        return self._arenas[number]

    @contextlib.contextmanager
    def bind_timeout(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Let the end of this rank be the end of `limit` too."""
        self._timeouts.add(limit)
        try:
            yield
        finally:
            self._timeouts.discard(limit)

    def check_open(self) -> None:
        """Raise UnavailableError where this rank has no place any more."""
        if self.closed:
            raise self._lost_error()

    # Other words

    async def abort(self, reason: str, cause: Cause = Cause.ABORTED) -> None:
        """End the generation for all; return when nothing of it runs here any more."""
        self.check_open()
        store_latest(self._abort_reasons, self.sequencer.current_generation, reason)
        self._submit(messages.encode_end(cause, reason))
        await self._ping()

    async def leave(self) -> Verdict | None:
        """No more submissions; returns a verdict that the client has not been given."""
        if not self._has_left and not self.closed:
            self._has_left = True
            try:
                await self._ping()  # with it come verdicts that the group loop has sent already
            finally:  # the caller may have gone meanwhile
                self._submit(messages.encode_bare(messages.MessageType.LEAVE))
                self._disconnect_if_idle()
        current = self.sequencer.current_generation
        return self._verdicts.get(current) if self._delivered_generation != current else None

    def end(self, why: str) -> None:
        """End its streams with the error that its session has ended."""
        self._end_reason = f"rank {self.rank} of group {self.group.name!r} has lost its place: {why}; connect again"
        self._disconnect(why)

    def _disconnect_if_idle(self) -> None:
        if self._has_left and not any(self._open_streams) and not self._instances:
            self._disconnect("it has left")

    async def _ping(self) -> None:
        if not self.closed:
            echo = asyncio.Event()
            self._pending_pings.append(echo)
            self._submit(messages.encode_bare(messages.MessageType.PING))
            await echo.wait()

    # Messages of its group loop

    def process_messages(self) -> None:
        """Take in what has been said; nothing that its group loop said before is unknown afterwards."""
        while self._inbox:
            message = self._inbox.popleft()
            match messages.parse_type(message):
                case messages.MessageType.DONE:
                    self._on_done(messages.parse_done(message))
                case messages.MessageType.WITHDRAWN:
                    self._on_withdrawn(messages.parse_withdrawal(message))
                case messages.MessageType.FAILED:
                    self._on_failed(*messages.parse_failed(message))
                case messages.MessageType.WAITING_JOINERS:
                    self._waiting_joiners = messages.parse_waiting(message)
                case messages.MessageType.PONG if self._pending_pings:
                    self._pending_pings.popleft().set()
                case _:  # of an echo that is not awaited any more
                    pass

    def _on_done(self, done: messages.Completion) -> None:
        # A completion does not say its generation. It is of the latest: those before had ended when that was rung.
        flying = [flight for flight in self._instances.values() if flight.instance == done.instance]
        if flying:
            flight = max(flying, key=lambda flight: flight.generation)
            flight.waiting_joiners = self._waiting_joiners
            flight.on_done(done)
            self._retire_if_over(flight)

    def _on_withdrawn(self, told: messages.Withdrawal) -> None:
        flight = self._instances.get((told.generation, told.instance))
        if flight is not None:
            flight.on_withdrawn(told.code)
            self._retire_if_over(flight)

    def _on_failed(self, instance: int, serialized: bytes) -> None:
        if self._last_verdict is None or self._last_verdict[0] != serialized:
            compact = verdict_from_proto(common_pb2.Verdict.FromString(serialized))
            self._last_verdict = serialized, complete_verdict(compact, self.group)
        verdict = self._last_verdict[1]
        store_latest(self._verdicts, verdict.generation, verdict)
        if verdict.successor:
            self.sequencer.add_generation(verdict.successor, verdict.next_instance)
        flight = self._instances.get((verdict.generation, instance))
        if flight is not None:
            flight.on_failed(verdict)
            self._retire_if_over(flight)
        for late in self._late_instances:
            if (late.generation, late.instance) == (verdict.generation, instance):
                late.on_failed(verdict)
        self.sequencer.wake_waiters()

    def _retire_if_over(self, flight: RemoteInstance) -> None:
        if not flight.is_over:
            return
        del self._instances[flight.generation, flight.instance]
        self.uploads.release(flight.upload)
        if flight.abandoned:
            self._release_slot(flight)
        if not self._instances:  # a generation that waits for the end of another has its turn
            self.sequencer.wake_waiters()
        self._disconnect_if_idle()

    def _release_slot(self, flight: RemoteInstance) -> None:
        if flight.slot and not self.closed:
            self._submit(messages.encode_release((flight.slot,)))
        flight.slot = 0

    def _on_close(self) -> None:
        self.process_messages()
        for flight in (*self._instances.values(), *self._late_instances):
            flight.on_lost(self._lost_error)
        self._instances.clear()
        self.sequencer.wake_waiters()
        for echo in self._pending_pings:
            echo.set()
        for limit in self._timeouts:
            with contextlib.suppress(RuntimeError):  # it has passed already
                limit.reschedule(self._loop.time())
        self._arenas.clear()
        self.uploads.close()
        if self._release_timer is not None:
            self._release_timer.cancel()

    def _schedule_release(self) -> None:
        if self._release_timer is None:
            self._release_timer = self._loop.call_later(uploads.SPARE_IDLE_SECONDS, self._release_idle_uploads)

    def _release_idle_uploads(self) -> None:
        self._release_timer = None
        if self.uploads.release_idle():
            self._schedule_release()

    def _check_can_submit(self, generation: int) -> None:
        """Raise where this rank must not submit anything more in a generation: its group loop would let it go for
        that.
        """
        self.check_open()
        if self._has_left:
            raise FailedPreconditionError(self._left_message)
        reason = self._abort_reasons.get(generation)
        if reason is not None:
            verdict = self._verdicts.get(generation)
            if verdict is not None:
                raise error_from_verdict(verdict)
            raise AbortedError(
                f"rank {self.rank} has aborted group {self.group.name!r} itself: {reason}; join it again"
            )

    def _has_older_in_flight(self, generation: int) -> bool:
        """Return whether something of an earlier generation is in flight."""
        return any(flight.generation < generation for flight in self._instances.values())

    def _raise_if_ended(self, number: InstanceKey) -> None:
        verdict = self._verdicts.get(number[0])
        if verdict is not None and (
            not verdict.orderly if number[1] >= messages.P2P_BASE else number[1] >= verdict.from_instance
        ):
            raise error_from_verdict(verdict)

    def _lost_error(self) -> CollectiveError:
        return FailedPreconditionError(self._left_message) if self._has_left else UnavailableError(self._end_reason)

    @property
    def _left_message(self) -> str:
        return f"rank {self.rank} has left group {self.group.name!r}; join it again"
