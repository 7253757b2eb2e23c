"""Completion: what follows when all ranks of a generation are here.

Its table is the one stored for groups of that name and shape, or is made from the topology; then the ranks are told.
With `--tune`, where nothing is stored, the links are measured before that: each worker is asked about its link to the
next one in the circle of the group, so that every link of the circle is heard of in both its directions by somebody.
The worst of the answers makes the table. It is one table for all, whatever each of them has measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from collectived_proto.types import GroupInfo, shown_name
from collectived_proto.wording import be, seconds
from collectived_runtime.coordinator.events import Effect, JoinDone, JoinUpdate, Log, Measure, Measured, Send, Store
from collectived_runtime.coordinator.registry import Generation, Measurement, Registry, Unmeasured
from collectived_runtime.coordinator.tables import stored, table, worst
from collectived_runtime.coordinator.wording import bandwidth, microseconds

MEASURING_SECONDS = 3.0


def completed(book: Registry, generation: Generation, now: float) -> Iterator[Effect]:
    """All ranks are here: they are told, or their links are measured first."""
    known = book.stored.get(stored_name(generation))
    if known is None and book.tune and len(generation.peers) > 1:
        yield from _measure(book, generation, now)
        return
    generation.table = known or table(generation.peers)
    yield from _tell(book, generation)


def answer_again(book: Registry, task: int, request: str) -> Iterator[Effect]:
    """The answer to a join of a generation that is complete, and what has been decided about it since."""
    generation = book.generations[book.joined[task, request]]
    if generation.info.generation in book.measurements:
        yield Send(task, _measuring(generation, request))
        return
    yield Send(task, _done(generation, _with_history(generation), task, request))
    for verdict in generation.verdicts:
        yield Send(task, verdict)


def measured(book: Registry, event: Measured) -> Iterator[Effect]:
    """A worker tells what a link is like; the last answer makes the table."""
    measurement = book.measurements.get(event.generation)
    if measurement is None or (event.task, event.peer) not in measurement.links:
        return
    measurement.links[event.task, event.peer] = event
    if None not in measurement.links.values():
        yield from conclude(book, event.generation)


def conclude(book: Registry, number: int) -> Iterator[Effect]:
    """Ends the measuring of a generation, if it goes on: its table is made of what is known by now."""
    measurement = book.measurements.pop(number, None)
    if measurement is None:
        return
    generation = book.generations[number]
    sound = [link for link in measurement.links.values() if link is not None and link.sound]
    model = worst(sound)
    generation.table = table(generation.peers, model)
    group = shown_name(generation.info.name)
    if not generation.failed and len(sound) == len(measurement.links):
        name = stored_name(generation)
        book.stored = stored(book.stored, name, generation.table)
        yield Store(name, generation.table)
        found = f"{microseconds(model.across.latency)}, {bandwidth(model.across.bandwidth)} at worst"
        yield Log("info", f"the links of group {group!r} were measured: {found}; the table is stored as {name!r}")
    elif not generation.failed:
        instead = "the others decide" if sound else "usual links are assumed"
        yield Log(
            "warning",
            f"of the links of group {group!r} {', '.join(_unsound(measurement))}: {instead}, and the table is not "
            "stored; the next group of this name is measured again",
        )
    yield from _tell(book, generation)


def stored_name(generation: Generation) -> str:
    """`world 2,2`: the group's name without its job, and the ranks on each of its workers."""
    return f"{shown_name(generation.info.name)} {','.join(str(len(peer.ranks)) for peer in generation.peers)}"


def _measure(book: Registry, generation: Generation, now: float) -> Iterator[Effect]:
    """Asks every worker about its link to the next one, in the order of the ring."""
    number = generation.info.generation
    circle = sorted(generation.peers, key=lambda peer: peer.ranks[0])
    following = circle[1:] + circle[:1]
    book.measurements[number] = Measurement(
        {(peer.task, other.task): None for peer, other in zip(circle, following, strict=True)}
    )
    for peer, other in zip(circle, following, strict=True):
        yield Send(peer.task, Measure(number, other.task, other.link_address))
    for task, request in generation.requests:
        yield Send(task, _measuring(generation, request))
    book.arm(now + MEASURING_SECONDS, Unmeasured(number))


def _tell(book: Registry, generation: Generation) -> Iterator[Effect]:
    group = _with_history(generation)
    for task, request in generation.requests:
        if task in book.workers:
            yield Send(task, _done(generation, group, task, request))
    for verdict in generation.verdicts:
        for task in generation.ranks_of:
            if task in book.workers:
                yield Send(task, verdict)


def _done(generation: Generation, group: GroupInfo, task: int, request: str) -> JoinDone:
    rank = generation.requests[task, request]
    return JoinDone(request, group, rank, generation.peers, generation.table, generation.idle)


def _with_history(generation: Generation) -> GroupInfo:
    """The group with what its ranks had finished in an earlier generation, so that callers can line up."""
    if not generation.last_instances:
        return generation.info
    pairs = zip(generation.info.members, generation.last_instances, strict=True)
    return replace(generation.info, members=tuple(replace(member, last_instance=last) for member, last in pairs))


def _measuring(generation: Generation, request: str) -> JoinUpdate:
    return JoinUpdate(request, generation.info.size, generation.info.size, measuring_text(generation))


def measuring_text(generation: Generation) -> str:
    size, workers = generation.info.size, len(generation.peers)
    return (
        f"all {size} ranks {be(size)} here, the links between {workers} workers are being measured "
        f"({seconds(MEASURING_SECONDS)} at most)"
    )


def _unsound(measurement: Measurement) -> Iterator[str]:
    for (task, peer), link in measurement.links.items():
        if link is None or not link.sound:
            why = f"no answer within {seconds(MEASURING_SECONDS)}" if link is None else link.text or f"got {link}"
            yield f"that of worker {task} to worker {peer} could not be measured ({why})"
