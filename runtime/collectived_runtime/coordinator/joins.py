"""Joins: how waiting ranks-to-be become a generation.

A join goes to the generation of its name that is *forming*, else opens one. It is complete at its largest size, or,
where it is elastic, when it has *settled*: some seconds after the smallest size was reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from collectived_proto.devices import DeviceName
from collectived_proto.errors import Code, FailedPreconditionError
from collectived_proto.protocol import agree
from collectived_proto.types import GroupInfo, Member, Peer, shown_name
from collectived_proto.wording import members_text, ranks_text
from collectived_runtime.coordinator import completion, draining, faults, newcomers
from collectived_runtime.coordinator.events import (
    Effect,
    JoinAsk,
    JoinCancelled,
    JoinRefused,
    JoinUpdate,
    Log,
    Send,
)
from collectived_runtime.coordinator.registry import (
    Departure,
    Forming,
    Generation,
    Progress,
    Registry,
    Settled,
    Waiting,
    identity,
)
from collectived_runtime.coordinator.wording import elsewhere_text, progress_text
from collectived_runtime.limits.refusals import Limit, too_many

# While few wait, everybody hears of every arrival at once; among many that would be quadratic, so then at most this
# often.
TOLD_AT_ONCE = 32
TOLD_EVERY_SECONDS = 0.5
LOOK_AGAIN_SECONDS = 0.25  # whether the generation before has ended
LONGEST_TIMER_SECONDS = 60.0  # armed again after that: those of groups that have been given up do not pile up


def asked(book: Registry, task: int, ask: JoinAsk, now: float) -> Iterator[Effect]:
    """A rank-to-be asks; the same request again gets the same answer."""
    if (task, ask.request) in book.joined:
        yield from completion.answer_again(book, task, ask.request)
        return
    forming = book.forming.get(ask.name)
    if forming and (task, ask.request) in forming.waiting:
        yield Send(task, _update(book, forming, ask.request))
        return
    if away := draining.refusal(book, task, ask.name):
        yield Send(task, JoinRefused(ask.request, Code.UNAVAILABLE, away))
        return
    refusal = _refusal(ask, task, forming)
    if refusal:
        book.counts.refused += 1
        yield Send(task, JoinRefused(ask.request, Code.INVALID_ARGUMENT, refusal))
        yield Log("info", f"join of group {shown_name(ask.name)!r} refused: {refusal}")
        return
    if apart := _apart(book, task, forming):
        book.counts.refused += 1
        yield Send(task, JoinRefused(ask.request, Code.FAILED_PRECONDITION, apart))
        yield Log("warning", f"join of group {shown_name(ask.name)!r} refused: {apart}")
        return
    if excess := _excess(book, ask, forming):
        limit, refusal = excess
        book.counts.refused += 1
        book.counts.limited[limit] = book.counts.limited.get(limit, 0) + 1
        yield Send(task, JoinRefused(ask.request, Code.RESOURCE_EXHAUSTED, refusal))
        yield Log("info", f"join of group {shown_name(ask.name)!r} refused: {refusal}")
        return
    if forming is None:
        forming = _open(book, ask, now)
    book.arrivals += 1
    waiting = Waiting(task, ask, book.arrivals)
    forming.waiting[task, ask.request] = waiting
    forming.spoken.setdefault(book.workers[task].hello.versions, task)
    if ask.rank is not None:
        forming.taken[ask.rank] = waiting
    forming.elsewhere.pop(waiting.identity, None)
    if len(forming.waiting) == forming.max_size:
        yield from _complete(book, forming, now)
        return
    if len(forming.waiting) >= forming.min_size and forming.complete_at is None:
        forming.complete_at = now + forming.settle_seconds
        _await_settling(book, forming, now)
    yield from _tell(book, forming, waiting, now)
    yield from newcomers.changed(book, ask.name, now)


def cancelled(book: Registry, event: JoinCancelled, now: float) -> Iterator[Effect]:
    """A rank-to-be gives up. Where its generation is complete already it is lost to the others."""
    asked_by = (event.task, event.request)
    if asked_by in book.joined:
        book.counts.withdrawn += 1
        generation = book.generations[book.joined[asked_by]]
        rank = generation.requests[asked_by]
        reason = f"it gave up joining: {event.reason or 'no reason given'}"
        yield from faults.rank_lost(book, generation, rank, 0, reason, now)
        yield from completion.conclude(book, generation.info.generation)
        return
    for forming in list(book.forming.values()):
        if asked_by in forming.waiting:
            book.counts.withdrawn += 1
            yield from _remove(book, forming, [asked_by], now)


def worker_gone(book: Registry, task: int, now: float) -> Iterator[Effect]:
    """The joins of a worker that is lost wait no longer."""
    for forming in list(book.forming.values()):
        gone = [request for request in forming.waiting if request[0] == task]
        if gone:
            yield from _remove(book, forming, gone, now)


def _await_settling(book: Registry, forming: Forming, now: float) -> None:
    assert forming.complete_at is not None
    at = min(forming.complete_at, now + LONGEST_TIMER_SECONDS)
    book.arm(at, Settled(forming.name, forming.complete_at))


def settled(book: Registry, timer: Settled, now: float) -> Iterator[Effect]:
    """An elastic group that has its smallest size starts with whoever is here, but not beside one that still runs.

    Newcomers wait for the ranks of that one to end it and to come too.
    """
    forming = book.forming.get(timer.name)
    if forming is None or forming.complete_at != timer.complete_at:
        return
    if timer.complete_at <= now and _lives_on(book, forming):
        forming.complete_at = now + max(forming.settle_seconds, LOOK_AGAIN_SECONDS)
    if forming.complete_at > now:
        _await_settling(book, forming, now)
        return
    yield from _complete(book, forming, now)


def _lives_on(book: Registry, forming: Forming) -> bool:
    """Whether the generation before still runs, with ranks that are not here."""
    previous = book.generations.get(book.latest.get(forming.name, 0))
    if previous is None or previous.over or previous.refused_from is not None:
        return False
    here = {waiting.identity for waiting in forming.waiting.values()}
    members = previous.info.members
    return any(member.rank not in previous.departed and identity(member) not in here for member in members)


def progress_due(book: Registry, name: str, now: float) -> Iterator[Effect]:
    """Tells everybody who waits; the timer for this was armed while many arrived at once."""
    forming = book.forming.get(name)
    if forming and forming.telling:
        forming.telling = False
        yield from _tell_all(book, forming, now)


def _refusal(ask: JoinAsk, task: int, forming: Forming | None) -> str:
    """Why this ask cannot be granted; '' where it can."""
    low, high = ask.min_size, ask.max_size
    if not 1 <= low <= high:
        return f"a group needs 1 <= smallest size <= largest size, got {_size(low, high)}"
    if not 0 <= ask.settle_seconds < math.inf:
        return f"settle must be a number of seconds, not negative, got {ask.settle_seconds!r}"
    try:
        device = DeviceName.parse(ask.device, task)
    except ValueError as error:
        return str(error)
    if device.task != task:
        return f"{ask.device} is a device of worker {device.task}, but the join came from worker {task}: join there"
    if ask.rank is not None and not 0 <= ask.rank < high:
        return f"rank {ask.rank} is out of range: a group of size {_size(low, high)} has ranks 0 to {high - 1}"
    if forming is None:
        return ""
    here = [_candidate(waiting) for waiting in list(forming.waiting.values())[:4]]
    more = f" and {len(forming.waiting) - 4} more" if len(forming.waiting) > 4 else ""
    if (forming.min_size, forming.max_size) != (low, high):
        return (
            f"size {_size(low, high)} was asked for, but size {_size(forming.min_size, forming.max_size)} by "
            f"the {len(forming.waiting)} waiting in group {shown_name(ask.name)!r} ({', '.join(here)}{more}): "
            "all ranks must name the same size"
        )
    if ask.rank is not None and ask.rank in forming.taken:
        return (
            f"rank {ask.rank} of group {shown_name(ask.name)!r} is taken by {_candidate(forming.taken[ask.rank])}: "
            "give every process its own rank, or none"
        )
    return ""


def _apart(book: Registry, task: int, forming: Forming | None) -> str:
    """Why this worker cannot have links to those of a group that forms, by their versions; '' where it can."""
    theirs = book.workers[task].hello.versions
    for versions, other in forming.spoken.items() if forming else ():
        try:
            agree(theirs, f"worker {task}", f"worker {other}", versions)
        except FailedPreconditionError as error:
            return str(error)
    return ""


def _excess(book: Registry, ask: JoinAsk, forming: Forming | None) -> tuple[Limit, str] | None:
    """Which limit this ask would exceed, and how people are told; None where it exceeds none."""
    if book.most_ranks and ask.max_size > book.most_ranks:
        what = f"a group of {ask.max_size} ranks was asked for"
        advice = "make it smaller"
        return Limit.GROUP_RANKS, too_many(what, book.most_ranks, "max_group_ranks", advice)
    if forming is None and book.most_groups:
        count = len(book.forming) + sum(not generation.over for generation in book.generations.values())
        if count >= book.most_groups:
            what = f"this coordinator has {count} groups"
            return Limit.GROUPS, too_many(what, book.most_groups, "max_groups", "leave some")
    return None


def _size(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _candidate(waiting: Waiting) -> str:
    ask = waiting.ask
    label = f"{ask.label}, " if ask.label else ""
    return f"{label}host {ask.host}, pid {ask.pid}"


def _open(book: Registry, ask: JoinAsk, now: float) -> Forming:
    forming = Forming(ask.name, ask.min_size, ask.max_size, ask.settle_seconds, now)
    previous = book.generations.get(book.latest.get(ask.name, 0))
    if previous:
        forming.elsewhere = {identity(m): m.rank for m in previous.info.members if m.rank not in previous.departed}
    book.forming[ask.name] = forming
    return forming


def _remove(book: Registry, forming: Forming, requests: list[tuple[int, str]], now: float) -> Iterator[Effect]:
    for request in requests:
        gone = forming.waiting.pop(request)
        if gone.ask.rank is not None:
            del forming.taken[gone.ask.rank]
    here = {waiting.task for waiting in forming.waiting.values()}
    forming.spoken = {book.workers[task].hello.versions: task for task in here if task in book.workers}
    if len(forming.waiting) < forming.min_size:
        forming.complete_at = None
    if forming.waiting:
        yield from _tell_all(book, forming, now)
    else:
        del book.forming[forming.name]
        book.forget_name(forming.name)
    yield from newcomers.changed(book, forming.name, now)


def _tell(book: Registry, forming: Forming, newcomer: Waiting, now: float) -> Iterator[Effect]:
    if len(forming.waiting) <= TOLD_AT_ONCE:
        yield from _tell_all(book, forming, now)
        return
    yield Send(newcomer.task, _update(book, forming, newcomer.ask.request))
    if not forming.telling:
        forming.telling = True
        book.arm((forming.told_at or now) + TOLD_EVERY_SECONDS, Progress(forming.name))


def _tell_all(book: Registry, forming: Forming, now: float) -> Iterator[Effect]:
    forming.told_at = now
    text = progress(book, forming)
    for task, request in forming.waiting:
        yield Send(task, JoinUpdate(request, len(forming.waiting), _expected(forming), text))


def _update(book: Registry, forming: Forming, request: str) -> JoinUpdate:
    return JoinUpdate(request, len(forming.waiting), _expected(forming), progress(book, forming))


def _expected(forming: Forming) -> int:
    return forming.max_size if forming.complete_at is not None else forming.min_size


def progress(book: Registry, forming: Forming) -> str:
    """`3 of 4 ranks here, waiting for 1 more (rank 2); rank 2 (…) still lives in the previous generation`"""
    present = len(forming.waiting)
    text = progress_text(present, forming.min_size, forming.max_size, forming.complete_at is not None)
    few = forming.max_size - present <= TOLD_AT_ONCE
    if few and present == len(forming.taken) and forming.min_size == forming.max_size:
        absent = [rank for rank in range(forming.max_size) if rank not in forming.taken]
        text += f" ({ranks_text(absent)})"
    previous = book.generations.get(book.latest.get(forming.name, 0))
    if previous and forming.elsewhere:
        ranks = [rank for rank in forming.elsewhere.values() if rank not in previous.departed]
        if ranks:
            text += f"; {elsewhere_text([previous.info.members[rank] for rank in ranks])}"
    return text


def ranked(forming: Forming) -> list[Waiting]:
    """The order of ranks: ranks asked for stay, the others fill the rest by task, device (as numbers) and arrival.

    An elastic group may begin smaller than a rank that was asked for; that one is placed like the others.
    """
    size = len(forming.waiting)
    fixed = {rank: waiting for rank, waiting in forming.taken.items() if rank < size}
    rest = sorted(
        (waiting for waiting in forming.waiting.values() if fixed.get(_asked_rank(waiting)) is not waiting),
        key=lambda waiting: (DeviceName.parse(waiting.ask.device, waiting.task), waiting.arrival),
    )
    order = iter(rest)
    return [fixed[rank] if rank in fixed else next(order) for rank in range(size)]


def _asked_rank(waiting: Waiting) -> int:
    return -1 if waiting.ask.rank is None else waiting.ask.rank


def _complete(book: Registry, forming: Forming, now: float) -> Iterator[Effect]:
    del book.forming[forming.name]
    order = ranked(forming)
    members = tuple(
        Member(rank, w.ask.device, w.task, w.ask.host, w.ask.pid, w.ask.label) for rank, w in enumerate(order)
    )
    info = GroupInfo(forming.name, book.key_of(forming.name), book.new_id(), members)
    generation = Generation(info, _peers(book, members))
    generation.idle = any(waiting.ask.idle for waiting in order)
    if any(waiting.ask.last_instance >= 0 for waiting in order):
        generation.last_instances = tuple(waiting.ask.last_instance for waiting in order)
    generation.requests = {(w.task, w.ask.request): rank for rank, w in enumerate(order)}
    book.joined |= dict.fromkeys(generation.requests, info.generation)
    book.counts.granted += info.size
    _retire(book, members, forming.name)
    book.generations[info.generation] = generation
    book.latest[forming.name] = info.generation
    yield from completion.completed(book, generation, now)
    yield Log("info", f"group {shown_name(info.name)!r} is complete: {info.size} ranks: {members_text(members)}")


def _peers(book: Registry, members: tuple[Member, ...]) -> tuple[Peer, ...]:
    ranks: dict[int, list[int]] = {}
    for member in members:
        ranks.setdefault(member.worker, []).append(member.rank)
    hellos = {task: book.workers[task].hello for task in sorted(ranks)}
    return tuple(
        Peer(task, hello.incarnation, hello.host, hello.link_address, tuple(ranks[task]), hello.nccl)
        for task, hello in hellos.items()
    )


def _retire(book: Registry, members: tuple[Member, ...], name: str) -> None:
    """Who joined again after a failure has departed from the generations that failed."""
    here = {identity(member) for member in members}
    for generation in list(book.generations.values()):
        if generation.info.name != name or not generation.failed:
            continue
        for member in generation.info.members:
            if identity(member) in here:
                generation.departed.setdefault(member.rank, Departure.MOVED)
        book.settle(generation)
