"""Posts: sends and recvs between two ranks, apart from the group's instances.

A letter is taken from its sender at once: into a slot of its receiver where that is local, else over a link to the
receiver's worker, which keeps it until somebody asks for it. So two ranks that both send first and then receive both
complete. Letters of one address (receiver, sender, tag) keep their order; a send is complete when nobody reads its
memory any more, a recv when its letter is there. What waits when a verdict comes fails a moment later, for letters of
a rank that has left may still be on their way; where a rank has left in order, only what waits for it.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from collectived_proto.codec import collective_from_proto
from collectived_proto.errors import Code, InvalidArgumentError
from collectived_proto.ipc import messages
from collectived_proto.types import Recv, Send, Verdict
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine.base.arenas import MemoryBudget, MemoryExhausted, ResultArenas, ResultSlot
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import InputBuffers, LocalRank
from collectived_runtime.engine.compile import negotiation
from collectived_runtime.engine.compile.program import CHANNELS
from collectived_runtime.engine.record.counters import POINT_TO_POINT
from collectived_runtime.engine.record.group_records import GroupRecords
from collectived_runtime.engine.run import message as letters
from collectived_runtime.engine.run.host_task import copy_in_stretches
from collectived_runtime.engine.run.links import PeerNetwork
from collectived_runtime.engine.run.schedule import YIELD_NOW, Wait
from collectived_runtime.engine.run.streams import (
    OutgoingMessage,
    ReceiveStream,
    SendStream,
    accept_links,
    make_dialer,
)
from collectived_runtime.engine.submit.tracker import OutOfOrder, PreparedCollective
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import BytesLike, Link, LinkBroken, LinkProtocolError

CHANNEL = CHANNELS  # the one after those of tasks
UNEXPECTED_MEMORY_DIVISOR = 4  # letters that nobody has asked for may take one part in so many of the worker's memory
LAST_MESSAGES_SECONDS = 0.1  # after a verdict
_WORKER = -1  # holds the slots of letters that nobody has asked for yet


@dataclass(slots=True, eq=False)
class PendingOp:
    """A send or recv that somebody waits for. `peer` is the rank at its other end."""

    rank: int
    number: int
    prepared: PreparedCollective
    peer: int
    deadline: float
    timeout: float
    submitted_at: float
    stall_at: float
    overdue: bool = False  # reported
    stalled: bool = False  # the same

    @property
    def tag(self) -> int:
        operation = self.prepared.collective.operation
        assert isinstance(operation, (Send, Recv))
        return operation.tag

    @property
    def description(self) -> str:
        """`recv(source=0, tag=3) at train.py:8`"""
        site = self.prepared.collective.site
        return f"{self.prepared.op}{f' at {site}' if site else ''}"


class PeerReports(Protocol):
    """What is told when something is wrong between two ranks: they are named as (rank, peer)."""

    def report_overdue(self, rank: int, peer: int, timeout: float, text: str) -> None: ...

    def report_unclaimed(self, rank: int, peer: int, text: str) -> None: ...

    def report_unanswered(self, rank: int, peer: int, waited: float, text: str) -> None: ...

    def report_if_departed(self, rank: int, peer: int, text: str) -> None: ...

    def mark_worker_gone(self, task: int) -> None: ...


@dataclass(frozen=True, slots=True)
class PointToPointContext:
    """What sends and receives of one generation use of their group loop."""

    network: PeerNetwork
    doorbells: Doorbells
    results: ResultArenas
    budget: MemoryBudget
    records: GroupRecords
    stall_after: float


class PointToPoint:
    """Of one generation. Runs in the group loop's thread.

    Args:
        fail: tells a rank that one of its posts has failed.
        broken: told when a peer is gone.
    """

    def __init__(
        self,
        context: PointToPointContext,
        reports: PeerReports,
        fail: Callable[[LocalRank, int, Verdict], None],
        broken: Callable[[LinkBroken], None],
    ) -> None:
        self._context = context
        self._network = context.network
        self._generation = context.network.generation
        self._hand_back_link = context.network.make_handback()
        self._reporter = reports
        self._fail = fail
        self._broken = broken
        self._next: dict[int, int] = {}  # by rank, the number of its next post
        self._pending: dict[tuple[int, int], PendingOp] = {}  # by rank and number
        self._outstanding: Counter[int] = Counter()  # how many of them each rank has
        self._timers: list[tuple[float, int, int]] = []  # a heap: when a post is looked at next, its rank and number
        self._next_reports: dict[tuple[int, int], float] = {}  # by rank and peer, when a stall is told again
        self._posted_receives: dict[letters.MessageAddress, deque[PendingOp]] = {}  # recvs whose letter has not come
        self._unexpected: dict[letters.MessageAddress, deque[ResultSlot]] = {}  # letters that nobody has asked for
        self._arriving: dict[Link, ResultSlot] = {}
        self._local_copies: deque[Iterator[Wait]] = deque()
        self._out: dict[int, SendStream] = {}  # by place
        self._in: list[ReceiveStream] = []
        # The verdict on all of this, and when it is carried out; the same for posts with a rank that has left in order.
        self._final_verdict: tuple[Verdict, float] | None = None
        self._departure_verdicts: dict[int, tuple[Verdict, float]] = {}
        self._closed = False
        accept_links(context.network, CHANNEL, self._on_link)

    @property
    def idle(self) -> bool:
        """Whether nothing of what was submitted here is still on its way, or need arrive any more."""
        if self._pending or self._local_copies:
            return False
        return self._final_verdict is not None or all(way.idle for way in self._out.values())

    @property
    def pending(self) -> list[PendingOp]:
        """What somebody waits for; may be read from any thread."""
        return list(self._pending.values())

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received over links of their own; may be read from any thread."""
        return sum(way.bytes_sent for way in list(self._out.values())), sum(
            way.bytes_received for way in list(self._in)
        )

    # From ranks

    def submit(self, local_rank: LocalRank, submission: messages.Submit, prepared: PreparedCollective) -> None:
        """A rank submits a send or a recv.

        Raises:
            OutOfOrder: it skips a number, or has too many outstanding.
        """
        expected = self._next.get(local_rank.rank, messages.P2P_BASE)
        if submission.instance < expected:
            for message in local_rank.get_outcomes(submission.instance):
                self._context.doorbells.send(local_rank, message)
            return
        mine = self._outstanding[local_rank.rank]
        if submission.instance > expected or mine >= messages.MAX_P2P_OUTSTANDING:
            number = submission.instance - messages.P2P_BASE
            raise OutOfOrder(f"rank {local_rank.rank} submitted send or recv {number} with {mine} outstanding")
        self._next[local_rank.rank] = submission.instance + 1
        operation = prepared.collective.operation
        now = time.monotonic()
        deadline = now + submission.remaining if submission.remaining else math.inf
        times = (deadline, submission.timeout, now, now + self._context.stall_after)
        match operation:
            case Send(to, tag):
                sources = local_rank.resolve_inputs(prepared, submission)
                self._send(
                    local_rank,
                    PendingOp(local_rank.rank, submission.instance, prepared, to, *times),
                    (to, local_rank.rank, tag),
                    sources,
                )
            case Recv(source, tag):
                self._receive(
                    PendingOp(local_rank.rank, submission.instance, prepared, source, *times),
                    (local_rank.rank, source, tag),
                )
            case _:
                raise messages.MalformedMessage(f"{operation} numbered as a send or recv")

    def drop_receiver(self, rank: int) -> None:
        """This rank asks for nothing any more; what it has sent goes on."""
        for address in [address for address in self._unexpected if address[0] == rank]:
            for slot in self._unexpected.pop(address):
                self._context.results.release(slot.number, _WORKER)
        for key in [key for key, post in self._pending.items() if key[0] == rank]:
            if isinstance(self._pending[key].prepared.collective.operation, Recv):
                self._cancel_receive(self._remove(*key))

    def report_departed_peers(self) -> None:
        """Somebody has left: what waits for them does so in vain."""
        for post in self._pending.values():
            self._reporter.report_if_departed(post.rank, post.peer, post.description)

    def _on_peer_gone(self, task: int) -> None:
        """A worker has parted, for none of its ranks will send or receive any more."""
        self._reporter.mark_worker_gone(task)
        self.report_departed_peers()

    def discard(self, rank: int) -> None:
        """The memory of this rank must not be read any more."""
        for way in self._out.values():
            way.discard(rank)
        self._local_copies.clear()  # the generation is over; letters between local ranks go with it

    # What is due

    def advance(self) -> bool:
        """Copies on; whether there is more to copy."""
        if self._local_copies and next(self._local_copies[0], None) is None:
            self._local_copies.popleft()
        return bool(self._local_copies)

    def next_deadline(self) -> float:
        """When `on_timer` has something to do; inf where nothing is to come."""
        if not self._pending:
            return math.inf
        while self._timers and self._timers[0][1:] not in self._pending:
            heapq.heappop(self._timers)
        times = [self._timers[0][0] if self._timers else math.inf]
        if self._final_verdict or self._departure_verdicts:
            times += [ending[1] for post in self._pending.values() if (ending := self._find_verdict(post)) is not None]
        return min(times)

    def on_timer(self, now: float) -> None:
        if self._final_verdict or self._departure_verdicts:
            self._fail_by_verdicts(now)
        while self._timers and self._timers[0][0] <= now:
            post = self._pending.get(heapq.heappop(self._timers)[1:])
            if post is None:
                continue
            if post.deadline <= now and not post.overdue:
                post.overdue = True
                self._reporter.report_overdue(post.rank, post.peer, post.timeout, post.description)
            elif post.stall_at <= now:
                self._on_stalled(post, now)
            self._set_timer(post)

    def _set_timer(self, post: PendingOp) -> None:
        if len(self._timers) > 2 * len(self._pending) + 64:  # most of them are over
            self._timers = sorted(timer for timer in self._timers if timer[1:] in self._pending)
        due = post.stall_at if post.overdue else min(post.stall_at, post.deadline)
        heapq.heappush(self._timers, (due, post.rank, post.number))

    def _on_stalled(self, post: PendingOp, now: float) -> None:
        """A post has waited long. Of many that wait for one peer only one is told at a time."""
        waited = now - post.submitted_at
        self._context.records.counters.stalls += not post.stalled
        post.stalled = True
        post.stall_at = now + max(self._context.stall_after, waited)  # again after twice the time
        if now >= self._next_reports.get((post.rank, post.peer), 0.0):
            self._next_reports[post.rank, post.peer] = now + self._context.stall_after
            self._reporter.report_unanswered(post.rank, post.peer, waited, post.description)

    def _fail_by_verdicts(self, now: float) -> None:
        for post in list(self._pending.values()):
            ending = self._find_verdict(post)
            if ending is None or ending[1] > now:
                continue
            self._cancel_receive(self._remove(post.rank, post.number))
            for way in self._out.values():  # its caller may use its memory again
                way.discard(post.rank, post.number)
            if self._final_verdict is not None:
                self._local_copies.clear()
            self._record(post, ending[0])
            self._context.records.counters.count_failure(
                post.prepared.collective.operation, POINT_TO_POINT, ending[0].code
            )
            self._fail(self._context.doorbells.local_ranks[post.rank], post.number, ending[0])

    def _add(self, post: PendingOp) -> None:
        self._pending[post.rank, post.number] = post
        self._outstanding[post.rank] += 1
        self._set_timer(post)

    def _remove(self, rank: int, number: int) -> PendingOp:
        self._outstanding[rank] -= 1
        return self._pending.pop((rank, number))

    def apply_verdict(self, verdict: Verdict) -> None:
        last_letters = 0.0 if verdict.code == Code.DEADLINE_EXCEEDED else LAST_MESSAGES_SECONDS  # they had their time
        carried_out = (verdict, time.monotonic() + last_letters)
        if verdict.orderly:
            for member in verdict.missing:
                self._departure_verdicts.setdefault(member.rank, carried_out)
        elif self._final_verdict is None:
            self._final_verdict = carried_out

    def _find_verdict(self, post: PendingOp) -> tuple[Verdict, float] | None:
        """The verdict by which a post fails, and when."""
        return self._final_verdict or self._departure_verdicts.get(post.peer)

    def close(self) -> None:
        self._closed = True
        for way_out in self._out.values():
            way_out.close()
        for way_in in self._in:
            way_in.close()
        for slot in [*self._arriving.values(), *(slot for box in self._unexpected.values() for slot in box)]:
            self._context.results.release(slot.number, _WORKER)
        self._arriving.clear()
        self._unexpected.clear()
        self._local_copies.clear()

    def _cancel_receive(self, post: PendingOp) -> None:
        for asking in self._posted_receives.values():
            if post in asking:
                asking.remove(post)

    # Sending

    def _send(
        self, local_rank: LocalRank, post: PendingOp, address: letters.MessageAddress, sources: InputBuffers
    ) -> None:
        ending = self._find_verdict(post)
        if ending is not None:
            self._fail(local_rank, post.number, ending[0])
            return
        self._add(post)
        collective = post.prepared.collective
        description = negotiation.encode_announcement(collective)
        leaves = [sources.leaf(index) for index in range(len(collective.leaves))]
        topology = self._network.topology
        place = topology.place_of(post.peer)
        if place == topology.place:
            self._local_copies.append(
                self._copy_locally(post, address, letters.MessageLayout.for_collective(collective, description), leaves)
            )
            return
        header = letters.encode_header(topology.group.key, self._generation, address, description, leaves)
        parts: deque[BytesLike] = deque([header, description, *(leaf.data for leaf in leaves if len(leaf))])
        if place not in self._out:
            reach = make_dialer(self._network, CHANNEL, place, lambda: self._closed)
            self._out[place] = SendStream(
                self._network.poller, reach, self._broken, self._hand_back_link, self._on_peer_gone
            )
        self._out[place].send(OutgoingMessage(post.rank, parts, lambda: self._complete_send(post), post.number))
        self._reporter.report_if_departed(post.rank, post.peer, post.description)

    def _copy_locally(
        self,
        post: PendingOp,
        address: letters.MessageAddress,
        form: letters.MessageLayout,
        leaves: Sequence[NDArray[np.uint8]],
    ) -> Iterator[Wait]:
        slot = self._allocate_slot(address, form)
        if slot is None:
            return
        for leaf, place in zip(leaves, form.prepare_slot(slot.memory), strict=True):
            yield from copy_in_stretches(leaf, place)
            yield YIELD_NOW
        self._complete_send(post)
        self._match_message(address, slot)

    def _complete_send(self, post: PendingOp) -> None:
        if (post.rank, post.number) in self._pending:
            self._remove(post.rank, post.number)
            self._record(post)
            self._count(post, sum(leaf.nbytes for leaf in post.prepared.collective.leaves))
            self._send_completion(post.rank, messages.Completion(post.number, 0, True, False))

    # Receiving

    def _on_link(self, link: Link) -> None:  # in the exchange's thread
        self._network.poller.call_soon_threadsafe(
            lambda: link.close() if self._closed else self._add_receive_stream(link), link.close
        )

    def _add_receive_stream(self, link: Link) -> None:
        def begin(frame: frames.Frame, description: bytes) -> Sequence[NDArray[np.uint8]] | None:
            form, address = self._parse_header(link, frame, description)
            slot = self._allocate_slot(address, form)
            if slot is None:
                return None
            self._arriving[link] = slot
            return form.prepare_slot(slot.memory)

        def arrived(frame: frames.Frame) -> None:
            self._match_message(letters.parse_address(frame), self._arriving.pop(link))

        def broken(error: LinkBroken) -> None:
            slot = self._arriving.pop(link, None)
            if slot is not None:
                self._context.results.release(slot.number, _WORKER)
            self._broken(error)

        kind = frames.FrameKind.MESSAGE
        self._in.append(ReceiveStream(self._network, link, kind, begin, arrived, broken, self._on_peer_gone))

    def _parse_header(
        self, link: Link, frame: frames.Frame, description: bytes
    ) -> tuple[letters.MessageLayout, letters.MessageAddress]:
        """How a letter of a peer lies in a slot, and whom it is for; raises LinkBroken where it can be for nobody."""
        topology = self._network.topology
        address = letters.parse_address(frame)
        if (frame.key, frame.generation) != (topology.group.key, self._generation) or address[
            0
        ] not in topology.own_ranks:
            raise LinkProtocolError(f"a letter for rank {address[0]} of generation {frame.generation}")
        try:
            collective = collective_from_proto(common_pb2.Collective.FromString(description))
        except (DecodeError, InvalidArgumentError) as error:
            raise LinkProtocolError(f"a letter whose description cannot be read: {error}") from None
        if sum(leaf.nbytes for leaf in collective.leaves) != frame.offset:
            raise LinkProtocolError(f"a letter of {frame.offset} bytes, which is not what it describes")
        return letters.MessageLayout.for_collective(collective, description), address

    def _allocate_slot(self, address: letters.MessageAddress, form: letters.MessageLayout) -> ResultSlot | None:
        """Memory for a letter; where there is none, its sender is at fault."""
        receiver, sender, tag = address
        try:
            if not self._posted_receives.get(address):
                self._check_unexpected_limit(form.size)
            return self._context.results.acquire(form.size, (_WORKER,))
        except (MemoryExhausted, OSError) as error:
            self._reporter.report_unclaimed(receiver, sender, f"{form.size} bytes with tag {tag}: {error}")
            return None

    def _check_unexpected_limit(self, size: int) -> None:
        """Raises MemoryExhausted where letters that nobody has asked for would take more than their share of memory."""
        kept = sum(slot.size for box in self._unexpected.values() for slot in box)
        kept += sum(slot.size for slot in self._arriving.values())
        most = self._context.budget.limit // UNEXPECTED_MEMORY_DIVISOR
        if kept + size > most:
            raise MemoryExhausted(f"{kept} bytes wait to be received already, and {most} may")

    def _match_message(self, address: letters.MessageAddress, slot: ResultSlot) -> None:
        """A letter is there: for the first who asks."""
        asking = self._posted_receives.get(address)
        receiver = self._context.doorbells.local_ranks.get(address[0])  # None: its join is not through yet
        if asking:
            self._complete_receive(asking.popleft(), slot)
        elif receiver is not None and receiver.closed:
            self._context.results.release(slot.number, _WORKER)
        else:
            self._unexpected.setdefault(address, deque()).append(slot)

    def _receive(self, post: PendingOp, address: letters.MessageAddress) -> None:
        self._add(post)
        box = self._unexpected.get(address)
        if box:
            self._complete_receive(post, box.popleft())
            if not box:
                del self._unexpected[address]
            return
        self._posted_receives.setdefault(address, deque()).append(post)
        self._reporter.report_if_departed(post.rank, post.peer, post.description)

    def _complete_receive(self, post: PendingOp, slot: ResultSlot) -> None:
        self._remove(post.rank, post.number)
        self._record(post, nbytes=slot.size)
        self._count(post, 0)  # its sender's worker has counted it
        slot.holders.add(post.rank)
        self._context.results.release(slot.number, _WORKER)
        self._send_completion(
            post.rank, messages.Completion(post.number, 0, True, True, slot.arena.number, slot.offset, slot.number)
        )

    def _record(self, post: PendingOp, verdict: Verdict | None = None, nbytes: int = 0) -> None:
        nbytes = nbytes or sum(leaf.nbytes for leaf in post.prepared.collective.leaves)
        self._context.records.recorder.record_point_to_point(self._generation, post, nbytes, verdict)

    def _count(self, post: PendingOp, nbytes: int) -> None:
        operation = post.prepared.collective.operation
        self._context.records.counters.count_completed(
            operation, POINT_TO_POINT, nbytes, time.monotonic() - post.submitted_at
        )

    def _send_completion(self, rank: int, done: messages.Completion) -> None:
        local_rank = self._context.doorbells.local_ranks[rank]
        message = done.encode()
        local_rank.record_outcome(done.instance, message)
        self._context.doorbells.send(local_rank, message)
