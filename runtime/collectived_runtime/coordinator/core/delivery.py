"""Delivery: a verdict goes to all workers of its generation, once, and the group goes on in a successor.

A verdict covers all instances from `from_instance` on; an instance fails with the first verdict that covers it, so
later ones matter only where they reach further back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from collectived_proto.cause import Cause
from collectived_proto.errors import Code
from collectived_proto.types import RankPosition, Verdict, unscoped_name
from collectived_runtime.coordinator.core.events import Effect, Log, SendToWorker
from collectived_runtime.coordinator.core.registry import Departure, GenerationRecord, Registry

_LOSSES = (Cause.LOST_RANK, Cause.LOST_LINK, Cause.LOST_WORKER)


def deliver(
    registry: Registry, generation: GenerationRecord, verdict: Verdict, now: float, fault: bool = True
) -> Iterator[Effect]:
    """Send a verdict to all workers of a generation, unless an earlier one covers all that it covers.

    One that only says that a rank has left does not: sends and receives between others went on. Without `fault` it only
    announces that a rank left in order. A verdict that reaches further back for the same failure says the same: ranks
    get it at the instance where they are.
    """
    known = next((one for one in generation.verdicts if _is_same_failure(one, verdict)), None)
    if known is not None and known.code == Code.DEADLINE_EXCEEDED:
        verdict = replace(known, from_instance=verdict.from_instance)
    elif known is not None:
        verdict = replace(verdict, message=known.message, cause=known.cause, origin=known.origin)
    if is_uncovered(generation, verdict.from_instance, verdict.orderly):
        generation.verdicts.append(verdict)
        for inquiry in list(registry.inquiries.values()):
            if (inquiry.generation, inquiry.instance >= verdict.from_instance) == (verdict.generation, True):
                del registry.inquiries[inquiry.query]
        for instance in [instance for instance in generation.evidence if instance >= verdict.from_instance]:
            del generation.evidence[instance]
        for task in generation.ranks_by_worker:
            if registry.is_connected(task) and not (generation.departed and _has_worker_left(generation, task)):
                yield SendToWorker(task, verdict)
        expected = generation.drained_from is not None and verdict.from_instance >= generation.drained_from
        if fault and not expected:
            yield from record(registry, generation, verdict, now)
        if verdict.successor:
            _create_successor(registry, generation, verdict)
    registry.retire_if_over(generation)


def _is_same_failure(known: Verdict, verdict: Verdict) -> bool:
    """Whether it is another deadline, or the same ranks are lost: links break before a worker is known to be lost."""
    if known.orderly or verdict.orderly or known.code != verdict.code:
        return False
    lost = [[one.rank for one in each.missing] for each in (known, verdict) if each.cause in _LOSSES]
    return verdict.code == Code.DEADLINE_EXCEEDED or (len(lost) == 2 and lost[0] == lost[1])


def is_uncovered(generation: GenerationRecord, from_instance: int, orderly: bool = False) -> bool:
    """Whether a verdict from there on would be news. Asked before one is made: thousands of ranks may go at once."""
    covering = [known for known in generation.verdicts if known.from_instance <= from_instance]
    return not covering or (not orderly and all(known.orderly for known in covering))


def _has_worker_left(generation: GenerationRecord, task: int) -> bool:
    return all(generation.departed.get(rank) is Departure.LEFT for rank in generation.ranks_by_worker[task])


def record(registry: Registry, generation: GenerationRecord, verdict: Verdict, now: float) -> Iterator[Effect]:
    """The first fault of a generation is what people want to read; its echoes are not."""
    group = unscoped_name(generation.info.name)
    if generation.failed:
        yield Log("debug", f"group {group!r}, failed already: {verdict.message}")
        return
    generation.failed = True
    registry.record_failure(verdict, now)
    registry.counts.verdicts[verdict.code] = registry.counts.verdicts.get(verdict.code, 0) + 1
    yield Log("info", f"group {group!r} failed with {Code(verdict.code).name}: {verdict.message}", verdict)
    registry.retire_if_over(generation)


def _create_successor(registry: Registry, generation: GenerationRecord, verdict: Verdict) -> None:
    """The group goes on in the successor: same ranks, numbers and last calls; nothing submitted yet."""
    info = replace(generation.info, generation=verdict.successor)
    successor = GenerationRecord(info, generation.peers, generation.table, first_instance=verdict.next_instance)
    last = verdict.next_instance - 1  # at which all ranks have arrived, or do before they go on
    for rank, known in generation.progress.items():
        position, submitted = known.position, min(known.position.submitted, last)
        moved = RankPosition(rank, submitted, position.finished, position.last_op, position.last_site)
        successor.progress[rank] = replace(known, position=replace(moved, idle_seconds=position.idle_seconds))
    successor.idle = generation.idle
    successor.predecessor = generation.info.generation
    successor.departed = dict(generation.departed)
    generation.successor = verdict.successor
    registry.generations[verdict.successor] = successor
    registry.latest_generations[generation.info.name] = verdict.successor
    before = registry.generations.get(generation.predecessor)
    if before is not None:
        # All ranks have gone on twice since: nothing of that one can still be running.
        before.departed |= {rank: Departure.MOVED for rank in range(before.info.size) if rank not in before.departed}
