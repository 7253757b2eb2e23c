"""What the coordinator keeps of what is over takes a bounded amount of memory, however large the groups were."""

from __future__ import annotations

import pytest

from collectived_proto.errors import Code
from collectived_proto.types import GroupInfo, Member, Verdict
from collectived_runtime.coordinator.core.registry import (
    MAX_FAILURE_MEMBERS,
    MAX_FAILURES,
    MAX_FINISHED_BYTES,
    MAX_FINISHED_GENERATIONS,
    GenerationRecord,
    Registry,
)


def make_members(size: int, host: str = "h") -> tuple[Member, ...]:
    return tuple(Member(rank, "CPU:0", 0, host, rank) for rank in range(size))


def end(registry: Registry, number: int, members: tuple[Member, ...]) -> GenerationRecord:
    name = f"job/{number}"
    generation = GenerationRecord(GroupInfo(name, registry.get_or_create_key(name), number, members), failed=True)
    registry.generations[number] = generation
    registry.latest_generations[name] = number
    for _ in members:  # each rank that goes
        registry.retire_if_over(generation)
    return generation


@pytest.mark.parametrize(("size", "host"), [(2, "h"), (256, "h"), (4096, "h"), (2, "h" * 100_000)])
def test_generations_that_are_over_are_kept_as_long_as_there_is_room(size: int, host: str) -> None:
    registry = Registry(1, 5.0, 60.0)
    members = make_members(size, host)
    each = [end(registry, number, members).estimate_bytes() for number in range(1, MAX_FINISHED_GENERATIONS + 100)][0]
    kept = list(registry.generations)
    assert kept == list(registry.finished_generations) and kept[-1] == MAX_FINISHED_GENERATIONS + 99
    assert len(kept) == min(MAX_FINISHED_GENERATIONS, 1 + MAX_FINISHED_BYTES // each)
    assert len(registry.keys) == len(registry.latest_generations) == len(kept)


@pytest.mark.parametrize(("size", "kept"), [(MAX_FAILURE_MEMBERS, MAX_FAILURE_MEMBERS), (MAX_FAILURE_MEMBERS + 1, 0)])
def test_failures_of_large_groups_are_kept_without_every_rank(size: int, kept: int) -> None:
    registry, ranks = Registry(1, 5.0, 60.0), make_members(size)
    verdict = Verdict("job/train", 1, 2, Code.UNAVAILABLE, "lost", 0, missing=ranks, members=ranks)
    for _ in range(MAX_FAILURES + 1):
        registry.record_failure(verdict, 9.0)
    assert len(registry.failures) == MAX_FAILURES
    assert {len(one.verdict.members) for one in registry.failures} == {kept}
    assert {len(one.verdict.missing) for one in registry.failures} == {MAX_FAILURE_MEMBERS}
