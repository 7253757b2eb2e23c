"""A generation in a group loop: its tracker, its links, the instance that runs, and what is decided about it.

`tracker.py` decides what is due; this module does it, always in the group loop's thread, and never by
waiting. An instance runs in up to four *phases* (`_carry_out`): where some rank takes any value, the root's worker
announces it; where lengths differ, the workers exchange them; where NCCL carries it out, they agree that all have
come; then the program itself runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from collectived_proto.cause import Cause
from collectived_proto.ipc import messages
from collectived_proto.types import Broadcast, Recv, ReportKind, Scatter, Send, Verdict, unscoped_name
from collectived_runtime.device.cuda.driver import CudaError
from collectived_runtime.device.nccl.interface import NcclError
from collectived_runtime.engine.base.memory_budget import MemoryExhausted
from collectived_runtime.engine.base.poller import Wait
from collectived_runtime.engine.clients.completions import Completions, encode_verdict
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.compile.program import CompiledCollective, PackTask
from collectived_runtime.engine.failure.peer_consensus import PeerConsensus
from collectived_runtime.engine.failure.reporter import FaultReporter
from collectived_runtime.engine.failure.segment_watch import SegmentWatch
from collectived_runtime.engine.failure.spanning_watch import SpanningWatch
from collectived_runtime.engine.gpu.group_communicators import GroupCommunicators
from collectived_runtime.engine.loop.context import GroupContext
from collectived_runtime.engine.loop.crossings import CrossingContext, Crossings
from collectived_runtime.engine.loop.execution import Execution, ResultDelivery
from collectived_runtime.engine.loop.lending import Lending
from collectived_runtime.engine.loop.phases import Phases
from collectived_runtime.engine.loop.unexpected_frames import UnexpectedFrames
from collectived_runtime.engine.loop.waiting_joiners import WaitingJoiners
from collectived_runtime.engine.p2p.point_to_point import PointToPoint, PointToPointContext
from collectived_runtime.engine.record.counters import NOT_STARTED
from collectived_runtime.engine.record.flight_recorder import EMPTY_SUMMARY
from collectived_runtime.engine.run import host_task
from collectived_runtime.engine.run.links import Links, PeerDeparted, PeerNetwork
from collectived_runtime.engine.submit.tracker import Arrival, Instance, InstanceTracker
from collectived_runtime.limits.rejections import MessageSource
from collectived_runtime.transport.link import LinkBroken, LinkProtocolError

log = logging.getLogger("collectived.group_loop")


class Generation:
    """One generation of a group on this worker.

    Args:
        apply_verdict: takes a verdict when it counts.
        first: its first instance.
    """

    def __init__(
        self, context: GroupContext, number: int, apply_verdict: Callable[[Verdict], None], first: int = 0
    ) -> None:
        topology, worker, ranks, tools = context.topology, context.worker, context.ranks, context.tools
        resources = worker.resources
        self.number = number
        self.execution: Execution | None = None
        self._remaining_phases: Iterator[Execution] = iter(())  # of the instance that runs
        self.segment: SegmentWatch | None = None  # where the ranks carry out their collectives themselves
        self._topology = topology
        self._name = unscoped_name(topology.group.name)
        self._worker = worker
        self._ranks = ranks
        self._records = context.records
        self._tools = tools
        self._programs = context.programs
        self.tracker = InstanceTracker(
            topology.group.key, number, topology.own_ranks, worker.stall_after, time.monotonic(), first
        )
        lost_after = worker.coordinator.worker_timeout
        network = PeerNetwork(
            topology, number, resources.link_provider, context.poller, resources.rejections, lost_after
        )
        self.links = Links(network, self.on_link_broken, lambda *early: self._frames.judge_early(*early))
        self.peer_consensus = PeerConsensus(
            network, apply_verdict, lambda verdict: self.reporter.add_missing_ranks(verdict)
        )
        self.reporter = FaultReporter(
            topology,
            self.tracker,
            worker.name,
            worker.coordinator,
            self.peer_consensus.propose,
            partial(ranks.doorbells.sample_stacks, self.tracker),
        )
        self.waiting_joiners = WaitingJoiners(ranks.doorbells, self.tracker)
        self._completions = Completions(number, ranks.doorbells, tools.deferred_releases)
        self.fail = self._completions.send_failure
        p2p_context = PointToPointContext(
            network, ranks.doorbells, ranks.results, resources.budget, context.records, worker.stall_after
        )
        self.point_to_point = PointToPoint(p2p_context, self.reporter, self.fail, self.on_link_broken)
        self._communicators = GroupCommunicators(resources.nccl, topology, number)
        self._frames = UnexpectedFrames(topology, number, self.tracker, self.reporter)
        self._phases = Phases(
            topology,
            number,
            self._programs,
            tools,
            self._communicators,
            lambda instance: self.reporter.report_mismatch(instance, 0),
            self._frames.judge_unexpected,
        )
        self._lending = Lending(network, ranks.doorbells, self.links, self._phases, self.tracker, tools)
        parts = topology, number, self.tracker, self.links, self._phases
        self._crossings = Crossings(
            CrossingContext(*parts, ranks.doorbells, context.records, self.reporter, self.waiting_joiners)
        )
        self._expired: list[tuple[LocalRank, int]] = []  # not come by their own deadline, until there is a verdict

    # Members

    def submit(self, local_rank: LocalRank, submission: messages.Submit) -> None:
        """Take an instance or a send or recv of a rank, the next one or one that it has submitted before."""
        tracker = self.tracker
        prepared = local_rank.prepared.get(submission.prepared)
        if prepared is None:
            raise messages.MalformedMessage(
                f"a submission of collective {submission.prepared}, which was never prepared"
            )
        if submission.instance >= messages.P2P_BASE:
            if submission.event:
                raise messages.MalformedMessage(
                    f"{prepared.op} with event {submission.event}, for a value in the memory of a GPU"
                )
            if self.segment is not None and not self.segment.spans_hosts:  # its ranks carry messages by themselves
                submission = submission._replace(watched=True)
            self.point_to_point.submit(local_rank, submission, prepared)
            return
        if self.segment is not None and self.segment.answer(local_rank, prepared, submission, self.fail):
            return
        if submission.instance <= tracker.progress[local_rank.rank].received:
            for message in local_rank.get_outcomes(submission.instance):
                self._ranks.doorbells.send(local_rank, message)
            self._ranks.doorbells.throttle(local_rank)
            return
        if isinstance(prepared.collective.operation, (Send, Recv)):
            raise messages.MalformedMessage(f"{prepared.op} numbered as an instance of the group")
        self._lending.check(submission)
        writing = self._ranks.input_events.find_gpu(local_rank, submission) if submission.event else None
        sources = local_rank.resolve_inputs(prepared, submission)  # checks every bound; outlives the session
        arrival = Arrival(prepared, sources, time.monotonic(), writing is None, sources.is_lent)
        agrees = tracker.record_arrival(
            local_rank.rank, submission.instance, arrival, submission.remaining, submission.timeout
        )
        verdict = tracker.find_verdict(submission.instance)
        if verdict is not None:
            arrival.inputs = None
            late = Instance(
                submission.instance, {local_rank.rank: arrival}, reference=prepared, collective=prepared.collective
            )
            self._records.recorder.record_failed(self.number, late, EMPTY_SUMMARY, verdict)
            self.fail(local_rank, submission.instance, verdict)
            self._ranks.doorbells.throttle(local_rank)
            return
        if not agrees:
            self.reporter.report_fault(ReportKind.MISMATCH, submission.instance, text=prepared.flaw)
        if writing is not None:
            written = partial(tracker.mark_ready, local_rank.rank, submission.instance)
            self._ranks.input_events.start_wait(
                local_rank, submission.instance, writing, submission.event, lambda: written(time.monotonic())
            )

    def refuse(self, local_rank: LocalRank, submission: messages.Submit, past: Verdict) -> None:
        """A rank submits to an earlier generation: that is what it did last, and it fails."""
        prepared, standing = local_rank.prepared.get(submission.prepared), self.tracker.progress[local_rank.rank]
        is_first = submission.instance < messages.P2P_BASE and standing.submitted < self.tracker.next_number
        if prepared is not None and is_first:
            standing.op, standing.site = prepared.op, prepared.collective.site
        self.fail(local_rank, submission.instance, past)

    def expire_submission(self, local_rank: LocalRank, number: int, op: str, timeout: float) -> None:
        """Fail an instance or a send or recv for all: it has not come by its own deadline, and so will not."""
        post = number >= messages.P2P_BASE
        verdict = self.tracker.fault if post else self.tracker.find_verdict(number)
        if verdict is not None:
            self.fail(local_rank, number, verdict)
            return
        self._expired.append((local_rank, number))
        if post:
            self.reporter.report_overdue(local_rank.rank, local_rank.rank, timeout, op)
        else:
            self.reporter.report_late(number, local_rank.rank, op, timeout)

    def leave(self, rank: int) -> None:
        standing = self.tracker.progress[rank]
        if self.tracker.release_aborted(rank):
            self.reporter.report_gone(rank, self.tracker.find_last_submitted(rank))
        elif not standing.has_departed:
            if self.segment is not None:
                self.segment.left(rank)
            self.point_to_point.part(rank, is_lost=False)
            standing.has_departed = True
            self.reporter.report_left(rank, self.tracker.find_last_submitted(rank))
            self.point_to_point.ops.report_departed_peers()

    def look_at_segment(self) -> None:
        """Take in what ranks have done by themselves in a segment."""
        if self.segment is not None:
            self.segment.look()

    def abort(self, rank: int, cause: Cause, reason: str) -> None:
        standing = self.tracker.progress[rank]
        if standing.has_departed:
            return
        if self.segment is not None:
            self.segment.abort(rank)
        standing.has_departed = standing.has_aborted = True
        # Its caller may use its memory again once this is answered, and does not learn that a GPU still uses it.
        self.tracker.is_aborted = True
        if self.execution is not None:
            self.links.abandon(self.execution.stop())
        if (current := self.tracker.instances.get(self.tracker.next_number)) is not None:  # it may be stopped already
            self._completions.track_aborted(current)
        self._communicators.cancel_launches()
        self.point_to_point.discard(rank)
        self.reporter.report_abort(self.tracker.next_number, rank, reason, cause)

    def mark_lost(self, rank: int, why: str) -> None:
        """Report that a rank's client is gone."""
        self.point_to_point.drop_receiver(rank)
        self.point_to_point.part(rank, is_lost=True)
        standing = self.tracker.progress[rank]
        if self.tracker.release_aborted(rank):
            self.reporter.report_gone(rank, self.tracker.find_last_submitted(rank))
        elif not standing.has_departed:
            if self.segment is not None:
                self.segment.lost(rank)
            standing.has_departed, last = True, self.tracker.find_last_submitted(rank)
            is_news = self.tracker.find_verdict(last + 1) is None  # the verdict will warn
            log.log(logging.INFO if is_news else logging.DEBUG, "group %s: rank %d is lost: %s", self._name, rank, why)
            self.reporter.report_fault(ReportKind.LOST, last, rank=rank, text=why)

    def report_crash(self, error: Exception) -> None:
        """Report that a defect ends this group loop."""
        text = f"a defect of collectived ended the group on its worker: {type(error).__name__}: {error}"
        self.reporter.report_local_ranks_lost(text)

    @property
    def is_finished(self) -> bool:
        """Whether no local rank is left, nothing that one has sent is on its way, and the others know why."""
        waits = self.reporter.is_awaiting_verdict or not self.peer_consensus.idle
        return self.tracker.has_no_ranks and self.point_to_point.idle and not waits

    # Running instances

    def advance(self) -> bool:
        """Start what is ready and step what runs; whether something wants to go on at once."""
        copying = self.point_to_point.advance()
        if self.execution is None:
            instance = self.tracker.find_startable()
            if instance is None:
                return copying
            instance.started, instance.started_at = True, time.monotonic()
            self._remaining_phases = self._carry_out(instance)
            self._start_next_phase()
        running = self.execution
        if running is None:  # it was carried out at once, or cannot be
            return copying or self.tracker.find_startable() is not None
        try:
            ended, again = running.step(self.links)
        except LinkBroken as error:
            self.links.drop_peer(error.peer)
            self.on_link_broken(error)
            return False
        except MemoryExhausted as error:
            self._stop_execution()
            self.reporter.report_exhausted(running.instance, error, self._ranks.results.held_bytes_by_rank())
            return False
        except NcclError as error:
            self._stop_execution()
            self.reporter.report_nccl_failure(running.instance, error)
            return False
        except CudaError as error:  # the worker is about to end: all of its ranks are lost to the group
            self._stop_execution()
            running.instance.bar()
            self.reporter.report_local_ranks_lost(f"a GPU of its worker failed: {error}")
            return False
        for task in ended:
            self._on_task_done(running, task)
        return again or copying or bool(ended)

    def next_deadline(self) -> float:
        """When `on_timer` has something to do."""
        alarm, report = min(self._tools.timers.next_deadline, self.links.next_deadline), self.reporter.next_deadline()
        if self.segment is not None:
            alarm = min(alarm, self.segment.next_deadline())
        return min(alarm, report, self.point_to_point.next_deadline(), self.peer_consensus.next_deadline())

    def on_timer(self, now: float) -> None:
        self._tools.timers.discard_expired(now)
        self.links.on_timer(now)
        self.point_to_point.on_timer(now)
        if self.segment is not None:
            self.segment.on_timer(now)
        before = self.tracker.stalls
        self.reporter.on_timer()
        self._records.counters.stalls += self.tracker.stalls - before
        self.peer_consensus.on_timer(now)

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from other workers, headers included; may be read from any thread."""
        (sent, received), (posted, taken) = self.links.traffic(), self.point_to_point.traffic()
        return sent + posted, received + taken

    def watch_links(self) -> None:
        """Say what is waited for, before the group loop waits."""
        if self.links.has_links:
            self.links.update_watches(self.execution.link_events() if self.execution else {})
            self.links.ready.clear()

    def find_wait(self) -> Wait | None:
        """The wait of the group loop, if not `poll`."""
        segment = self.segment
        if self.execution is None and isinstance(segment, SpanningWatch) and self._crossings.are_ready(segment):
            return partial(self._crossings.wait, segment)
        return None

    def _start_next_phase(self) -> None:
        self.execution = None
        self.execution = next(self._remaining_phases, None)

    def _carry_out(self, instance: Instance) -> Iterator[Execution]:
        """The phases of an instance, in order. The group loop runs each to its end before it asks for the next."""
        operation = instance.collective.operation
        if len(self._topology.peers) > 1 and isinstance(operation, (Broadcast, Scatter)):
            yield from self._phases.announce(instance, operation.root)
            if instance.is_barred:
                return
        if instance.collective.lengths_differ and instance.collective.leaves:
            yield from self._phases.exchange_lengths(instance)
        program = self._programs.get(instance)
        yield from self._phases.agree_on_launch(instance, program)
        self.waiting_joiners.send_due(instance.number, self.segment)
        segment = self.segment if isinstance(self.segment, SpanningWatch) else None
        if segment is not None and segment.brings(instance):
            yield from self._phases.carry_across(instance, program, segment.seat)
            if instance.is_barred:
                segment.on_stopped()
            else:
                self._finish_instance(instance, program, ResultDelivery(is_shared=True))
            return
        if segment is not None and not segment.seat.take_values(instance):
            instance.bar()
            segment.on_stopped()
            return
        lent = yield from self._lending.carry_out(instance, program)
        if lent is not None:
            self._finish_instance(instance, program, lent)
            return
        try:
            delivery = self._ranks.prepare_delivery(instance, program)
        except (MemoryExhausted, OSError) as error:
            self._communicators.cancel_launches()
            self.reporter.report_exhausted(instance, error, self._ranks.results.held_bytes_by_rank())
            return
        sources = [instance.arrivals[rank].inputs for rank in program.contributors]
        if program.is_inline and delivery.memory is not None and not delivery.is_on_device:
            host_task.run_inline(program, sources, delivery.memory, self._records.counters)
            self._completions.send_done(instance, program, delivery.slot, 0, True, delivery.readers)
        else:
            yield self._phases.execute(instance, program, sources, delivery)
        self._finish_instance(instance, program, delivery)

    def _on_task_done(self, running: Execution, task: PackTask) -> None:
        """Notify ranks of a pack when all of its tasks have ended. There is no message for a prelude."""
        complete, last = running.complete_task(task)
        if complete and not running.is_prelude and not running.delivery.is_shared:
            slot, readers = running.delivery.slot, running.delivery.readers
            running.reported = slot is not None
            self._completions.send_done(running.instance, running.program, slot, task.pack_number, last, readers)
        if last:
            self._start_next_phase()

    def _finish_instance(self, instance: Instance, program: CompiledCollective, delivery: ResultDelivery) -> None:
        now = time.monotonic()
        self._ranks.release_unheard(delivery, is_told=True)
        self.tracker.finish(instance, now)
        if isinstance(self.segment, SpanningWatch):
            self.segment.finish(instance, delivery.is_shared)
            self._crossings.learn(instance, program, self.segment, delivery.is_shared)
        arrived = {rank: arrival.arrived_at for rank, arrival in instance.arrivals.items()}
        self.tracker.count_waits(instance.collective.operation, arrived, now)
        self._records.record_completed(self.number, instance, program.summary, program.load, now)
        self.reporter.on_completed(instance.number)
        self.links.poll_idle()
        if instance.stalled:
            self.reporter.report_resumed(instance.number)

    # Links

    def on_link_broken(self, error: LinkBroken) -> None:
        """A peer is gone, or talks nonsense: what runs cannot complete here."""
        if isinstance(error, LinkProtocolError):
            self._worker.resources.rejections.count_malformed(MessageSource.LINK)
        if self.execution is not None:
            self.links.abandon(self.execution.stop())
        self._communicators.cancel_launches()
        log.info("group %s: link to worker %d: %s", self._name, error.peer, error)
        if isinstance(error, PeerDeparted):
            self.reporter.report_worker_left(error.peer, self.tracker.next_number)
        else:
            self.reporter.report_link(self.tracker.next_number, error)

    # Faults and verdicts

    def apply_verdict(self, verdict: Verdict) -> None:
        """Fail what a verdict covers, now and later."""
        local_ranks = self._ranks.doorbells.local_ranks
        if self.segment is not None:
            self.segment.apply_verdict(verdict)
        failing = self.tracker.apply_verdict(verdict)
        if not verdict.orderly:
            self._records.counters.count_verdict(verdict.code)
        for instance in failing:
            summary, algorithm, running = EMPTY_SUMMARY, NOT_STARTED, self.execution
            if running is not None and running.instance is instance:
                summary, algorithm = running.program.summary, running.program.algorithm
                self._stop_execution()
            self._records.record_failed(self.number, instance, verdict, summary, algorithm)
            for rank, arrival in instance.arrivals.items():
                if not arrival.ready:  # nor will it be read: its rank may use its memory again
                    self._ranks.input_events.cancel_wait(local_ranks[rank], instance.number)
                self.fail(local_ranks[rank], instance.number, verdict)
        for rank, local_rank in local_ranks.items():
            # It had done its part and gone on: it gets the failure at its next call.
            received = self.tracker.progress[rank].received
            if received >= verdict.from_instance and not any(rank in instance.arrivals for instance in failing):
                self.fail(local_rank, received, verdict)
        self.point_to_point.ops.apply_verdict(
            verdict, at_once=self.segment is not None and not self.segment.spans_hosts
        )
        self.peer_consensus.notify_excluded(verdict)
        late, self._expired = self._expired, []
        for local_rank, number in late:
            if number >= verdict.from_instance if number < messages.P2P_BASE else not verdict.orderly:
                self.fail(local_rank, number, verdict)
            else:
                self._expired.append((local_rank, number))
        self.reporter.log_verdict(verdict, bool(failing))
        self.reporter.report_stranded(verdict, failing)

    def _stop_execution(self) -> None:
        running = self.execution
        assert running is not None
        self.links.abandon(running.stop())
        self._communicators.cancel_launches()
        self._ranks.release_unheard(running.delivery, is_told=running.is_told)
        self._drop_execution()

    def _drop_execution(self) -> None:
        self.execution, self._remaining_phases = None, iter(())  # the phases hold the memory of the ranks

    def send_final_verdicts(self) -> None:
        """Send ranks that have a doorbell the verdict of their next instance, where that is known."""
        for rank, local_rank in self._ranks.doorbells.local_ranks.items():
            following = self.tracker.progress[rank].received + 1
            verdict = self.tracker.find_verdict(following)
            if verdict is not None and local_rank.doorbell is not None and not local_rank.closed:
                self._ranks.doorbells.send(local_rank, messages.encode_failed(following, encode_verdict(verdict)))

    @property
    def successor_verdict(self) -> Verdict | None:
        """The verdict with a successor, once everything before it has ended; None as long as it has not."""
        verdict = next((verdict for verdict in self.tracker.verdicts if verdict.successor), None)
        if verdict is None or self.execution is not None or self.tracker.find_startable() is not None:
            return None
        first, segment = verdict.from_instance, self.segment
        if len(self.reporter.topology.peers) > 1 and self.tracker.next_number < first:
            return None  # others may wait in an earlier instance for ranks of this worker that have not come to it
        if any(one.number < first for one in self.tracker.list_open()) or (segment and segment.has_open(first)):
            return None
        return verdict if self.point_to_point.idle and not self._expired else None

    def close(self) -> None:
        """Stop running instances, and notify peers that this is no fault."""
        if self.execution is not None:
            self.links.abandon(self.execution.stop())
        self._drop_execution()
        self.tracker.instances.clear()  # nothing may look into an arena when it is closed
        self.close_links()

    def close_links(self) -> None:
        """Says goodbye to the peers."""
        if self.segment is not None:
            self._crossings.close()
            self.segment.close()
            self.segment = None
        self._lending.close()
        self.point_to_point.close()
        self.peer_consensus.close()
        self._communicators.close()
        self.links.close()
