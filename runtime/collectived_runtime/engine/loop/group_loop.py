"""A group loop: one thread per group generation and its successors, with one place where it waits.

That place is a `poll` over the doorbells and process descriptors of its members, the links of the group, and an eventfd
by which verdicts, links and requests of other threads arrive. Nothing else blocks: all sockets are non-blocking, and
what runs are generators (`run/task.py`) that say what they wait for. So a group loop always sees a verdict, a
death or a stray frame, even while it works. `generation.py` has the course of one generation.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from collectived_native.cores import count_cores
from collectived_proto.ipc import messages, rank_messages
from collectived_proto.types import Collective, GroupInfo, RankPosition, Verdict, unscoped_name, with_progress
from collectived_runtime.engine.base.arenas import ResultArenas, Workspace
from collectived_runtime.engine.base.memory_budget import MemoryExhausted
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients import segment as segments
from collectived_runtime.engine.clients.deferred_release import DeferredReleases
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.failure.segment_watch import SegmentWatch
from collectived_runtime.engine.failure.spanning_watch import SpanningWatch
from collectived_runtime.engine.gpu.input_events import InputEvents
from collectived_runtime.engine.gpu.stream_order import StreamOrder
from collectived_runtime.engine.loop.context import GroupContext, RankResources, WorkerContext
from collectived_runtime.engine.loop.execution import Execution
from collectived_runtime.engine.loop.generation import Generation
from collectived_runtime.engine.loop.programs import ProgramCache
from collectived_runtime.engine.p2p.pending_ops import PendingOp
from collectived_runtime.engine.record.counters import Counters
from collectived_runtime.engine.record.flight_recorder import GroupLabel, GroupRecorder
from collectived_runtime.engine.record.group_records import GroupRecords
from collectived_runtime.engine.record.rates import RateWindow
from collectived_runtime.engine.run.fold_pool import PoolClient
from collectived_runtime.engine.run.task import TaskTools
from collectived_runtime.engine.submit.tracker import InstanceTracker

log = logging.getLogger("collectived.group_loop")

_SUBMIT_KIND = int(messages.MessageType.SUBMIT)
_MOST, _MOST_P2P = messages.MAX_OUTSTANDING, messages.MAX_P2P_OUTSTANDING


class GroupLoop:
    """Serves one group on this worker, on a thread of its own. Public methods may be called from any thread.

    Raises:
        OSError, RuntimeError: there are no descriptors, or no thread, to be had for it.
    """

    def __init__(self, topology: GroupTopology, worker: WorkerContext) -> None:
        self.topology = topology
        self.name = unscoped_name(topology.group.name)
        self._worker = worker
        here = topology.peers[topology.place].host
        self._spare_cores = count_cores() - sum(peer.host == here for peer in topology.peers)
        self._poller = Poller()
        resources, ask = worker.resources, self._poller.call_soon_threadsafe
        self._doorbells = Doorbells(self._poller, self._on_message, self._on_client_lost, resources.rejections)
        self._budget = resources.budget
        self._results = ResultArenas(self._budget, self._doorbells, self._on_memory_grown)
        self._input_events = InputEvents(ask, self._doorbells.drop)
        self._ranks = RankResources(self._doorbells, self._results, self._input_events, StreamOrder(ask, self._send))
        wake = partial(ask, lambda: None)
        self._deferred_releases = DeferredReleases(self._doorbells.send)
        self._tools = TaskTools(
            Workspace(self._on_memory_grown),
            PoolClient(resources.fold_pool, wake),
            Counters(),
            wake,
            self._deferred_releases,
        )
        group, tasks = topology.group, tuple(peer.task for peer in topology.peers)
        places = tuple(tuple(peer.ranks) for peer in topology.peers)
        self.label = GroupLabel(self.name, group.key, group.size, topology.own_ranks, tasks, places)
        recorder = GroupRecorder(resources.recorder, self.label)
        self._records = GroupRecords(self._tools.counters, RateWindow(time.monotonic()), recorder)
        self._programs = ProgramCache(topology)
        self._context = GroupContext(
            topology, worker, self._poller, self._ranks, self._records, self._tools, self._programs
        )
        # Whether the ranks meet in a segment is decided once all of this worker are known.
        self.may_use_segment = segments.are_usable(topology)
        self._awaited_ranks = set(topology.own_ranks) if self.may_use_segment else set()
        self._past_verdicts: dict[int, Verdict] = {}  # how earlier generations of this group loop ended
        # Submissions to a generation that has not begun here, and verdicts about one.
        self._early_submissions: list[Callable[[], object]] = []
        self._early_verdicts: list[Verdict] = []
        self._stopping = False
        self._trim_at = math.inf  # when to look whether memory is idle
        self._last_done = 0  # how much had been done when that was looked at last
        self._generation = Generation(self._context, topology.group.generation, self._apply_verdict)
        self._traffic_base = (self._generation, 0, 0)  # bytes sent and received in the generations before it
        self._thread = threading.Thread(target=self._run, name=f"group loop {self.name}", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # no other code would give back the resources taken until here
            self._generation.close()
            self._poller.close()
            raise

    @property
    def group(self) -> GroupInfo:
        """The group in the generation that is current here, with what the local ranks have finished."""
        tracker = self.tracker
        members = list(self.topology.group.members)
        for rank, standing in list(tracker.progress.items()):
            members[rank] = with_progress(members[rank], standing.finished, standing.op, standing.site)
        return replace(self.topology.group, generation=tracker.generation, members=tuple(members))

    @property
    def local_ranks(self) -> dict[int, LocalRank]:
        return self._doorbells.local_ranks

    @property
    def tracker(self) -> InstanceTracker:
        """The tracker of the current generation."""
        return self._generation.tracker

    @property
    def execution(self) -> Execution | None:
        return self._generation.execution

    @property
    def pending_ops(self) -> list[PendingOp]:
        """Sends and recvs that ranks wait for."""
        return self._generation.point_to_point.ops.posts

    @property
    def stall_after(self) -> float:
        """Seconds after which what waits is said to stall."""
        return self._worker.stall_after

    @property
    def notes(self) -> list[str]:
        """Notes for users of this group, each once: `on CPU devices: …`."""
        return list(self._programs.notes)

    def note_hint(self, collective: Collective) -> None:
        """Add a note for users where NCCL is asked for and there are no GPUs."""
        if not self.topology.has_gpus:
            self._programs.note_hint(collective)

    @property
    def counters(self) -> Counters:
        return self._records.counters

    @property
    def rate_window(self) -> RateWindow:
        """The work of the last minute."""
        return self._records.rates

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from other workers, headers included; never more than has been."""
        generation, sent, received = self._traffic_base
        now = generation.traffic()
        return sent + now[0], received + now[1]

    # From other threads

    def add_local_rank(self, local_rank: LocalRank) -> None:
        """Expect a local rank that is about to connect its doorbell."""
        self._doorbells.expect(local_rank)

        def add() -> None:
            self._doorbells.add(local_rank, self._results.arenas)
            self._await_ranks(local_rank.rank)

        self._poller.call_soon_threadsafe(add)

    def mark_absent(self, rank: int, why: str) -> None:
        """Take note that a local rank will never connect."""

        def note() -> None:
            self._await_ranks(rank)
            self._on_client_lost(rank, why)

        self._poller.call_soon_threadsafe(note)

    def attach_doorbell(self, rank: int, doorbell: socket.socket) -> None:
        def attach() -> None:
            self._doorbells.attach(rank, doorbell, self._results.arenas)
            if not self._awaited_ranks:
                self._offer_segment(self.local_ranks[rank])

        self._poller.call_soon_threadsafe(attach, doorbell.close)

    def _await_ranks(self, rank: int) -> None:
        """Note that a rank has come, or will not. After the last one, ranks are sent where they meet."""
        if rank not in self._awaited_ranks:
            return
        self._awaited_ranks.discard(rank)
        if self._awaited_ranks:
            return
        if len(self.local_ranks) == len(self.topology.own_ranks) and segments.can_share(self.local_ranks.values()):
            self._open_segment()
        for local_rank in self.local_ranks.values():
            local_rank.redeem_pledge()
            self._offer_segment(local_rank)

    def _open_segment(self) -> None:
        current = self._generation
        try:
            parts = self._poller, current.tracker, current.reporter, self._doorbells, self._records, self._budget
            spans = len(self.topology.peers) > 1
            current.segment = SpanningWatch(*parts, current.submit) if spans else SegmentWatch(*parts)
        except (OSError, MemoryExhausted) as error:
            log.warning("group %s: its ranks cannot meet in shared memory: %s", self.name, error)

    def _offer_segment(self, local_rank: LocalRank) -> None:
        """Send a rank the segment of its generation, or that there is none."""
        if not (self.may_use_segment and local_rank.takes_segment) or local_rank.doorbell is None:
            return
        if self._generation.segment is not None:
            self._generation.segment.offer(local_rank)
        else:
            self._doorbells.send(local_rank, messages.encode_bare(messages.MessageType.NO_SEGMENT))

    def submit(self, rank: int, message: bytes) -> None:
        """Take a message of a rank without a doorbell, as it would come over one."""
        self._poller.call_soon_threadsafe(lambda: self._doorbells.receive(self._doorbells.local_ranks[rank], message))

    def expire_submission(self, rank: int, generation: int, instance: int, op: str, timeout: float) -> None:
        """Fail for all what a rank without a doorbell did not submit by its own deadline."""
        self._poller.call_soon_threadsafe(
            lambda: self._expire_submission(self._doorbells.local_ranks[rank], generation, instance, op, timeout)
        )

    def disconnect(self, rank: int, why: str) -> None:
        """Let a rank go whose session has ended."""
        self._poller.call_soon_threadsafe(lambda: self._doorbells.disconnect(self._doorbells.local_ranks[rank], why))

    def apply_verdict(self, verdict: Verdict) -> None:
        """The coordinator has decided."""
        self._poller.call_soon_threadsafe(lambda: self._hear_coordinator(verdict))

    def send_final_verdicts(self) -> None:
        """Send ranks now the error of their next collective: this worker is about to end."""
        self._poller.call_soon_threadsafe(lambda: self._generation.send_final_verdicts())

    def query_positions(self, instance: int, answer: Callable[[int, tuple[RankPosition, ...]], None]) -> None:
        """Call `answer(generation, positions)` in the group loop's thread."""

        def tell() -> None:
            self._generation.look_at_segment()
            answer(self._generation.number, self.tracker.positions(instance, time.monotonic()))
            self._doorbells.sample_stacks(self.tracker, self.tracker.seek(instance))

        self._poller.call_soon_threadsafe(tell)

    def request_look(self, looked: Callable[[], None], stacks: bool) -> bool:
        """Have the group loop take in what ranks have done by themselves in a segment and, with `stacks`, where the
        threads of those are that others wait for; then call `looked`. False where there is nothing to take in."""
        if self._generation.segment is None and not (stacks and self.tracker.awaited_ranks()):
            return False

        def look() -> None:
            self._generation.look_at_segment()
            self._doorbells.sample_stacks(self.tracker, self.tracker.awaited_ranks() if stacks else (), looked)

        self._poller.call_soon_threadsafe(look, looked)
        return True

    def resend_reports(self) -> None:
        """Report departures once more: the coordinator is back, and may not have received them."""
        self._poller.call_soon_threadsafe(lambda: self._generation.reporter.resend())

    def promise(self, generation: int, answer: Callable[[int, int], None]) -> None:
        """Call `answer` in the group loop's thread: nothing starts from an instance on before `set_waiting_joiners`.

        It is given that instance, and the first that no local rank has submitted.
        """

        def ask() -> None:
            if generation == self._generation.number:
                self._doorbells.poll()  # submissions before the question count
                self._generation.look_at_segment()
            if generation == self._generation.number:
                answer(*self._generation.waiting_joiners.promise())

        self._poller.call_soon_threadsafe(ask)

    def set_waiting_joiners(self, generation: int, from_instance: int, waiting: int) -> None:
        """Send ranks, from that instance on, how many processes wait to join the group; -1: nothing has changed."""

        def take() -> None:
            if generation == self._generation.number:
                self._set_waiting_joiners(from_instance, waiting)

        self._poller.call_soon_threadsafe(take)

    def _set_waiting_joiners(self, from_instance: int, waiting: int) -> None:
        segment = self._generation.segment
        if segment is None or segment.spans_hosts or from_instance < 0:
            self._generation.waiting_joiners.schedule(from_instance, waiting)
        else:
            self.tracker.release_promise()
            segment.set_waiting(waiting)

    def stop(self) -> None:
        """End the group loop now, and notify its peers that this is no fault."""
        self._poller.call_soon_threadsafe(self._request_stop)

    def join(self) -> None:
        self._thread.join()

    # The loop

    def _run(self) -> None:
        try:
            while not self._stopping:
                again = self._advance()
                if self._stopping:
                    break
                current = self._generation
                current.watch_links()
                due, rested = current.next_deadline(), self._doorbells.next_deadline
                until = 0.0 if again else min(due, rested, self._trim_at)
                self._poller.wait(until, self._should_spin(), current.find_wait())
                if (now := time.monotonic()) >= due:
                    self._doorbells.poll()  # messages of clients go before a deadline that has passed
                    self._generation.on_timer(now)
                if now >= rested:
                    self._doorbells.on_timer(now)
                if now >= self._trim_at:
                    self._trim_memory(now)
        except Exception as error:  # any error: neither clients nor peers may wait for this group loop any more
            log.exception("group %s: a defect of collectived ends it on this worker", self.name)
            self._generation.report_crash(error)
        finally:
            self._close()

    def _on_memory_grown(self) -> None:
        """Note that memory was taken from the system: when it has been idle for a while it is given back."""
        if self._trim_at == math.inf:
            self._trim_at = time.monotonic() + self._worker.idle_after

    def _trim_memory(self, now: float) -> None:
        done, before = self._records.counters.done, self._last_done
        self._last_done = done
        idle = done == before and self.execution is None
        self._trim_at = now + self._worker.idle_after if not idle or self._results.trim() else math.inf
        if idle:
            self._tools.workspace.trim()

    def _should_spin(self) -> bool:
        """Whether what is to come next may come soon, and there is a core to look for it.

        Ranks that have arrived sleep until a message of this worker comes; those that have not may need a core each,
        and so may the other workers of this host.
        """
        missing = self.tracker.missing_count
        return 0 < missing <= self._spare_cores

    def _advance(self) -> bool:
        if self._deferred_releases:
            self._deferred_releases.poll()
        current = self._generation
        again = current.advance()
        if current.tracker.verdicts:
            self._start_successor()
        if current.execution is None and not again:
            self._stop_if_finished()
        return again or self._generation is not current

    # Members

    def _on_message(self, local_rank: LocalRank, data: bytes) -> None:
        if data[0] == _SUBMIT_KIND:  # nearly always
            self._on_submit(local_rank, messages.parse_submit(data))
            return
        match messages.parse_type(data):
            case messages.MessageType.RELEASE:
                self._ranks.release(local_rank.rank, messages.parse_release(data))
                self._doorbells.throttle(local_rank)
            case messages.MessageType.MATCHING:
                self._on_matching(local_rank, rank_messages.parse_matching(data))
                self._doorbells.throttle(local_rank)
            case messages.MessageType.DONE:
                self._generation.point_to_point.settle(local_rank.rank, messages.parse_done(data).instance)
            case messages.MessageType.OVERDUE:
                self._generation.point_to_point.report_overdue(local_rank, messages.parse_overdue(data))
            case messages.MessageType.UNCLAIMED:
                self._generation.point_to_point.report_unclaimed(local_rank, rank_messages.parse_unclaimed(data))
            case messages.MessageType.CANCEL | messages.MessageType.WITHDRAWN:
                self._generation.point_to_point.withdraw(local_rank, messages.parse_withdrawal(data))
            case messages.MessageType.LEAVE:
                self._generation.leave(local_rank.rank)
            case messages.MessageType.ABORT | messages.MessageType.FAIL:
                self._generation.abort(local_rank.rank, *messages.parse_end(data))
            case messages.MessageType.EVENT:
                self._input_events.register(local_rank.rank, *messages.parse_event(data))
            case messages.MessageType.PING:
                self._doorbells.answer_ping(local_rank, self._deferred_releases.is_memory_in_use(local_rank))
            case kind:
                raise messages.MalformedMessage(f"a client does not send {kind.name}")

    def _on_submit(self, local_rank: LocalRank, submission: messages.Submit) -> None:
        self._ranks.release(local_rank.rank, submission.released_slots)
        if submission.generation == self._generation.number:
            self._generation.submit(local_rank, submission)
            return
        if (past := self._past_verdicts.get(submission.generation)) is not None:
            self._generation.refuse(local_rank, submission, past)
            return
        is_p2p = submission.instance >= messages.P2P_BASE  # numbers begin anew with each generation
        number, most = submission.instance - messages.P2P_BASE * is_p2p, _MOST_P2P if is_p2p else _MOST
        self._defer(local_rank, number < most, partial(self._on_submit, local_rank, submission))

    def _on_matching(self, local_rank: LocalRank, generation: int) -> None:
        if generation == self._generation.number:
            self._generation.point_to_point.hand_over(local_rank)
        elif generation not in self._past_verdicts:
            self._defer(local_rank, True, partial(self._on_matching, local_rank, generation))

    def _defer(self, local_rank: LocalRank, is_near: bool, again: Callable[[], None]) -> None:
        """Keep what a rank asks of a generation that has not begun here until it does."""
        if not is_near or len(self._early_submissions) >= (_MOST + _MOST_P2P) * len(self.local_ranks):
            raise messages.MalformedMessage("a submission of a generation of the group that was never announced")
        self._early_submissions.append(partial(self._doorbells.carry_out, local_rank, again))

    def _send(self, rank: int, message: bytes) -> None:
        self._doorbells.send(self.local_ranks[rank], message)

    def _expire_submission(self, local_rank: LocalRank, generation: int, number: int, op: str, timeout: float) -> None:
        past = self._past_verdicts.get(generation)
        if generation == self._generation.number:
            self._generation.expire_submission(local_rank, number, op, timeout)
        elif past is not None:
            self._generation.fail(local_rank, number, past)
        else:
            self._early_submissions.append(lambda: self._expire_submission(local_rank, generation, number, op, timeout))

    def _on_client_lost(self, rank: int, why: str) -> None:
        self._ranks.release_rank(rank)
        self._generation.mark_lost(rank, why)

    # Generations

    def _hear_coordinator(self, verdict: Verdict) -> None:
        if verdict.generation == self._generation.number:
            self._generation.peer_consensus.hear_coordinator(verdict)
        elif verdict.generation not in self._past_verdicts:
            self._early_verdicts.append(verdict)

    def _apply_verdict(self, verdict: Verdict) -> None:
        if verdict.generation == self._generation.number:
            self._generation.apply_verdict(verdict)
            self._start_successor()

    def _start_successor(self) -> None:
        """Begin the successor generation once everything before the verdict has ended."""
        before = self._generation
        if (verdict := before.successor_verdict) is None:
            return
        self._past_verdicts[before.number] = verdict
        met = before.segment is not None
        before.close_links()
        moved = self.traffic()
        self._generation = Generation(self._context, verdict.successor, self._apply_verdict, verdict.next_instance)
        self._traffic_base = (self._generation, *moved)
        self.tracker.carry_progress(before.tracker)
        if met:
            self._open_segment()
        for local_rank in self.local_ranks.values():
            local_rank.clear_outcomes()
            self._offer_segment(local_rank)
        early, self._early_submissions = self._early_submissions, []
        for submitted in early:
            submitted()
        rulings, self._early_verdicts = self._early_verdicts, []
        for known in rulings:
            self._hear_coordinator(known)

    # The end

    def _stop_if_finished(self) -> None:
        """A group loop ends when its last local rank has gone and nothing that it had submitted can still complete."""
        if self._generation.is_finished and self._doorbells.has_no_clients and self.tracker.find_startable() is None:
            self._request_stop()

    def _request_stop(self) -> None:
        self._stopping = True

    def _close(self) -> None:
        self._stopping = True
        self._generation.close()
        self._ranks.close()
        self._worker.on_closed(self)
        self._poller.close()
