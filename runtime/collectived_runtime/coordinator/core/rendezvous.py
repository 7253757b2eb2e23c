"""Joins: how waiting ranks-to-be become a generation.

A join goes to the generation of its name that is *forming*, else opens one. It is complete at its largest size, or,
where it is elastic, when it has *settled*: some seconds after the smallest size was reached.

Completion: what follows when all ranks of a generation are here.

Its table is the one stored for groups of that name and shape, or is made from the topology; then the ranks get it.
With `--tune`, where nothing is stored, the links are measured before that: each worker is asked about its link to the
next one in the circle of the group, so that some worker reports every link of the circle in each of its directions.
The worst of the answers makes the table. It is one table for all, even if their measurements differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from collectived_proto.devices import DeviceName
from collectived_proto.report.phrases import format_seconds, is_or_are, members_text, ranks_text
from collectived_proto.report.quantities import format_measured_rate, format_measured_time
from collectived_proto.types import GroupInfo, Member, Peer, unscoped_name
from collectived_runtime.coordinator.core import faults, scaling
from collectived_runtime.coordinator.core.admission import (
    Rejection,
    describe_absentees,
    find_rejection,
    forget_absence,
    record_rejection,
    record_withdrawal,
)
from collectived_runtime.coordinator.core.events import (
    Effect,
    JoinAsk,
    JoinCancelled,
    JoinDone,
    JoinRefused,
    JoinUpdate,
    LinkMeasured,
    Log,
    MeasureLink,
    SaveTable,
    SendToWorker,
)
from collectived_runtime.coordinator.core.registry import (
    Departure,
    FormingGroup,
    GenerationRecord,
    Measurement,
    PendingJoin,
    Registry,
    identity,
)
from collectived_runtime.coordinator.core.timers import (
    MeasurementTimeout,
    ProgressTimer,
    SettleTimeout,
)
from collectived_runtime.coordinator.core.tuning import add_stored_table, make_table, measure_crowd, worst_case_model
from collectived_runtime.coordinator.core.verdicts import (
    previous_generation_text,
    progress_text,
)

# While few wait, each gets news of every arrival at once. Among many that would be quadratic, so each
# gets news at most once per PROGRESS_INTERVAL_SECONDS.
MAX_IMMEDIATE_UPDATES = 32
PROGRESS_INTERVAL_SECONDS = 0.5
PREVIOUS_POLL_SECONDS = 0.25  # whether the generation before has ended
MEASUREMENT_TIMEOUT_SECONDS = 3.0
MAX_TIMER_SECONDS = 60.0  # armed again after that: those of groups that have been given up do not pile up


def handle_join(registry: Registry, task: int, ask: JoinAsk, now: float) -> Iterator[Effect]:
    """A rank-to-be asks; the same request again gets the same answer."""
    if (task, ask.request) in registry.generation_by_join:
        yield from resend_join_answer(registry, task, ask.request)
        return
    forming = registry.forming.get(ask.name)
    if forming and (task, ask.request) in forming.pending_joins:
        yield SendToWorker(task, _update(registry, forming, ask.request))
        return
    rejection = find_rejection(registry, task, ask, forming)
    if rejection is not None:
        yield from _reject(registry, PendingJoin(task, ask, 0), rejection, now)
        return
    if forming is None:
        forming = _open(registry, ask, now)
    registry.arrivals += 1
    waiting = PendingJoin(task, ask, registry.arrivals)
    forming.pending_joins[task, ask.request] = waiting
    forming.worker_by_versions.setdefault(registry.workers[task].hello.versions, task)
    if ask.rank is not None:
        forming.joins_by_rank[ask.rank] = waiting
    forming.previous_ranks.pop(waiting.identity, None)
    forget_absence(forming, waiting)
    if len(forming.pending_joins) == forming.max_size:
        yield from _complete(registry, forming, now)
        return
    if len(forming.pending_joins) >= forming.min_size and forming.complete_at is None:
        forming.complete_at = now + forming.settle_seconds
        _arm_settle_timer(registry, forming, now)
    yield from _announce_join(registry, forming, waiting, now)
    yield from scaling.propose_waiting_count(registry, ask.name, now)


def _reject(registry: Registry, join: PendingJoin, why: Rejection, now: float) -> Iterator[Effect]:
    """Refuse the join of a process, and report that to those that wait: they may wait for it."""
    registry.counts.refused += 1
    if why.limit is not None:
        registry.counts.limited[why.limit] = registry.counts.limited.get(why.limit, 0) + 1
    yield SendToWorker(join.task, JoinRefused(join.ask.request, why.code, why.text))
    yield Log("info", f"join of group {unscoped_name(join.ask.name)!r} refused: {why.text}")
    forming = registry.forming.get(join.ask.name)
    if forming is not None and record_rejection(forming, join, why):
        yield from _announce(registry, forming, now)


def handle_join_cancel(registry: Registry, event: JoinCancelled, now: float) -> Iterator[Effect]:
    """A rank-to-be gives up. Where its generation is complete already it is lost to the others."""
    asked_by = (event.task, event.request)
    if asked_by in registry.generation_by_join:
        registry.counts.withdrawn += 1
        generation = registry.generations[registry.generation_by_join[asked_by]]
        rank = generation.requests[asked_by]
        reason = f"it gave up joining: {event.reason or 'no reason given'}"
        yield from faults.mark_rank_lost(registry, generation, rank, 0, reason, now)
        yield from finish_measurement(registry, generation.info.generation)
        return
    for forming in list(registry.forming.values()):
        if asked_by in forming.pending_joins:
            registry.counts.withdrawn += 1
            yield from _remove(registry, forming, [asked_by], "it waits no longer", now)


def remove_worker_joins(registry: Registry, task: int, now: float) -> Iterator[Effect]:
    """The joins of a worker that is lost wait no longer."""
    for forming in list(registry.forming.values()):
        gone = [request for request in forming.pending_joins if request[0] == task]
        if gone:
            yield from _remove(registry, forming, gone, f"worker {task} has gone", now)


def _arm_settle_timer(registry: Registry, forming: FormingGroup, now: float) -> None:
    assert forming.complete_at is not None
    at = min(forming.complete_at, now + MAX_TIMER_SECONDS)
    registry.add_timer(at, SettleTimeout(forming.name, forming.complete_at))


def on_settle_timeout(registry: Registry, timer: SettleTimeout, now: float) -> Iterator[Effect]:
    """Start an elastic group that has at least its smallest size, but not beside a running one.

    Newcomers wait for the ranks of that one to end it and to come too.
    """
    forming = registry.forming.get(timer.name)
    if forming is None or forming.complete_at != timer.complete_at:
        return
    if timer.complete_at <= now and _is_previous_running(registry, forming):
        forming.complete_at = now + max(forming.settle_seconds, PREVIOUS_POLL_SECONDS)
    if forming.complete_at > now:
        _arm_settle_timer(registry, forming, now)
        return
    yield from _complete(registry, forming, now)


def _is_previous_running(registry: Registry, forming: FormingGroup) -> bool:
    """Whether the generation before still runs, with ranks that are not here."""
    previous = registry.generations.get(registry.latest_generations.get(forming.name, 0))
    if previous is None or previous.is_over or previous.drained_from is not None:
        return False
    here = {waiting.identity for waiting in forming.pending_joins.values()}
    members = previous.info.members
    return any(member.rank not in previous.departed and identity(member) not in here for member in members)


def on_progress_timer(registry: Registry, name: str, now: float) -> Iterator[Effect]:
    """Send progress to all that wait. The timer for this was armed while many arrived at once."""
    forming = registry.forming.get(name)
    if forming and forming.is_progress_armed:
        forming.is_progress_armed = False
        yield from _broadcast_progress(registry, forming, now)


def _open(registry: Registry, ask: JoinAsk, now: float) -> FormingGroup:
    forming = FormingGroup(ask.name, ask.min_size, ask.max_size, ask.settle_seconds, now)
    previous = registry.generations.get(registry.latest_generations.get(ask.name, 0))
    if previous:
        forming.previous_ranks = {identity(m): m.rank for m in previous.info.members if m.rank not in previous.departed}
    registry.forming[ask.name] = forming
    return forming


def _remove(
    registry: Registry, forming: FormingGroup, requests: list[tuple[int, str]], why: str, now: float
) -> Iterator[Effect]:
    for request in requests:
        gone = forming.pending_joins.pop(request)
        record_withdrawal(forming, gone, why)
        if gone.ask.rank is not None:
            del forming.joins_by_rank[gone.ask.rank]
    here = {waiting.task for waiting in forming.pending_joins.values()}
    forming.worker_by_versions = {
        registry.workers[task].hello.versions: task for task in here if task in registry.workers
    }
    if len(forming.pending_joins) < forming.min_size:
        forming.complete_at = None
    if forming.pending_joins:
        yield from _broadcast_progress(registry, forming, now)
    else:
        del registry.forming[forming.name]
        registry.discard_unused_key(forming.name)
    yield from scaling.propose_waiting_count(registry, forming.name, now)


def _announce_join(registry: Registry, forming: FormingGroup, newcomer: PendingJoin, now: float) -> Iterator[Effect]:
    if len(forming.pending_joins) > MAX_IMMEDIATE_UPDATES:
        yield SendToWorker(newcomer.task, _update(registry, forming, newcomer.ask.request))
    yield from _announce(registry, forming, now)


def _announce(registry: Registry, forming: FormingGroup, now: float) -> Iterator[Effect]:
    """Send news to those that wait: at once where they are few, else soon."""
    if len(forming.pending_joins) <= MAX_IMMEDIATE_UPDATES:
        yield from _broadcast_progress(registry, forming, now)
    elif not forming.is_progress_armed:
        forming.is_progress_armed = True
        registry.add_timer((forming.progress_sent_at or now) + PROGRESS_INTERVAL_SECONDS, ProgressTimer(forming.name))


def _broadcast_progress(registry: Registry, forming: FormingGroup, now: float) -> Iterator[Effect]:
    forming.progress_sent_at = now
    text = describe_progress(registry, forming)
    for task, request in forming.pending_joins:
        yield SendToWorker(task, JoinUpdate(request, len(forming.pending_joins), _expected(forming), text))


def _update(registry: Registry, forming: FormingGroup, request: str) -> JoinUpdate:
    return JoinUpdate(request, len(forming.pending_joins), _expected(forming), describe_progress(registry, forming))


def _expected(forming: FormingGroup) -> int:
    return forming.max_size if forming.complete_at is not None else forming.min_size


def describe_progress(registry: Registry, forming: FormingGroup) -> str:
    """`3 of 4 ranks here, waiting for 1 more (rank 2); rank 2 (…) still lives in the previous …; refused: …`"""
    present = len(forming.pending_joins)
    text = progress_text(present, forming.min_size, forming.max_size, forming.complete_at is not None)
    few = forming.max_size - present <= MAX_IMMEDIATE_UPDATES
    if few and present == len(forming.joins_by_rank) and forming.min_size == forming.max_size:
        absent = [rank for rank in range(forming.max_size) if rank not in forming.joins_by_rank]
        text += f" ({ranks_text(absent)})"
    previous = registry.generations.get(registry.latest_generations.get(forming.name, 0))
    if previous and forming.previous_ranks:
        ranks = [rank for rank in forming.previous_ranks.values() if rank not in previous.departed]
        if ranks:
            text += f"; {previous_generation_text([previous.info.members[rank] for rank in ranks])}"
    return text + describe_absentees(forming)


def assign_ranks(forming: FormingGroup) -> list[PendingJoin]:
    """The order of ranks: ranks asked for stay, the others fill the rest by task, device (as numbers) and arrival.

    An elastic group may begin smaller than a rank that was asked for; that one is placed like the others.
    """
    size = len(forming.pending_joins)
    fixed = {rank: waiting for rank, waiting in forming.joins_by_rank.items() if rank < size}
    rest = sorted(
        (waiting for waiting in forming.pending_joins.values() if fixed.get(_requested_rank(waiting)) is not waiting),
        key=lambda waiting: (DeviceName.parse(waiting.ask.device, waiting.task), waiting.arrival),
    )
    order = iter(rest)
    return [fixed[rank] if rank in fixed else next(order) for rank in range(size)]


def _requested_rank(waiting: PendingJoin) -> int:
    return -1 if waiting.ask.rank is None else waiting.ask.rank


def _complete(registry: Registry, forming: FormingGroup, now: float) -> Iterator[Effect]:
    del registry.forming[forming.name]
    order = assign_ranks(forming)
    members = tuple(
        Member(rank, w.ask.device, w.task, w.ask.host, w.ask.pid, w.ask.label) for rank, w in enumerate(order)
    )
    info = GroupInfo(forming.name, registry.get_or_create_key(forming.name), registry.new_id(), members)
    generation = GenerationRecord(info, _peers(registry, members))
    generation.idle = any(waiting.ask.idle for waiting in order)
    if any(waiting.ask.last_instance >= 0 for waiting in order):
        generation.last_instances = tuple(waiting.ask.last_instance for waiting in order)
    generation.requests = {(w.task, w.ask.request): rank for rank, w in enumerate(order)}
    registry.generation_by_join |= dict.fromkeys(generation.requests, info.generation)
    registry.counts.granted += info.size
    _mark_rejoined(registry, members, forming.name)
    registry.generations[info.generation] = generation
    registry.latest_generations[forming.name] = info.generation
    yield from finish_rendezvous(registry, generation, now)
    yield Log("info", f"group {unscoped_name(info.name)!r} is complete: {info.size} ranks: {members_text(members)}")


def _peers(registry: Registry, members: tuple[Member, ...]) -> tuple[Peer, ...]:
    ranks: dict[int, list[int]] = {}
    for member in members:
        ranks.setdefault(member.worker, []).append(member.rank)
    hellos = {task: registry.workers[task].hello for task in sorted(ranks)}
    return tuple(
        Peer(task, hello.incarnation, hello.host, hello.link_address, tuple(ranks[task]), hello.nccl)
        for task, hello in hellos.items()
    )


def _mark_rejoined(registry: Registry, members: tuple[Member, ...], name: str) -> None:
    """Note that members that joined again after a failure have departed from the generations that failed."""
    here = {identity(member) for member in members}
    for generation in list(registry.generations.values()):
        if generation.info.name != name or not generation.failed:
            continue
        for member in generation.info.members:
            if identity(member) in here:
                generation.departed.setdefault(member.rank, Departure.MOVED)
        registry.retire_if_over(generation)


def finish_rendezvous(registry: Registry, generation: GenerationRecord, now: float) -> Iterator[Effect]:
    """All ranks are here: announce the generation, or have their links measured first."""
    known = registry.stored_tables.get(table_name(generation))
    if known is None and registry.tune and len(generation.peers) > 1:
        yield from _start_measurement(registry, generation, now)
        return
    generation.table = known or make_table(generation.peers, crowd=_measure_crowd(registry, generation))
    yield from _send_join_done(registry, generation)


def _measure_crowd(registry: Registry, generation: GenerationRecord) -> float:
    workers = (registry.workers.get(peer.task) for peer in generation.peers)
    return measure_crowd(worker.hello for worker in workers if worker is not None)


def resend_join_answer(registry: Registry, task: int, request: str) -> Iterator[Effect]:
    """The answer to a join of a generation that is complete, and what has been decided about it since."""
    generation = registry.generations[registry.generation_by_join[task, request]]
    if generation.info.generation in registry.measurements:
        yield SendToWorker(task, _make_measuring_update(generation, request))
        return
    yield SendToWorker(task, _make_join_done(generation, _group_with_history(generation), task, request))
    for verdict in generation.verdicts:
        yield SendToWorker(task, verdict)


def handle_measurement(registry: Registry, event: LinkMeasured) -> Iterator[Effect]:
    """A worker reports a measured link. The last answer makes the table."""
    measurement = registry.measurements.get(event.generation)
    if measurement is None or (event.task, event.peer) not in measurement.links:
        return
    measurement.links[event.task, event.peer] = event
    if None not in measurement.links.values():
        yield from finish_measurement(registry, event.generation)


def finish_measurement(registry: Registry, number: int) -> Iterator[Effect]:
    """End the measuring of a generation, if it goes on: its table is made of what is known by now."""
    measurement = registry.measurements.pop(number, None)
    if measurement is None:
        return
    generation = registry.generations[number]
    sound = [link for link in measurement.links.values() if link is not None and link.is_valid]
    model = worst_case_model(sound)
    generation.table = make_table(generation.peers, model, _measure_crowd(registry, generation))
    group = unscoped_name(generation.info.name)
    if not generation.failed and len(sound) == len(measurement.links):
        name = table_name(generation)
        registry.stored_tables = add_stored_table(registry.stored_tables, name, generation.table)
        yield SaveTable(name, generation.table)
        found = f"{format_measured_time(model.across.latency)}, {format_measured_rate(model.across.bandwidth)} at worst"
        yield Log("info", f"the links of group {group!r} were measured: {found}; the table is stored as {name!r}")
    elif not generation.failed:
        instead = "the others decide" if sound else "usual links are assumed"
        yield Log(
            "warning",
            f"of the links of group {group!r} {', '.join(_describe_unmeasured(measurement))}: "
            f"{instead}, and the table is not stored; the next group of this name is measured again",
        )
    yield from _send_join_done(registry, generation)


def table_name(generation: GenerationRecord) -> str:
    """`world 2,2`: the group's name without its job, and the ranks on each of its workers."""
    return f"{unscoped_name(generation.info.name)} {','.join(str(len(peer.ranks)) for peer in generation.peers)}"


