"""Posts: sends and recvs between two ranks, apart from the group's instances.

A letter is taken from its sender at once: into a slot of its receiver where that is local, else over a link to the
receiver's worker, which keeps it until a recv asks for it. So two ranks that both send first and then receive both
complete. Letters of one address (receiver, sender, tag) keep their order (`matcher.py`); a send is complete when no
thread reads its memory any more, a recv when its letter is there. Posts that wait when a verdict comes fail a moment
later, for letters of a rank that has left may still be on their way; where a rank has left in order, only posts that
wait for it. A receive that is cancelled, or whose time is over, ends alone: later letters are for others.

A rank that *matches by itself* gets each letter at once, and its worker only watches what it says that it waits for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.ipc.matcher import Matcher
from collectived_proto.ipc.rank_messages import Unclaimed
from collectived_proto.types import ANY_SOURCE, Recv, Send, Verdict
from collectived_runtime.engine.base.arenas import ResultArenas, ResultSlot
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import InputBuffers, LocalRank
from collectived_runtime.engine.compile.program import CHANNELS
from collectived_runtime.engine.p2p.deliveries import Deliveries
from collectived_runtime.engine.p2p.descriptions import SentDescriptions, read_layout
from collectived_runtime.engine.p2p.message_memory import WORKER, MessageMemory
from collectived_runtime.engine.p2p.pending_ops import PeerReports, PendingOp, PendingOps
from collectived_runtime.engine.p2p.rank_links import RankLinkLender
from collectived_runtime.engine.record.counters import POINT_TO_POINT
from collectived_runtime.engine.record.group_records import GroupRecords
from collectived_runtime.engine.run import message as letters
from collectived_runtime.engine.run.host_task import copy_in_stretches
from collectived_runtime.engine.run.links import PeerNetwork
from collectived_runtime.engine.run.path_watch import PathWatch
from collectived_runtime.engine.run.streams import (
    OutgoingMessage,
    ReceiveStream,
    SendStream,
    accept_links,
    make_dialer,
)
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.tracker import OutOfOrder
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import BytesLike, Link, LinkBroken, LinkProtocolError

CHANNEL = CHANNELS  # the one after those of tasks


@dataclass(frozen=True, slots=True)
class PointToPointContext:
    """The parts of a group loop that sends and receives of one generation use."""

    network: PeerNetwork
    doorbells: Doorbells
    results: ResultArenas
    budget: MemoryBudget
    records: GroupRecords
    stall_after: float


class PointToPoint:
    """Of one generation. Runs in the group loop's thread.

    Attributes:
        ops: the sends and recvs that ranks wait for.

    Args:
        fail: notifies a rank that one of its sends or receives has failed.
        broken: called when a peer is gone.
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
        size = context.network.topology.group.size
        self.ops = PendingOps(self._generation, size, reports, context.records, context.stall_after)
        self._matcher: Matcher[PendingOp, ResultSlot] = Matcher()
        self._matching: set[int] = set()  # ranks that match by themselves
        self._memory = MessageMemory(context.results, context.budget)
        most = self._memory.most_unexpected // len(context.network.topology.own_ranks)
        self._rank_links = RankLinkLender(context.network, context.doorbells, most)
        self._deliveries = Deliveries(self._generation, context.doorbells, self._memory)
        self._local_copies: dict[int, deque[Iterator[bool]]] = {}  # by receiver
        self._out: dict[int, SendStream] = {}  # by place
        self._in: list[ReceiveStream] = []
        self._descriptions = SentDescriptions()
        self._path_watch = PathWatch(context.network.path_timeout)
        self._closed = False
        accept_links(context.network, CHANNEL, self._on_link)

    @property
    def idle(self) -> bool:
        """Whether nothing of what was submitted here is still on its way, or need arrive any more."""
        if self.ops or self._local_copies:
            return False
        return self.ops.final_verdict is not None or all(way.idle for way in self._out.values())

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received over links of their own; may be read from any thread."""
        return sum(way.bytes_sent for way in list(self._out.values())), sum(
            way.bytes_received for way in list(self._in)
        )

    # From ranks

    def submit(self, local_rank: LocalRank, submission: messages.Submit, prepared: PreparedCollective) -> None:
        """A rank submits a send or a recv, or says that it waits for one that it carries out by itself.

        Raises:
            OutOfOrder: it skips a number, or has too many outstanding.
            MalformedMessage: a rank that matches by itself is to receive.
        """
        matches = local_rank.rank in self._matching
        if submission.watched:
            self._watch(local_rank, submission, prepared)
            return
        expected = self._next.get(local_rank.rank, messages.P2P_BASE)
        if submission.instance < expected:
            for message in local_rank.get_outcomes(submission.instance):
                self._context.doorbells.send(local_rank, message)
            return
        if submission.instance > expected and not matches:  # else it has carried out those between by itself
            number = submission.instance - messages.P2P_BASE
            raise OutOfOrder(f"rank {local_rank.rank} submitted send or recv {number} out of turn")
        if matches and isinstance(prepared.collective.operation, Recv):
            raise messages.MalformedMessage(f"{prepared.op} of rank {local_rank.rank}, which matches by itself")
        post = self.ops.make(local_rank.rank, submission, prepared)
        self._next[local_rank.rank] = submission.instance + 1
        if isinstance(prepared.collective.operation, Send):
            sources = local_rank.resolve_inputs(prepared, submission)
            self._send(local_rank, post, (post.peer, post.rank, post.tag), sources)
        else:
            self._receive(post)

    def _watch(self, local_rank: LocalRank, submission: messages.Submit, prepared: PreparedCollective) -> None:
        if not self.ops and len(self._network.topology.peers) > 1:
            self._path_watch.start()
        if verdict := self.ops.watch(local_rank.rank, submission, prepared):
            self._fail(local_rank, submission.instance, verdict)

    def hand_over(self, local_rank: LocalRank) -> None:
        """A rank matches by itself from now on: it gets what has come for it, and what comes.

        Raises:
            MalformedMessage: it has submitted receives for this worker to match.
        """
        rank = local_rank.rank
        if rank in self._matching or local_rank.doorbell is None:
            return
        if any(post.rank == rank and self._matcher.withdraw(post) for post in self.ops.posts):
            raise messages.MalformedMessage(f"rank {rank} matches by itself, and has submitted receives")
        self._matching.add(rank)
        for sender, tag, slot in self._matcher.take_messages(rank):
            self._match_message((rank, sender, tag), slot)
        self._rank_links.begin(rank)

    def part(self, rank: int, *, is_lost: bool) -> None:
        """A rank has left, or is lost: it carries out nothing by itself any more."""
        self.ops.drop_watched(rank)
        self._rank_links.end(rank, is_lost=is_lost)

    def withdraw(self, local_rank: LocalRank, request: messages.Withdrawal) -> None:
        """A rank takes a receive back, or says that it has, in a segment.

        Where it has ended its rank gets the outcome.
        """
        post = self.ops.find(local_rank.rank, request.instance)
        if post is None or request.generation != self._generation:
            return
        if self._matcher.withdraw(post):
            self._end_receive(post, Code.CANCELLED)
        elif request.code and isinstance(post.prepared.collective.operation, Recv):
            self.ops.remove(post.rank, post.number)
            self.ops.record(post, code=request.code)

    def settle(self, rank: int, number: int) -> None:
        """A rank in a segment says that what it waited for has come."""
        post = self.ops.find(rank, number)
        if post is not None:
            self._matcher.withdraw(post)  # of a rank that says so though its worker carries messages
            self.ops.record(self.ops.remove(rank, number))

    def report_unclaimed(self, local_rank: LocalRank, told: Unclaimed) -> None:
        """A rank that matches by itself has no room for a message that comes over a rank link."""
        self._context.doorbells.throttle(local_rank)
        if told.generation == self._generation and told.source < self._network.topology.group.size:
            text = f"{told.nbytes} bytes with tag {told.tag}: {told.kept} bytes wait to be received already"
            self._reporter.report_unclaimed(local_rank.rank, told.source, text)

    def report_overdue(self, local_rank: LocalRank, overdue: messages.OverdueReceive) -> None:
        """A rank in a segment says that by its deadline only a part of a message has come."""
        post = self.ops.find(local_rank.rank, overdue.instance)
        known = overdue.generation == self._generation and overdue.source < self._network.topology.group.size
        if post is not None and known and not post.overdue:
            post.overdue = True
            self._reporter.report_overdue(post.rank, overdue.source, post.timeout, post.description)

    def drop_receiver(self, rank: int) -> None:
        """Drop the receives of a rank that has gone; its sends go on."""
        for _, _, slot in self._matcher.take_messages(rank):
            self._memory.release(slot)
        for post in self.ops.posts:
            if post.rank == rank and isinstance(post.prepared.collective.operation, Recv):
                self._matcher.withdraw(self.ops.remove(rank, post.number))

    def _on_peer_gone(self, task: int) -> None:
        """A worker has parted, for none of its ranks will send or receive any more."""
        self._reporter.mark_worker_gone(task)
        self.ops.report_departed_peers()

    def discard(self, rank: int) -> None:
        """The memory of this rank must not be read any more."""
        for way in self._out.values():
            way.discard(rank)
        self._local_copies.clear()  # the generation is over; letters between local ranks go with it

    # Due reports

    def advance(self) -> bool:
        """Go on with what waited for ranks to read or release, and copy; whether there is more to copy now."""
        self._deliveries.advance()
        if self._memory.is_awaited:
            for way in tuple(self._in):
                way.resume()
        is_copying = False
        for receiver, copies in list(self._local_copies.items()):
            goes_on = next(copies[0], None)
            if goes_on is None:
                copies.popleft()
                if not copies:
                    self._local_copies.pop(receiver, None)
            is_copying |= goes_on is not False and bool(copies)
        return is_copying

    def next_deadline(self) -> float:
        """When `on_timer` or `advance` has something to do; inf where no rank and no message waits."""
        if not self.ops:
            self._path_watch.stop()
            return self._memory.next_deadline
        return min(self.ops.next_deadline(), self._path_watch.next_deadline, self._memory.next_deadline)

    def _add(self, post: PendingOp) -> None:
        if not self.ops:
            self._path_watch.start()
        self.ops.add(post)

    def on_timer(self, now: float) -> None:
        if self.ops and (dead := self._path_watch.look(self._list_awaited_links(), now)) is not None:
            self._broken(dead)
        for post, verdict in self.ops.pop_failed(now):
            self._matcher.withdraw(post)
            for way in self._out.values():  # its caller may use its memory again
                way.discard(post.rank, post.number)
            if self.ops.final_verdict is not None:
                self._local_copies.clear()
            self._fail(self._context.doorbells.local_ranks[post.rank], post.number, verdict)
        for post in self.ops.on_timer(now):
            self._matcher.withdraw(post)
            self._end_receive(post, Code.DEADLINE_EXCEEDED)

    def _list_awaited_links(self) -> list[Link]:
        """Those over which something is to leave, or to come for a rank that waits for it."""
        topology = self._network.topology
        receives = [post for post in self.ops.posts if isinstance(post.prepared.collective.operation, Recv)]
        takes_any = any(post.peer == ANY_SOURCE for post in receives)
        senders = {topology.peers[topology.place_of(p.peer)].task for p in receives if p.peer != ANY_SOURCE}
        leaving = [way.link for way in self._out.values() if not way.idle]
        coming = [way.link for way in self._in]
        awaited = [link for link in coming if link is not None and (takes_any or link.peer in senders)]
        lent = self._rank_links.list_awaited(self.ops.posts)
        return [link for link in leaving if link is not None] + awaited + lent

    def close(self) -> None:
        self._closed = True
        self._path_watch.stop()
        for way_out in self._out.values():
            way_out.close()
        for way_in in self._in:
            way_in.close()
        self._rank_links.close()
        self._deliveries.close()
        self._memory.close()
        for slot in self._matcher.list_messages():
            self._memory.release(slot)
        self._matcher = Matcher()
        self._local_copies.clear()

    # Sending

    def _send(
        self, local_rank: LocalRank, post: PendingOp, address: letters.MessageAddress, sources: InputBuffers
    ) -> None:
        ending = self.ops.find_verdict(post)
        if ending is not None:
            self._fail(local_rank, post.number, ending[0])
            return
        self._add(post)
        collective = post.prepared.collective
        description = self._descriptions.encode(post.prepared)
        leaves = [sources.leaf(index) for index in range(len(collective.leaves))]
        topology = self._network.topology
        place = topology.place_of(post.peer)
        if place == topology.place:
            form = letters.MessageLayout.for_collective(collective, description)
            copies = self._local_copies.setdefault(post.peer, deque())
            copies.append(self._copy_locally(post, address, form, leaves))
            self._rank_links.note_send(post.rank, post.peer)
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
        self._rank_links.note_send(post.rank, post.peer)

    def _copy_locally(
        self,
        post: PendingOp,
        address: letters.MessageAddress,
        form: letters.MessageLayout,
        leaves: Sequence[NDArray[np.uint8]],
    ) -> Iterator[bool]:
        """Copy step by step; each yield says whether it can go on at once."""
        try:
            while (slot := self._allocate_slot(post, address, form)) is None:
                if self._memory.is_refused(post):
                    return
                yield False
        finally:
            self._memory.forget(post)
        for leaf, place in zip(leaves, form.prepare_slot(slot.memory), strict=True):
            for _ in copy_in_stretches(leaf, place):
                yield True
            yield True
        self._complete_send(post)
        self._match_message(address, slot)

    def _complete_send(self, post: PendingOp) -> None:
        if (post.rank, post.number) in self.ops:
            self.ops.remove(post.rank, post.number)
            self.ops.record(post)
            self._count(post, sum(leaf.nbytes for leaf in post.prepared.collective.leaves))
            self._send_outcome(post.rank, post.number, messages.Completion(post.number, 0, True, False).encode())

    # Receiving

    def _on_link(self, link: Link) -> None:  # in the exchange's thread
        self._network.poller.call_soon_threadsafe(
            lambda: link.close() if self._closed else self._add_receive_stream(link), link.close
        )

    def _add_receive_stream(self, link: Link) -> None:
        def begin(frame: frames.Frame, description: bytes) -> Sequence[NDArray[np.uint8]] | None:
            form, address = self._parse_header(link, frame, description)
            slot = self._allocate_slot(link, address, form)
            if slot is None:
                return None
            self._memory.arriving[link] = slot
            return form.prepare_slot(slot.memory)

        def arrived(frame: frames.Frame) -> None:
            self._match_message(letters.parse_address(frame), self._memory.arriving.pop(link))

        def broken(error: LinkBroken) -> None:
            self._memory.forget(link)
            self._broken(error)

        kind = frames.FrameKind.MESSAGE
        self._in.append(ReceiveStream(self._network, link, kind, begin, arrived, broken, self._on_peer_gone))

    def _parse_header(
        self, link: Link, frame: frames.Frame, description: bytes
    ) -> tuple[letters.MessageLayout, letters.MessageAddress]:
        """How a letter of a peer lies in a slot, and its receiver; raises LinkBroken where it can have none."""
        topology = self._network.topology
        address = letters.parse_address(frame)
        if (frame.key, frame.generation) != (topology.group.key, self._generation) or address[
            0
        ] not in topology.own_ranks:
            raise LinkProtocolError(f"a message for rank {address[0]}, which is not of this generation on this worker")
        return read_layout(description, frame.offset), address

    def _allocate_slot(
        self, message: object, address: letters.MessageAddress, form: letters.MessageLayout
    ) -> ResultSlot | None:
        """Memory for a letter; None: there is none yet, or its sender is at fault.

        Args:
            message: stands for the letter, or for what it comes on.
        """
        receiver, sender, tag = address

        def report(error: Exception) -> None:
            self._reporter.report_unclaimed(receiver, sender, f"{form.size} bytes with tag {tag}: {error}")

        def measure_unexpected() -> int:
            return sum(slot.size for slot in self._matcher.list_messages())

        counted = None if self._matcher.expects(*address) else measure_unexpected
        matching = self._context.doorbells.local_ranks[receiver] if receiver in self._matching else None
        return self._memory.acquire(message, form.size, counted, matching, report)

    def _match_message(self, address: letters.MessageAddress, slot: ResultSlot) -> None:
        """Match a letter that has come with the first recv that asks for it."""
        receiver = self._context.doorbells.local_ranks.get(address[0])  # None: its join is not through yet
        if receiver is not None and receiver.closed:
            self._memory.release(slot)
            return
        if receiver is not None and receiver.rank in self._matching:
            self._deliveries.send(receiver, address, slot)
            return
        post = self._matcher.deliver(slot, *address)
        if post is not None:
            self._complete_receive(post, address[1], slot)

    def _receive(self, post: PendingOp) -> None:
        self._add(post)
        found = self._matcher.post(post, post.rank, post.peer, post.tag)
        if found is not None:
            self._complete_receive(post, *found)
        else:
            self._reporter.report_if_departed(post.rank, post.peer, post.description)

    def _end_receive(self, post: PendingOp, code: Code) -> None:
        """A receive ends alone, and has taken nothing."""
        self.ops.remove(post.rank, post.number)
        self.ops.record(post, code=code)
        self._send_outcome(post.rank, post.number, messages.Withdrawal(self._generation, post.number, code).encode())

    def _complete_receive(self, post: PendingOp, sender: int, slot: ResultSlot) -> None:
        self.ops.remove(post.rank, post.number)
        source = sender if post.peer == ANY_SOURCE else None
        post.peer = sender
        self.ops.record(post, nbytes=slot.size)
        self._count(post, 0)  # its sender's worker has counted it
        slot.holders.add(post.rank)
        self._context.results.release(slot.number, WORKER)
        place = slot.arena.number, slot.offset, slot.number
        done = messages.Completion(post.number, 0, True, True, *place, source=source)
        self._send_outcome(post.rank, post.number, done.encode())

    def _count(self, post: PendingOp, nbytes: int) -> None:
        operation = post.prepared.collective.operation
        self._context.records.counters.count_completed(
            operation, POINT_TO_POINT, nbytes, time.monotonic() - post.submitted_at
        )

    def _send_outcome(self, rank: int, number: int, message: bytes) -> None:
        local_rank = self._context.doorbells.local_ranks[rank]
        local_rank.record_outcome(number, message)
        self._context.doorbells.send(local_rank, message)
