"""The doorbells of a group loop's local ranks: read and written without ever waiting for a client."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial

from collectived_proto.ipc import messages
from collectived_proto.ipc.arena import Arena
from collectived_runtime.auth.peers import get_unix_peer
from collectived_runtime.engine.base.lent import MemoryHolder
from collectived_runtime.engine.base.poller import HANGUP_EVENTS, Poller
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.submit.tracker import InstanceTracker, OutOfOrder
from collectived_runtime.limits.rate_limit import Rate, RateLimiter
from collectived_runtime.limits.rejections import Limit, MessageSource, RejectionCounters

DOORBELL_GRACE_SECONDS = 0.4  # for a doorbell to arrive whose client is gone already
IDLE_MESSAGE_RATE = Rate(500, 512)  # messages of a rank that start nothing new: after more it is not read for a moment
MAX_UNREAD = messages.MAX_OUTSTANDING * messages.MAX_PACKS  # outstanding packs of a rank, at most
MAX_UNREAD_BYTES = 64 << 20


class Doorbells:
    """Args:
    message: takes one message of a client; may raise MalformedMessage or OutOfOrder, which is then that client's fault.
    lost: called once with the rank of a client that is gone, and why.
    refusals: counts what clients should not have sent, and those that do not read.
    """

    def __init__(
        self,
        watch: Poller,
        message: Callable[[LocalRank, bytes], None],
        lost: Callable[[int, str], None],
        refusals: RejectionCounters,
    ) -> None:
        self.local_ranks: dict[int, LocalRank] = {}
        self._holders: list[MemoryHolder] = []  # also of ranks that have left
        self._pace = RateLimiter(IDLE_MESSAGE_RATE)
        self._paused_until: dict[int, float] = {}  # ranks whose doorbells are not looked at, and until when
        self._buffer = bytearray(messages.MAX_MESSAGE)  # so that no message costs an allocation of that size
        self._poller = watch
        self._on_message = message
        self._on_lost = lost
        self._refusals = refusals
        self._disconnecting: dict[
            int, tuple[str, float]
        ] = {}  # ranks without a doorbell whose client is gone: why, until when

    def expect(self, local_rank: LocalRank) -> None:
        """Know a rank before it is watched: in the thread that joins ranks, while the group loop may look at others."""
        self.local_ranks = {**self.local_ranks, local_rank.rank: local_rank}

    def add(self, local_rank: LocalRank, arenas: Iterable[Arena]) -> None:
        """Watches the process of a rank that is expected and about to connect its doorbell.

        One without a doorbell gets the arenas in which its results may lie: others may have been served before.
        """
        if local_rank.completion_sink is not None:
            for arena in arenas:
                local_rank.completion_sink.add_arena(arena)
        if local_rank.pidfd >= 0:
            self._poller.add(
                local_rank.pidfd, select.POLLIN, lambda _: self.disconnect(local_rank, "its process ended")
            )

    def attach(self, rank: int, doorbell: socket.socket, arenas: Iterable[Arena]) -> None:
        """Take a doorbell that has arrived, and send its client the arenas in which results may lie."""
        local_rank = self.local_ranks[rank]
        if local_rank.closed or local_rank.doorbell is not None:
            doorbell.close()
            return
        local_rank.attach_doorbell(doorbell)
        if local_rank.holder is not None and local_rank.holder not in self._holders:
            self._holders.append(local_rank.holder)
        self._poller.add(doorbell.fileno(), select.POLLIN, partial(self._on_event, local_rank))
        for arena in arenas:
            self._send_arena(local_rank, arena)
        if local_rank.flush():
            self._poller.change(doorbell.fileno(), select.POLLIN | select.POLLOUT)
        if rank in self._disconnecting:
            self.disconnect(local_rank, self._disconnecting.pop(rank)[0])

    def add_arena(self, arena: Arena) -> None:
        for local_rank in self.local_ranks.values():
            if local_rank.completion_sink is not None:
                local_rank.completion_sink.add_arena(arena)
            elif local_rank.doorbell is not None:
                self._send_arena(local_rank, arena)

    def remove_arena(self, arena: Arena) -> None:
        """No result will lie in this arena any more."""
        for local_rank in self.local_ranks.values():
            if local_rank.completion_sink is not None:
                local_rank.completion_sink.remove_arena(arena)
            elif local_rank.doorbell is not None:
                self.send(local_rank, messages.encode_arena(messages.MessageType.ARENA_RETIRED, arena.number, 0))

    def list_holders(self) -> list[MemoryHolder]:
        """Sessions to which arenas were handed, also those that have ended: their processes may keep them."""
        return list(self._holders)

    def send(self, local_rank: LocalRank, message: bytes, descriptor: int = -1) -> None:
        if local_rank.send(message, descriptor):
            self._watch_outbox(local_rank)

    def lend(self, local_rank: LocalRank, message: bytes, descriptor: int) -> None:
        """Send a descriptor that may be closed as soon as this returns; raise OSError where there are too many."""
        if local_rank.lend(message, descriptor):
            self._watch_outbox(local_rank)

    def _watch_outbox(self, local_rank: LocalRank) -> None:
        """Send on when its client has read; one that leaves too much unread is let go."""
        if local_rank.doorbell is None:
            return
        self._poller.change(local_rank.doorbell.fileno(), self._poll_events(local_rank))
        if local_rank.unread_count > MAX_UNREAD or local_rank.unread_bytes > MAX_UNREAD_BYTES:
            self._refusals.count_limit(Limit.UNREAD)
            self.drop(local_rank, f"it has left {local_rank.unread_count} messages unread")

    def throttle(self, local_rank: LocalRank) -> None:
        """Note a message that starts nothing new: a client that goes on like that is read less often."""
        delay = self._pace.reserve(local_rank.rank, now := time.monotonic())
        if delay and local_rank.doorbell is not None:
            self._paused_until[local_rank.rank] = now + delay
            self._poller.change(local_rank.doorbell.fileno(), self._poll_events(local_rank))

    def answer_ping(self, local_rank: LocalRank, is_in_use: bool) -> None:
        """Say that this worker lives, and whether memory of the rank is in use, unless the rank does not read."""
        if local_rank.is_reading:
            text = "its memory is in use" if is_in_use else ""
            self.send(local_rank, messages.encode_bare(messages.MessageType.PONG, text))
        self.throttle(local_rank)

    @property
    def next_deadline(self) -> float:
        """When a doorbell that rests is looked at again; inf: none does."""
        return min(self._paused_until.values(), default=math.inf)

    def on_timer(self, now: float) -> None:
        for rank in [rank for rank, until in self._paused_until.items() if until <= now]:
            del self._paused_until[rank]
            local_rank = self.local_ranks[rank]
            if local_rank.doorbell is not None:
                self._poller.change(local_rank.doorbell.fileno(), self._poll_events(local_rank))

    def _poll_events(self, local_rank: LocalRank) -> int:
        """The events that its doorbell is watched for."""
        heard = 0 if local_rank.rank in self._paused_until else select.POLLIN
        return heard if local_rank.is_reading else heard | select.POLLOUT

    def disconnect(self, local_rank: LocalRank, why: str) -> None:
        """The client is gone; collectives that it had fully submitted before count.

        Where its doorbell has not arrived, its last words may be on their way with it: they have a moment.
        """
        if local_rank.doorbell is None and local_rank.completion_sink is None and not local_rank.closed:
            _, until = self._disconnecting.setdefault(local_rank.rank, (why, time.monotonic() + DOORBELL_GRACE_SECONDS))
            if time.monotonic() < until:
                self._poller.remove(local_rank.pidfd)
                return
        while self._read(local_rank):
            pass
        self.drop(local_rank, why)

    def drop(self, local_rank: LocalRank, why: str) -> None:
        if local_rank.closed:
            return
        for descriptor in (local_rank.doorbell.fileno() if local_rank.doorbell else -1, local_rank.pidfd):
            self._poller.remove(descriptor)
        local_rank.close()
        self._on_lost(local_rank.rank, why)

    def sample_stacks(
        self, tracker: InstanceTracker, ranks: Iterable[int], done: Callable[[], object] = lambda: None
    ) -> None:
        """Ask where the threads of these ranks are; `done` is called once the tracker knows."""
        here = {rank: self.local_ranks[rank] for rank in ranks if rank in self.local_ranks}  # some may yet be joining
        asked = {rank: one.sample_stack for rank, one in here.items() if one.sample_stack is not None}
        left = set(asked)

        def record(rank: int, text: str) -> None:
            tracker.record_stack(rank, text, time.monotonic())
            if rank in left:
                left.discard(rank)
                if not left:
                    done()

        def take(rank: int, text: str) -> None:
            self._poller.call_soon_threadsafe(partial(record, rank, text))

        for rank, sample in asked.items():
            sample(partial(take, rank))
        if not asked:
            done()

    def poll(self) -> None:
        """Takes what clients have sent until now, before something is decided that depends on it."""
        for local_rank in list(self.local_ranks.values()):
            for _ in range(messages.MAX_OUTSTANDING):  # no client keeps the group loop here
                if not self._read(local_rank):
                    break

    @property
    def has_no_clients(self) -> bool:
        return all(local_rank.closed for local_rank in self.local_ranks.values())

    def close(self) -> None:
        for local_rank in self.local_ranks.values():
            local_rank.close()
        self._buffer = bytearray()  # a group loop is a cycle, and is collected late

    def _send_arena(self, local_rank: LocalRank, arena: Arena) -> None:
        self.send(
            local_rank,
            messages.encode_arena(messages.MessageType.ARENA, arena.number, arena.size),
            arena.shared_descriptor,
        )

    def _on_event(self, local_rank: LocalRank, events: int) -> None:
        if events & select.POLLOUT and local_rank.doorbell is not None and not local_rank.flush():
            self._poller.change(local_rank.doorbell.fileno(), self._poll_events(local_rank))
        if events & (select.POLLIN | HANGUP_EVENTS):
            self._read(local_rank)

    def _read(self, local_rank: LocalRank) -> bool:
        """Takes one message; False where none was there."""
        if local_rank.doorbell is None:
            return False
        try:
            length = local_rank.doorbell.recv_into(self._buffer)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it ended with messages unread; those that it had sent before are still there
            return self._read(local_rank)
        except OSError:
            length = 0
        if not length:
            self.drop(local_rank, "its process ended or closed its connection")
            return False
        return self.receive(local_rank, bytes(memoryview(self._buffer)[:length]))

    def receive(self, local_rank: LocalRank, data: bytes) -> bool:
        """Takes a message of a client; False where it is the last."""
        return self.carry_out(local_rank, partial(self._on_message, local_rank, data))

    def carry_out(self, local_rank: LocalRank, asked: Callable[[], object]) -> bool:
        """Do what a client has asked for; False where it may not, and is let go."""
        try:
            asked()
        except (messages.MalformedMessage, OutOfOrder) as error:
            uid = get_unix_peer(local_rank.doorbell).uid if local_rank.doorbell is not None else None
            self._refusals.count_malformed(MessageSource.DOORBELL, uid)
            self.drop(local_rank, f"it sent something malformed: {error}")
            return False
        return True
