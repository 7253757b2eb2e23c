"""Groups as this worker takes part in them: joins under way, lanes, and what the coordinator says about either."""

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
from dataclasses import dataclass, field, replace

from collectived_proto.announcements import formed_from_bytes, ruling_from_proto
from collectived_proto.codec import (
    group_from_proto,
    group_to_proto,
    peer_from_proto,
    positions_to_proto,
    report_to_proto,
    tiers_from_proto,
    verdict_to_proto,
)
from collectived_proto.devices import DeviceName
from collectived_proto.errors import (
    Code,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    error_class,
)
from collectived_proto.local.wire import TOKEN_BYTES
from collectived_proto.types import RankPosition, Report, ReportKind, shown_name
from collectived_proto.v1 import common_pb2, worker_pb2
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_runtime.engine.crew import Crew
from collectived_runtime.engine.lane import Lane, Surroundings
from collectived_runtime.engine.meeting import Engine
from collectived_runtime.engine.recorder import Recorder
from collectived_runtime.engine.results import Budget
from collectived_runtime.engine.seat import Seat
from collectived_runtime.engine.topology import Topology
from collectived_runtime.guests.rules import Reserved, may_have
from collectived_runtime.limits.descriptors import any_room
from collectived_runtime.limits.most import Most
from collectived_runtime.limits.refusals import Limit, Refusals, too_many
from collectived_runtime.transport.reception import TOKEN_SECONDS, Reception
from collectived_runtime.worker import probe
from collectived_runtime.worker.account import Account
from collectived_runtime.worker.descriptions import LONGEST_GROUP, Descriptions, check_length
from collectived_runtime.worker.grpc_alone.remote import Remote
from collectived_runtime.worker.grpc_alone.submit import RemoteRank
from collectived_runtime.worker.sessions import Session

log = logging.getLogger("collectived.worker")

IDLE_SECONDS = 10.0  # after which a group that does nothing gives its memory back
PATIENCE_SECONDS = 2.0  # after which a client that joins is told that the coordinator is away, if it is
# What a lane and a seat need of the system is not there: descriptors, memory, or (a RuntimeError to Python) a thread.
NO_ROOM = (OSError, MemoryError, RuntimeError)
COORDINATOR_AWAY = "the coordinator cannot be reached; the join waits for it"

Answer = worker_pb2.JoinEvent | pb.JoinRefused


@dataclass(slots=True)
class _Join:
    ask: pb.JoinAsk
    session: Session
    answers: asyncio.Queue[Answer] = field(default_factory=asyncio.Queue)