def _start_measurement(registry: Registry, generation: GenerationRecord, now: float) -> Iterator[Effect]:
    """Ask every worker about its link to the next one, in the order of the ring."""
    number = generation.info.generation
    circle = sorted(generation.peers, key=lambda peer: peer.ranks[0])
    following = circle[1:] + circle[:1]
    registry.measurements[number] = Measurement(
        {(peer.task, other.task): None for peer, other in zip(circle, following, strict=True)}
    )
    for peer, other in zip(circle, following, strict=True):
        yield SendToWorker(peer.task, MeasureLink(number, other.task, other.link_address))
    for task, request in generation.requests:
        yield SendToWorker(task, _make_measuring_update(generation, request))
    registry.add_timer(now + MEASUREMENT_TIMEOUT_SECONDS, MeasurementTimeout(number))


def _send_join_done(registry: Registry, generation: GenerationRecord) -> Iterator[Effect]:
    group = _group_with_history(generation)
    for task, request in generation.requests:
        if task in registry.workers:
            yield SendToWorker(task, _make_join_done(generation, group, task, request))
    for verdict in generation.verdicts:
        for task in generation.ranks_by_worker:
            if task in registry.workers:
                yield SendToWorker(task, verdict)


def _make_join_done(generation: GenerationRecord, group: GroupInfo, task: int, request: str) -> JoinDone:
    rank = generation.requests[task, request]
    return JoinDone(request, group, rank, generation.peers, generation.table, generation.idle)


def _group_with_history(generation: GenerationRecord) -> GroupInfo:
    """The group with what its ranks had finished in an earlier generation, so that callers can line up."""
    if not generation.last_instances:
        return generation.info
    pairs = zip(generation.info.members, generation.last_instances, strict=True)
    return replace(generation.info, members=tuple(replace(member, last_instance=last) for member, last in pairs))


def _make_measuring_update(generation: GenerationRecord, request: str) -> JoinUpdate:
    return JoinUpdate(request, generation.info.size, generation.info.size, measuring_text(generation))


def measuring_text(generation: GenerationRecord) -> str:
    size, workers = generation.info.size, len(generation.peers)
    return (
        f"all {size} ranks {is_or_are(size)} here, the links between {workers} workers are being measured "
        f"({format_seconds(MEASUREMENT_TIMEOUT_SECONDS)} at most)"
    )


def _describe_unmeasured(measurement: Measurement) -> Iterator[str]:
    for (task, peer), link in measurement.links.items():
        if link is None or not link.is_valid:
            silent = f"no answer within {format_seconds(MEASUREMENT_TIMEOUT_SECONDS)}"
            why = silent if link is None else link.text or f"got {link}"
            yield f"that of worker {task} to worker {peer} could not be measured ({why})"
