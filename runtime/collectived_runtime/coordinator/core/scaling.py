"""Newcomers: how many wait to join a group that runs, so that its ranks can make room for them.

All ranks must see the number change after the same instance, or they would part. So the coordinator *proposes*: each
worker *promises* to start nothing from some instance on until more messages come, and answers with that instance; the
highest of the answers is where the number changes, for all. A proposal that is not answered in time is withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterator

from collectived_proto.types import unscoped_name
from collectived_runtime.coordinator.core.events import Effect, Log, Promised, Propose, SendToWorker, WaitingCount
from collectived_runtime.coordinator.core.registry import (
    FormingGroup,
    GenerationRecord,
    Proposal,
    Registry,
    identity,
)
from collectived_runtime.coordinator.core.timers import (
    ProposalTimeout,
)

PROMISE_TIMEOUT_SECONDS = 0.3  # group loops keep a promise for longer than this
RETRY_SECONDS = 1.0  # after a proposal that was withdrawn


def propose_waiting_count(registry: Registry, name: str, now: float) -> Iterator[Effect]:
    """The number of processes that wait for the next generation of a group has changed."""
    generation = registry.generations.get(registry.latest_generations.get(name, 0))
    if (
        generation is None
        or generation.verdicts
        or generation.is_over
        or generation.proposal
        or generation.awaited_workers
    ):
        return
    if count_waiting(generation, registry.forming.get(name)) == generation.waiting_count:
        return
    tasks = [task for task in generation.ranks_by_worker if generation.active_ranks(task)]
    if not all(registry.is_connected(task) for task in tasks):
        registry.add_timer(now + RETRY_SECONDS, ProposalTimeout(0, generation.info.generation))
        return
    generation.proposal = registry.new_id()
    registry.proposals[generation.proposal] = Proposal(generation.info.generation, set(tasks))
    registry.add_timer(now + PROMISE_TIMEOUT_SECONDS, ProposalTimeout(generation.proposal, generation.info.generation))
    for task in tasks:
        yield SendToWorker(task, Propose(generation.info.key, generation.info.generation, generation.proposal))


def count_waiting(generation: GenerationRecord, forming: FormingGroup | None) -> int:
    """The number of waiting processes that are not ranks of this generation."""
    if forming is None:
        return 0
    here = {identity(member) for member in generation.info.members if member.rank not in generation.departed}
    return sum(one.identity not in here for one in forming.pending_joins.values())


def handle_promise(registry: Registry, event: Promised, now: float) -> Iterator[Effect]:
    """A worker answers; the last answer settles from which instance on the number counts."""
    proposal = registry.proposals.get(event.proposal)
    if proposal is None or event.task not in proposal.pending_workers:
        return
    proposal.pending_workers.discard(event.task)
    proposal.from_instance = max(proposal.from_instance, event.from_instance)
    if proposal.pending_workers:
        return
    generation = registry.generations[proposal.generation]
    generation.waiting_count = count_waiting(generation, registry.forming.get(generation.info.name))
    yield from _conclude_proposal(registry, generation, proposal.from_instance)
    yield from propose_waiting_count(registry, generation.info.name, now)


def on_proposal_timeout(registry: Registry, timer: ProposalTimeout, now: float) -> Iterator[Effect]:
    """Not all have promised in time: withdrawn, and tried again."""
    generation = registry.generations.get(timer.generation)
    if generation is None:
        return
    if not timer.proposal:
        yield from propose_waiting_count(registry, generation.info.name, now)
    elif generation.proposal == timer.proposal:
        yield Log("debug", f"group {unscoped_name(generation.info.name)!r}: not all workers answered about newcomers")
        yield from _conclude_proposal(registry, generation, -1)
        registry.add_timer(now + RETRY_SECONDS, ProposalTimeout(0, timer.generation))


def _conclude_proposal(registry: Registry, generation: GenerationRecord, from_instance: int) -> Iterator[Effect]:
    del registry.proposals[generation.proposal]
    message = WaitingCount(
        generation.info.key, generation.info.generation, generation.proposal, from_instance, generation.waiting_count
    )
    generation.proposal = 0
    for task in generation.ranks_by_worker:
        if registry.is_connected(task) and generation.active_ranks(task):
            yield SendToWorker(task, message)
