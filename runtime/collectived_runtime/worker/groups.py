"""Groups as this worker takes part in them: joins under way, group loops, and what the coordinator says of either."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import secrets
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from collectived_proto.codec import (
    group_from_proto,
    group_to_proto,
    peer_from_proto,
    positions_to_proto,
    report_to_proto,
    tiers_from_proto,
    verdict_to_proto,
)
from collectived_proto.errors import (
    Code,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from collectived_proto.group_codec import compact_verdict_from_proto, formed_from_bytes
from collectived_proto.ipc.messages import TOKEN_BYTES
from collectived_proto.types import RankPosition, Report, ReportKind, Verdict, unscoped_name
from collectived_proto.v1 import common_pb2, worker_pb2
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_runtime.auth.acl import AclRule
from collectived_runtime.engine.base.memory_budget import MemoryExhausted
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.clients.segment import measure_place
from collectived_runtime.engine.failure.reporter import CoordinatorAccess
from collectived_runtime.engine.loop.context import WorkerContext, WorkerResources
from collectived_runtime.engine.loop.group_loop import GroupLoop
from collectived_runtime.limits.descriptors import can_open_descriptor
from collectived_runtime.limits.quota_settings import Quotas
from collectived_runtime.limits.rejections import Limit, format_limit_error
from collectived_runtime.transport.connections import TOKEN_SECONDS, ConnectionServer
from collectived_runtime.worker import link_probe
from collectived_runtime.worker.joins import ClientJoin, ClientJoins, WorkerPlace, make_join_ask
from collectived_runtime.worker.observe.totals import LoopTotals
from collectived_runtime.worker.prepared import PreparedCache
from collectived_runtime.worker.remote_ranks.remote_rank import RemoteRankSession
from collectived_runtime.worker.remote_ranks.submit import RemoteRank
from collectived_runtime.worker.sessions import HeldRank, Session, call_soon_threadsafe, disconnect_rank

log = logging.getLogger("collectived.worker")

_KEPT_MEMORY_SECONDS = 1.0  # between two looks whether clients have what they keep
IDLE_RELEASE_SECONDS = 10.0  # after which a group that does nothing gives its memory back
# Errors of a system without resources for group loops and local ranks: descriptors, memory, or (RuntimeError) a thread.
RESOURCE_ERRORS = (OSError, MemoryError, RuntimeError)


class Groups:
    """Runs in the worker's event loop; group loops call back from their threads.

    Args:
        send: sends a message to the coordinator, from any thread.
        is_connected: whether the coordinator can be reached.
        rules: which principals may join which groups, by their names within the cluster: `JOB/NAME`, or `/NAME`.
    """

    def __init__(
        self,
        place: WorkerPlace,
        connection_server: ConnectionServer,
        resources: WorkerResources,
        send: Callable[[pb.WorkerMessage], None],
        is_connected: Callable[[], bool],
        quotas: Quotas | None = None,
        rules: Sequence[AclRule] = (),
    ) -> None:
        self._place = place
        self._task = place.task
        self._connection_server = connection_server
        self._resources = resources
        self._rejections = resources.rejections
        self._quotas = quotas or Quotas()
        self._joins_by_name: Counter[str] = Counter()  # joins under way, by name
        self.recorder = resources.recorder
        self._send = send
        self._is_connected = is_connected
        self._rules = rules
        self._loop = asyncio.get_running_loop()
        self.client_joins = ClientJoins(send, is_connected)
        self._kept_memory = resources.budget.lent
        self._kept_memory.on_kept = lambda: call_soon_threadsafe(self._loop, self._watch_kept_memory)
        self._is_watching_kept_memory = False
        # By group key and the generation in which the group loop began; ranks for which none could be made, and why.
        self._group_loops: dict[tuple[int, int], GroupLoop] = {}
        self._rejected_ranks: dict[tuple[int, int], dict[int, str]] = {}
        self.totals = LoopTotals()
        self._last_formed = (b"", pb.Formed())  # read last: all local ranks of a generation get the same
        self.stall_after = 1.0
        self.lost_after = 10.0

    @property
    def group_loops(self) -> list[GroupLoop]:
        return list(self._group_loops.values())

    # For clients

    async def join(self, session: Session, request: worker_pb2.JoinRequest) -> AsyncGenerator[worker_pb2.JoinEvent]:
        """Progress, then Joined.

        Raises:
            CollectiveError: refused, by this worker or by the coordinator.
        """
        ask = make_join_ask(session, request, self._place, self._rules)
        parent = session.find_held_rank(request.parent.key, request.parent.rank) if request.HasField("parent") else None
        with session.acquire_join_slot():
            self._check_quotas(ask.name)
            self._joins_by_name[ask.name] += 1
            try:
                join = ClientJoin(ask, session, request.segment, request.token, parent)
                async with contextlib.aclosing(self.client_joins.wait(join)) as events:
                    async for event in events:
                        yield event
            finally:
                self._joins_by_name[ask.name] -= 1
                if not self._joins_by_name[ask.name]:
                    del self._joins_by_name[ask.name]

    async def leave(self, session: Session, request: worker_pb2.LeaveRequest) -> Verdict | None:
        """Have a rank submit nothing more; a verdict that it has not been given.

        Raises:
            NotFoundError: the session does not hold that rank.
        """
        if request.join:
            self.client_joins.withdraw(session, request.join)
            held = session.find_rank_of_join(request.join)
        else:
            held = session.find_held_rank(request.key, request.rank)
        if held is None:
            return None
        if held.remote_rank is not None:
            return await held.remote_rank.remote.leave()
        # Others leave by their doorbell; this one could not, or not yet, use it.
        disconnect_rank(held, "it gave up its place while it entered the group")
        return None

    def _check_quotas(self, name: str) -> None:
        """Raise ResourceExhaustedError where there are as many groups, or descriptors, as there may be."""
        most = self._quotas
        names = self._joins_by_name.keys() | {loop.topology.group.name for loop in self._group_loops.values()}
        if most.groups and name not in names and len(names) >= most.groups:
            self._rejections.count_limit(Limit.GROUPS)
            what = f"this worker has ranks of {len(names)} groups"
            raise ResourceExhaustedError(format_limit_error(what, most.groups, "max_groups", "leave some"))
        if not can_open_descriptor(most.descriptors):
            self._rejections.count_limit(Limit.DESCRIPTORS)
            what, advice = "this worker has nearly no descriptors left", "close sessions that are not needed"
            raise ResourceExhaustedError(format_limit_error(what, most.descriptors, "the limit of open files", advice))

    # From the coordinator

    def handle_message(self, message: pb.CoordinatorMessage) -> None:
        match message.WhichOneof("message"):
            case "join_update":
                update = message.join_update
                progress = worker_pb2.JoinProgress(present=update.present, expected=update.expected, text=update.text)
                self.client_joins.answer(update.request, worker_pb2.JoinEvent(progress=progress))
            case "join_refused":
                self.client_joins.answer(message.join_refused.request, message.join_refused)
            case "join_done":
                self._on_join_done(message.join_done)
            case "verdict":
                self._apply_verdict(message.verdict)
            case "query":
                self._query_position(message.query)
            case "measure":
                self._measure_link(message.measure)
            case "propose":
                self._answer_proposal(message.propose)
            case "newcomers":
                told = message.newcomers
                for (key, _), group_loop in list(self._group_loops.items()):
                    if key == told.key:
                        group_loop.set_waiting_joiners(told.generation, told.from_instance, told.waiting)
            case other:
                log.warning("a message of kind %s from the coordinator is not known to this release", other)

    def resend_joins(self) -> None:
        """Send joins under way and departures again, which the coordinator may have forgotten.

        It knows joins by their request.
        """
        self.client_joins.resend()
        for group_loop in self._group_loops.values():
            group_loop.resend_reports()

    def list_attached(self) -> list[pb.Attached]:
        """The running groups, for a coordinator that may not know them."""
        return [
            pb.Attached(
                group=group_to_proto(group_loop.group),
                ranks=group_loop.topology.own_ranks,
                verdicts=[verdict_to_proto(verdict) for verdict in group_loop.tracker.verdicts],
                idle=group_loop.topology.idle,
            )
            for group_loop in self._group_loops.values()
        ]

    def _apply_verdict(self, ruling: common_pb2.Verdict) -> None:
        for (key, _), group_loop in list(self._group_loops.items()):
            if key == ruling.key:
                verdict = compact_verdict_from_proto(ruling, group_loop.topology.group.members)
                group_loop.apply_verdict(replace(verdict, group=unscoped_name(verdict.group)))

    def _on_join_done(self, done: pb.JoinDone) -> None:
        try:
            formed = self._parse_formed(done.formed)
        except InvalidArgumentError as error:
            refused = pb.JoinRefused(code=Code.INTERNAL, message=f"from the coordinator: {error}")
            self.client_joins.answer(done.request, refused)
            return
        join = self.client_joins.take(done.request)
        try:
            group_loop = self._get_or_create_loop(formed)
        except Exception as error:
            self._reject_rank(done.rank, join, formed, error)
            return
        if done.rank in group_loop.local_ranks:  # a coordinator that came back does not know which messages arrived
            return
        if join is None:
            group_loop.mark_absent(done.rank, "it withdrew while joining")
            return
        joined = worker_pb2.Joined(group=formed.group, rank=done.rank)
        joined.group.name = group_loop.name
        try:
            if join.session.is_remote:
                self._add_remote_rank(join, group_loop, done.rank)
            else:
                joined.door = self._connection_server.unix_path
                joined.segment = group_loop.may_use_segment and join.takes_segment
                joined.matching = joined.segment and len(group_loop.topology.peers) > 1
                joined.token = self._add_local_rank(join, group_loop, done.rank)
        except Exception as error:
            group_loop.mark_absent(done.rank, self._refuse_join(done.rank, join, group_loop.name, error))
            return
        join.answers.put_nowait(worker_pb2.JoinEvent(joined=joined))

    def _get_or_create_loop(self, formed: pb.Formed) -> GroupLoop:
        """The group loop of a generation, made for the first of its ranks."""
        place = formed.group.key, formed.group.generation
        group_loop = self._group_loops.get(place)
        if group_loop is None:
            group = group_from_proto(formed.group)
            peers = tuple(peer_from_proto(peer) for peer in formed.peers)
            topology = GroupTopology.from_peers(group, peers, self._task, tiers_from_proto(formed.table), formed.idle)
            group_loop = GroupLoop(topology, self._make_worker_context())
            self._group_loops[place] = group_loop
            self.totals.add_loop(group_loop)
            for rank, why in self._rejected_ranks.pop(place, {}).items():
                group_loop.mark_absent(rank, why)
        return group_loop

    def _reject_rank(self, rank: int, join: ClientJoin | None, formed: pb.Formed, error: Exception) -> None:
        """Refuse a rank for which there is no group loop, and report it at once, for the others would wait for it."""
        group = formed.group
        why = self._refuse_join(rank, join, unscoped_name(group.name), error)
        self._send_report(Report(group.key, group.generation, ReportKind.LOST, rank=rank, text=why))
        turned_away = self._rejected_ranks.setdefault((group.key, group.generation), {})
        turned_away[rank] = why
        if turned_away.keys() >= {rank for peer in formed.peers if peer.task == self._task for rank in peer.ranks}:
            del self._rejected_ranks[group.key, group.generation]  # no rank is left that might get a group loop

    def _refuse_join(self, rank: int, join: ClientJoin | None, name: str, error: Exception) -> str:
        """Refuse the join of a rank; return why, for the others."""
        code, why, advice = Code.INTERNAL, f"a defect of collectived: {type(error).__name__}: {error}", ""
        if isinstance(error, RESOURCE_ERRORS):
            code, why = Code.RESOURCE_EXHAUSTED, f"its worker has no room for it: {error}"
            advice = "; leave groups that are not needed, or raise the worker's limits of open files and threads"
        if isinstance(error, MemoryExhausted):
            code, why = Code.RESOURCE_EXHAUSTED, str(error)
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            self._rejections.count_limit(Limit.DESCRIPTORS)
        text = f"rank {rank} of group {name!r} is refused: {why}"
        log.warning("%s", text, exc_info=error if code is Code.INTERNAL else None)
        if join is not None:
            join.answers.put_nowait(pb.JoinRefused(code=code, message=text + advice))
        return why

    def _parse_formed(self, formed: bytes) -> pb.Formed:
        if self._last_formed[0] != formed:
            self._last_formed = (formed, formed_from_bytes(formed))
        return self._last_formed[1]

    def _add_local_rank(self, join: ClientJoin, group_loop: GroupLoop, rank: int) -> bytes:
        """Add a rank that is to connect its doorbell; the token that admits this."""
        session = join.session
        member = group_loop.topology.group.members[rank]
        has_place = group_loop.may_use_segment and join.takes_segment
        redeem = session.budget.pledge(measure_place(group_loop.topology) if has_place else 0)
        try:
            pidfd = os.dup(session.pidfd) if session.pidfd >= 0 else -1
        except OSError:
            redeem()
            raise
        memory, done = session.arenas.resolve_memory, session.acquire_memory()
        local_rank = LocalRank(rank, member, memory, pidfd, done, holder=session.budget)
        local_rank.redeem = redeem
        local_rank.uid, local_rank.takes_segment = session.uid, join.takes_segment
        local_rank.sample_stack = functools.partial(session.sample_stack, self._loop)
        group_loop.add_local_rank(local_rank)
        session.add_held_rank(HeldRank(group_loop, rank, join.token))
        token = secrets.token_bytes(TOKEN_BYTES)
        self._connection_server.admit(token, functools.partial(group_loop.attach_doorbell, rank), session.uid)
        watched = weakref.ref(group_loop), weakref.ref(local_rank)
        self._loop.call_later(TOKEN_SECONDS, _disconnect_without_doorbell, *watched)
        return token

    def _add_remote_rank(self, join: ClientJoin, group_loop: GroupLoop, rank: int) -> None:
        """Add a rank whose client submits over gRPC."""
        session = join.session
        group = replace(group_loop.topology.group, name=group_loop.name)
        remote = RemoteRankSession(
            group,
            rank,
            session.budget,
            functools.partial(group_loop.submit, rank),
            functools.partial(group_loop.disconnect, rank),
            functools.partial(group_loop.expire_submission, rank),
            lambda: self._rejections.count_limit(Limit.IN_FLIGHT),
        )
        local_rank = LocalRank(rank, group.members[rank], remote.uploads.resolve_memory, -1, outlet=remote)
        local_rank.sample_stack = functools.partial(session.sample_stack, self._loop)
        group_loop.add_local_rank(local_rank)
        submitting = RemoteRank(remote, PreparedCache(group_loop, local_rank))
        session.add_held_rank(HeldRank(group_loop, rank, join.token, submitting))

    def _query_position(self, query: pb.Query) -> None:
        answer = functools.partial(self._send_position, query)
        for (key, _), group_loop in list(self._group_loops.items()):
            if key == query.key:
                group_loop.query_positions(query.instance, answer)

    def _answer_proposal(self, asked: pb.Propose) -> None:
        def answer(from_instance: int, following: int) -> None:
            promised = pb.Promised(proposal=asked.proposal, from_instance=from_instance, next_instance=following)
            self._send(pb.WorkerMessage(promised=promised))

        for (key, _), group_loop in list(self._group_loops.items()):
            if key == asked.key:
                group_loop.promise(asked.generation, answer)

    def _measure_link(self, asked: pb.Measure) -> None:
        def found(link: link_probe.LinkMeasurement) -> None:
            measured = pb.Measured(
                generation=asked.generation,
                peer=asked.peer,
                latency_seconds=link.latency_seconds,
                bytes_per_second=link.bytes_per_second,
                text=link.error,
            )
            self._send(pb.WorkerMessage(measured=measured))

        link_probe.start_probe(self._task, asked.peer, asked.link_address, self._connection_server, found)

    def _watch_kept_memory(self) -> None:
        """Look every second whether clients still have what they keep of groups that are over."""
        if not self._is_watching_kept_memory:
            self._is_watching_kept_memory = True
            self._loop.call_later(_KEPT_MEMORY_SECONDS, self._settle_kept_memory)

    def _settle_kept_memory(self) -> None:
        self._is_watching_kept_memory = False
        self._kept_memory.settle()
        if self._kept_memory.has_retained:
            self._watch_kept_memory()

    # From group loops, in their threads

    def _make_worker_context(self) -> WorkerContext:
        return WorkerContext(
            name=self._place.name,
            resources=self._resources,
            coordinator=CoordinatorAccess(self._send_report, self.lost_after, self._is_connected),
            stall_after=self.stall_after,
            idle_after=IDLE_RELEASE_SECONDS,
            on_closed=self._on_loop_ended,
        )

    def _send_report(self, report: Report) -> None:
        self._send(pb.WorkerMessage(report=report_to_proto(report)))

    def _send_position(self, query: pb.Query, generation: int, ranks: tuple[RankPosition, ...]) -> None:
        if generation == query.generation:
            told = positions_to_proto(ranks)
            position = pb.Position(
                key=query.key, generation=generation, instance=query.instance, query=query.query, ranks=told
            )
            self._send(pb.WorkerMessage(position=position))

    def _on_loop_ended(self, group_loop: GroupLoop) -> None:
        self._loop.call_soon_threadsafe(self._remove_loop, group_loop)

    def _remove_loop(self, group_loop: GroupLoop) -> None:
        """Count it among those that ended in the same moment in which it is none of the others any more."""
        group = group_loop.topology.group
        self._group_loops.pop((group.key, group.generation), None)
        self.totals.remove_loop(group_loop)
        for local_rank in group_loop.local_ranks.values():
            local_rank.forget_prepared()

    def close(self) -> None:
        for group_loop in self.group_loops:
            group_loop.stop()
        for group_loop in self.group_loops:
            group_loop.join()
        self._resources.fold_pool.close()


def _disconnect_without_doorbell(group_loop_: weakref.ref[GroupLoop], local_rank_: weakref.ref[LocalRank]) -> None:
    """A rank whose doorbell never came would be waited for in vain."""
    group_loop, local_rank = group_loop_(), local_rank_()
    if group_loop is not None and local_rank is not None and local_rank.doorbell is None and not local_rank.closed:
        group_loop.disconnect(local_rank.rank, f"its client did not connect within {TOKEN_SECONDS:g} s")
