"""Newcomers: how many wait to join a group that runs, so that its ranks can make room for them.

All ranks must see the number change after the same instance, or they would part. So the coordinator *proposes*: each
worker *promises* to start nothing from some instance on until it hears more, and answers with that instance; the
highest of the answers is where the number changes, for all. A proposal that is not answered in time is withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterator

from collectived_proto.types import shown_name
from collectived_runtime.coordinator.events import Effect, Log, Newcomers, Promised, Propose, Send
from collectived_runtime.coordinator.registry import Forming, Generation, Proposal, Registry, Unpromised, identity

PROMISED_WITHIN_SECONDS = 0.3  # lanes keep a promise for longer than this
AGAIN_SECONDS = 1.0  # after a proposal that was withdrawn


def changed(book: Registry, name: str, now: float) -> Iterator[Effect]:
    """Somebody came or went who waits for the next generation of a group."""
    generation = book.generations.get(book.latest.get(name, 0))
    if generation is None or generation.verdicts or generation.over or generation.proposal or generation.awaited:
        return
    if waiting(generation, book.forming.get(name)) == generation.newcomers:
        return
    tasks = [task for task in generation.ranks_of if generation.present(task)]
    if not all(book.connected(task) for task in tasks):
        book.arm(now + AGAIN_SECONDS, Unpromised(0, generation.info.generation))
        return
    generation.proposal = book.new_id()
    book.proposals[generation.proposal] = Proposal(generation.info.generation, set(tasks))
    book.arm(now + PROMISED_WITHIN_SECONDS, Unpromised(generation.proposal, generation.info.generation))
    for task in tasks:
        yield Send(task, Propose(generation.info.key, generation.info.generation, generation.proposal))


def waiting(generation: Generation, forming: Forming | None) -> int:
    """How many wait who are not ranks of this generation."""
    if forming is None:
        return 0
    here = {identity(member) for member in generation.info.members if member.rank not in generation.departed}
    return sum(one.identity not in here for one in forming.waiting.values())


def promised(book: Registry, event: Promised, now: float) -> Iterator[Effect]:
    """A worker answers; the last answer settles from which instance on the number counts."""
    proposal = book.proposals.get(event.proposal)
    if proposal is None or event.task not in proposal.asked:
        return
    proposal.asked.discard(event.task)
    proposal.from_instance = max(proposal.from_instance, event.from_instance)
    if proposal.asked:
        return
    generation = book.generations[proposal.generation]
    generation.newcomers = waiting(generation, book.forming.get(generation.info.name))
    yield from _settle(book, generation, proposal.from_instance)
    yield from changed(book, generation.info.name, now)


def lapsed(book: Registry, timer: Unpromised, now: float) -> Iterator[Effect]:
    """Not all have promised in time: withdrawn, and tried again."""
    generation = book.generations.get(timer.generation)
    if generation is None:
        return
    if not timer.proposal:
        yield from changed(book, generation.info.name, now)
    elif generation.proposal == timer.proposal:
        yield Log("debug", f"group {shown_name(generation.info.name)!r}: not all workers answered about newcomers")
        yield from _settle(book, generation, -1)
        book.arm(now + AGAIN_SECONDS, Unpromised(0, timer.generation))


def _settle(book: Registry, generation: Generation, from_instance: int) -> Iterator[Effect]:
    del book.proposals[generation.proposal]
    message = Newcomers(
        generation.info.key, generation.info.generation, generation.proposal, from_instance, generation.newcomers
    )
    generation.proposal = 0
    for task in generation.ranks_of:
        if book.connected(task) and generation.present(task):
            yield Send(task, message)