class Groups:
    """Runs in the worker's event loop; lanes call back from their threads.

    Args:
        say: sends a message to the coordinator, from any thread.
        connected: whether the coordinator can be reached.
        refusals: counts what limits refuse, and what nobody should have sent.
        rules: who may join which groups, by their names within the cluster: `JOB/NAME`, or `/NAME`.
        native: what the worker has of NCCL, if anything.
    """

    def __init__(
        self,
        task: int,
        host: str,
        devices: tuple[DeviceName, ...],
        reception: Reception,
        door: str,
        budget: Budget,
        say: Callable[[pb.WorkerMessage], None],
        connected: Callable[[], bool],
        refusals: Refusals | None = None,
        most: Most | None = None,
        rules: Sequence[Reserved] = (),
        native: Engine | None = None,
    ) -> None:
        self._refusals = refusals or Refusals()
        self._most = most or Most()
        self._asking: Counter[str] = Counter()  # joins under way, by name
        self._task = task
        self._host = host
        self._devices = devices
        self._reception = reception
        self._door = door
        self._budget = budget
        self._crew = Crew()
        self._native = native
        self.recorder = Recorder()
        self._say = say
        self._connected = connected
        self._rules = rules
        self._loop = asyncio.get_running_loop()
        self._joins: dict[str, _Join] = {}
        self._lanes: dict[tuple[int, int], Lane] = {}  # group key, the generation in which the lane began
        self._turned_away: dict[tuple[int, int], dict[int, str]] = {}  # ranks for which no lane could be made, and why
        self.account = Account()
        self.joins: Counter[str] = Counter()  # that ended, by outcome
        self._formed = (b"", pb.Formed())  # read last: all local ranks of a generation are told the same
        self.stall_after = 1.0
        self.lost_after = 10.0

    @property
    def lanes(self) -> list[Lane]:
        return list(self._lanes.values())

    # For clients

    async def join(self, session: Session, request: worker_pb2.JoinRequest) -> AsyncGenerator[worker_pb2.JoinEvent]:
        """Progress, then Joined.

        Raises:
            CollectiveError: refused, by this worker or by the coordinator.
        """
        ask = self._ask(session, request)
        with session.asking():
            self._check_room(ask.name)
            self._asking[ask.name] += 1
            try:
                async with contextlib.aclosing(self._joined(session, ask)) as events:
                    async for event in events:
                        yield event
            finally:
                self._asking[ask.name] -= 1
                if not self._asking[ask.name]:
                    del self._asking[ask.name]

    def _check_room(self, name: str) -> None:
        """Raises ResourceExhaustedError where there are as many groups, or descriptors, as there may be."""
        most = self._most
        names = self._asking.keys() | {lane.topology.group.name for lane in self._lanes.values()}
        if most.groups and name not in names and len(names) >= most.groups:
            self._refusals.limit(Limit.GROUPS)
            what = f"this worker has ranks of {len(names)} groups"
            raise ResourceExhaustedError(too_many(what, most.groups, "max_groups", "leave some"))
        if not any_room(most.descriptors):
            self._refusals.limit(Limit.DESCRIPTORS)
            what = "this worker has nearly no descriptors left"
            raise ResourceExhaustedError(
                too_many(what, most.descriptors, "the limit of open files", "close sessions that are not needed")
            )

    async def _joined(self, session: Session, ask: pb.JoinAsk) -> AsyncGenerator[worker_pb2.JoinEvent]:
        join = _Join(ask, session)
        outcome = "withdrawn"
        self._joins[join.ask.request] = join
        self._say(pb.WorkerMessage(join=join.ask))
        ended = asyncio.ensure_future(session.ended.wait())
        try:
            while True:
                answer = asyncio.ensure_future(join.answers.get())
                try:
                    await asyncio.wait({answer, ended}, timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done() and not ended.done() and not self._connected():
                        yield worker_pb2.JoinEvent(progress=worker_pb2.JoinProgress(text=COORDINATOR_AWAY))
                finally:
                    answer.cancel()  # which changes nothing where it is there
                if not answer.done() and not ended.done():
                    continue
                if answer.cancelled() or not answer.done():
                    raise session.gone
                event = answer.result()
                if isinstance(event, pb.JoinRefused):
                    outcome = "refused"
                    raise error_class(event.code)(event.message)
                if event.HasField("joined"):
                    outcome = "granted"  # its client may hang up as soon as it has heard
                yield event
                if event.HasField("joined"):
                    return
        finally:
            ended.cancel()
            self.joins[outcome] += 1
            if self._joins.pop(join.ask.request, None) is not None:
                self._say(
                    pb.WorkerMessage(
                        join_cancel=pb.JoinCancel(request=join.ask.request, reason="the client has withdrawn")
                    )
                )

    def _ask(self, session: Session, request: worker_pb2.JoinRequest) -> pb.JoinAsk:
        if not request.name:
            raise InvalidArgumentError("a group needs a name")
        check_length("the name of a group", request.name, LONGEST_GROUP)
        check_length("device", request.device, LONGEST_GROUP)
        if not 1 <= request.min_size <= request.max_size:
            raise InvalidArgumentError(
                f"a group's size must be at least 1 and its minimum at most its maximum, "
                f"got {request.min_size} to {request.max_size}"
            )
        client = session.client
        scoped = request.name if request.name.startswith("/") else f"{client.job}/{request.name}"
        if not may_have(self._rules, scoped, session.caller):
            raise PermissionDeniedError(
                f"group {request.name!r} is for those whom a rule of this worker names, and you are not among them: "
                "ask whoever runs it (`group_rules`), or choose another name"
            )
        ask = pb.JoinAsk(
            request=f"{self._task}-{secrets.token_hex(8)}",
            name=scoped,
            min_size=request.min_size,
            max_size=request.max_size,
            settle_seconds=request.settle_seconds,
            device=str(self._device(session, request.device)),
            host=self._host,
            pid=client.pid,
            label=client.label,
            idle=request.idle,
        )
        if request.HasField("rank"):
            ask.rank = request.rank
        if request.HasField("last_instance"):
            ask.last_instance = request.last_instance
        return ask

    def _device(self, session: Session, text: str) -> DeviceName:
        """The device that is asked for, of those that the session may have; without one the first."""
        if not text:
            if not session.devices:
                raise PermissionDeniedError("no device of this worker is for you: ask whoever runs it (`device_rules`)")
            return session.devices[0]
        try:
            device = DeviceName.parse(text, self._task)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None
        if device not in session.devices:
            offered = ", ".join(known.short for known in session.devices) or "none"
            elsewhere = " for this session" if device in self._devices else ""
            raise NotFoundError(f"{text!r} is not a device of worker {self._task}{elsewhere}, which has {offered}")
        return device

    # From the coordinator

    def heard(self, message: pb.CoordinatorMessage) -> None:
        match message.WhichOneof("message"):
            case "join_update":
                update = message.join_update
                progress = worker_pb2.JoinProgress(present=update.present, expected=update.expected, text=update.text)
                self._answer(update.request, worker_pb2.JoinEvent(progress=progress))
            case "join_refused":
                self._answer(message.join_refused.request, message.join_refused)
            case "join_done":
                self._seated(message.join_done)
            case "verdict":
                self._rule(message.verdict)
            case "query":
                self._query(message.query)
            case "measure":
                self._measure(message.measure)
            case "propose":
                self._propose(message.propose)
            case "newcomers":
                told = message.newcomers
                for (key, _), lane in list(self._lanes.items()):
                    if key == told.key:
                        lane.newcomers(told.generation, told.from_instance, told.waiting)
            case other:
                log.warning("a message of kind %s from the coordinator is not known to this release", other)

    def ask_again(self) -> None:
        """The coordinator may have forgotten the joins under way, which it knows by their request, and who has gone."""
        for join in self._joins.values():
            self._say(pb.WorkerMessage(join=join.ask))
        for lane in self._lanes.values():
            lane.report_again()

    def attached(self) -> list[pb.Attached]:
        """The running groups, for a coordinator that may not know them."""
        return [
            pb.Attached(
                group=group_to_proto(lane.group),
                ranks=lane.topology.ranks,
                verdicts=[verdict_to_proto(verdict) for verdict in lane.ledger.verdicts],
                idle=lane.topology.idle,
            )
            for lane in self._lanes.values()
        ]

    def _answer(self, request: str, answer: Answer) -> None:
        join = self._joins.get(request)
        if join is not None:
            join.answers.put_nowait(answer)

    def _rule(self, ruling: common_pb2.Verdict) -> None:
        for (key, _), lane in list(self._lanes.items()):
            if key == ruling.key:
                verdict = ruling_from_proto(ruling, lane.topology.group.members)
                lane.rule(replace(verdict, group=shown_name(verdict.group)))

    def _seated(self, done: pb.JoinDone) -> None:
        try:
            formed = self._read(done.formed)
        except InvalidArgumentError as error:
            self._answer(done.request, pb.JoinRefused(code=Code.INTERNAL, message=f"from the coordinator: {error}"))
            return
        join = self._joins.pop(done.request, None)
        try:
            lane = self._lane(formed)
        except Exception as error:
            self._turn_away(done.rank, join, formed, error)
            return
        if done.rank in lane.seats:  # said twice, for a coordinator that came back does not know what was heard
            return
        if join is None:
            lane.absent(done.rank, "it withdrew while joining")
            return
        joined = worker_pb2.Joined(group=formed.group, rank=done.rank)
        joined.group.name = lane.name
        try:
            if join.session.remote:
                self._seat_remote(join.session, lane, done.rank)
            else:
                joined.door, joined.token = self._door, self._seat(join.session, lane, done.rank)
        except Exception as error:
            lane.absent(done.rank, self._refuse(done.rank, join, lane.name, error))
            return
        join.answers.put_nowait(worker_pb2.JoinEvent(joined=joined))

    def _lane(self, formed: pb.Formed) -> Lane:
        """The lane of a generation, made for the first of its ranks."""
        place = formed.group.key, formed.group.generation
        lane = self._lanes.get(place)
        if lane is None:
            group = group_from_proto(formed.group)
            peers = tuple(peer_from_proto(peer) for peer in formed.peers)
            topology = Topology.of(group, peers, self._task, tiers_from_proto(formed.table), formed.idle)
            lane = Lane(topology, self._surroundings())
            self._lanes[place] = lane
            self.account.began(lane)
            for rank, why in self._turned_away.pop(place, {}).items():
                lane.absent(rank, why)
        return lane

    def _turn_away(self, rank: int, join: _Join | None, formed: pb.Formed, error: Exception) -> None:
        """There is no lane for this rank. The others of its group hear of it at once, for they would wait for it."""
        group = formed.group
        why = self._refuse(rank, join, shown_name(group.name), error)
        self._report(Report(group.key, group.generation, ReportKind.LOST, rank=rank, text=why))
        turned_away = self._turned_away.setdefault((group.key, group.generation), {})
        turned_away[rank] = why
        if turned_away.keys() >= {rank for peer in formed.peers if peer.task == self._task for rank in peer.ranks}:
            del self._turned_away[group.key, group.generation]  # nobody is left who might get a lane

    def _refuse(self, rank: int, join: _Join | None, name: str, error: Exception) -> str:
        """Tells a rank that it cannot have its place; returns why, for the others."""
        code, why, advice = Code.INTERNAL, f"a defect of collectived: {type(error).__name__}: {error}", ""
        if isinstance(error, NO_ROOM):
            code, why = Code.RESOURCE_EXHAUSTED, f"its worker has no room for it: {error}"
            advice = "; leave groups that are not needed, or raise the worker's limits of open files and threads"
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            self._refusals.limit(Limit.DESCRIPTORS)
        text = f"rank {rank} of group {name!r} is refused: {why}"
        log.warning("%s", text, exc_info=error if code is Code.INTERNAL else None)
        if join is not None:
            join.answers.put_nowait(pb.JoinRefused(code=code, message=text + advice))
        return why

    def _read(self, formed: bytes) -> pb.Formed:
        if self._formed[0] != formed:
            self._formed = (formed, formed_from_bytes(formed))
        return self._formed[1]

    def _seat(self, session: Session, lane: Lane, rank: int) -> bytes:
        """Seats a rank that is to connect its doorbell; the token that admits this."""
        pidfd = os.dup(session.pidfd) if session.pidfd >= 0 else -1
        seat = Seat(rank, lane.topology.group.members[rank], session.arenas.memory, pidfd, session.seated())
        lane.take_seat(seat)
        session.hold(lane, rank)
        token = secrets.token_bytes(TOKEN_BYTES)
        self._reception.admit(token, functools.partial(lane.connect, rank), session.uid)
        self._loop.call_later(TOKEN_SECONDS, _hang_up_late, weakref.ref(lane), weakref.ref(seat))
        return token

    def _seat_remote(self, session: Session, lane: Lane, rank: int) -> None:
        """Seats a rank whose client submits over gRPC."""
        group = replace(lane.topology.group, name=lane.name)
        remote = Remote(
            group,
            rank,
            session.budget,
            functools.partial(lane.submit, rank),
            functools.partial(lane.hang_up, rank),
            lambda generation, instance, op, timeout: lane.late(rank, generation, instance, op, timeout),
            lambda: self._refusals.limit(Limit.IN_FLIGHT),
        )
        seat = Seat(rank, group.members[rank], remote.uploads.memory, -1, outlet=remote)
        lane.take_seat(seat)
        session.hold(lane, rank, RemoteRank(remote, Descriptions(lane, seat)))

    def _query(self, query: pb.Query) -> None:
        for (key, _), lane in list(self._lanes.items()):
            if key == query.key:
                lane.query(query.instance, lambda generation, ranks: self._position(query, generation, ranks))

    def _propose(self, asked: pb.Propose) -> None:
        def answer(from_instance: int, following: int) -> None:
            promised = pb.Promised(proposal=asked.proposal, from_instance=from_instance, next_instance=following)
            self._say(pb.WorkerMessage(promised=promised))

        for (key, _), lane in list(self._lanes.items()):
            if key == asked.key:
                lane.promise(asked.generation, answer)

    def _measure(self, asked: pb.Measure) -> None:
        def found(link: probe.Found) -> None:
            measured = pb.Measured(
                generation=asked.generation,
                peer=asked.peer,
                latency_seconds=link.latency_seconds,
                bytes_per_second=link.bytes_per_second,
                text=link.why,
            )
            self._say(pb.WorkerMessage(measured=measured))

        probe.probe(self._task, asked.peer, asked.link_address, self._reception, found)

    # From lanes, in their threads

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            f"/job:worker/task:{self._task}",
            self._reception,
            self._budget,
            self._crew,
            self.stall_after,
            IDLE_SECONDS,
            self._report,
            self._lane_ended,
            self.recorder,
            self._refusals,
            self._native,
            self.lost_after,
            self._connected,
        )

    def _report(self, report: Report) -> None:
        self._say(pb.WorkerMessage(report=report_to_proto(report)))

    def _position(self, query: pb.Query, generation: int, ranks: tuple[RankPosition, ...]) -> None:
        if generation == query.generation:
            position = pb.Position(
                key=query.key,
                generation=query.generation,
                instance=query.instance,
                query=query.query,
                ranks=positions_to_proto(ranks),
            )
            self._say(pb.WorkerMessage(position=position))

    def _lane_ended(self, lane: Lane) -> None:
        self._loop.call_soon_threadsafe(self._forget, lane)

    def _forget(self, lane: Lane) -> None:
        """Counts it among those that ended in the same moment in which it is none of the others any more."""
        group = lane.topology.group
        self._lanes.pop((group.key, group.generation), None)
        self.account.ended(lane)

    def close(self) -> None:
        for lane in self.lanes:
            lane.stop()
        for lane in self.lanes:
            lane.join()
        self._crew.close()


def _hang_up_late(lane_: weakref.ref[Lane], seat_: weakref.ref[Seat]) -> None:
    """A rank whose doorbell never came would be waited for in vain."""
    lane, seat = lane_(), seat_()
    if lane is not None and seat is not None and seat.bell is None and not seat.gone:
        lane.hang_up(seat.rank, f"it did not connect its doorbell within {TOKEN_SECONDS:g} s")
