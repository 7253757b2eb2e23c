"""How many groups there may be, and how many ranks of one: whoever asks for more is told so, and counted."""

from __future__ import annotations

import pytest

from collectived_proto.errors import Code
from collectived_runtime.coordinator.core.coordinator import Coordinator
from collectived_runtime.coordinator.core.events import (
    JoinAsk,
    JoinAsked,
    JoinCancelled,
    JoinDone,
    JoinRefused,
    JoinUpdate,
    Message,
    SendToWorker,
    WorkerAttached,
    WorkerHello,
)
from collectived_runtime.coordinator.metrics import MetricsSnapshot, collect_metrics
from collectived_runtime.limits.quota_settings import GroupLimits
from collectived_runtime.limits.rejections import Limit


def mind(most_groups: int = 2, most_ranks: int = 8) -> Coordinator:
    made = Coordinator(1_000, limits=GroupLimits(most_groups, most_ranks))
    made.step(WorkerAttached(WorkerHello(0, "i", "h", 1)), 0.0)
    return made


def asked(mind: Coordinator, request: str, name: str, size: int = 1) -> Message:
    ask = JoinAsk(request, name, size, size, device="CPU:0")
    sent = [effect.message for effect in mind.step(JoinAsked(0, ask), 0.0) if isinstance(effect, SendToWorker)]
    return next(message for message in sent if getattr(message, "request", request) == request)


def limited(mind: Coordinator) -> dict[Limit, int]:
    *_, census = collect_metrics(mind.registry, 0.0)
    assert isinstance(census, MetricsSnapshot)
    return census.counts.limited


def test_one_group_too_many_is_refused() -> None:
    here = mind()
    assert isinstance(asked(here, "r1", "job/a"), JoinDone)
    assert isinstance(asked(here, "r2", "job/b", 2), JoinUpdate)
    refused = asked(here, "r3", "job/c")
    assert isinstance(refused, JoinRefused) and refused.code == Code.RESOURCE_EXHAUSTED
    assert refused.message == (
        "this coordinator has 2 groups, and there may be 2: leave some, or raise max_groups of the daemon"
    )
    assert limited(here) == {Limit.GROUPS: 1}


@pytest.mark.parametrize("name", ["job/a\nOK", "job/\x1b[2J", "job/a\u202e", "j\rob/a"])
def test_a_name_that_could_forge_a_line_is_refused(name: str) -> None:
    refused = asked(mind(), "r1", name)
    assert isinstance(refused, JoinRefused) and refused.code == Code.INVALID_ARGUMENT
    assert refused.message.startswith("names of groups and jobs must have no control characters, got '\\")


def test_a_group_that_forms_may_still_become_complete() -> None:
    here = mind()
    asked(here, "r1", "job/a")
    asked(here, "r2", "job/b", 2)
    assert isinstance(asked(here, "r3", "job/b", 2), JoinDone) and not limited(here)


def test_what_is_over_does_not_count() -> None:
    here = mind(most_groups=1)
    asked(here, "r1", "job/a", 2)
    assert isinstance(asked(here, "r2", "job/b"), JoinRefused)
    here.step(JoinCancelled(0, "r1", "enough"), 0.0)
    assert isinstance(asked(here, "r3", "job/b"), JoinDone)


def test_a_group_has_so_many_ranks_at_most() -> None:
    here = mind()
    assert isinstance(asked(here, "r1", "job/a", 8), JoinUpdate)
    refused = asked(here, "r2", "job/b", 9)
    assert (
        isinstance(refused, JoinRefused)
        and "there may be 8: make it smaller, or raise max_group_ranks" in refused.message
    )
    assert limited(here) == {Limit.GROUP_RANKS: 1}


def test_without_limits_there_are_none() -> None:
    here = mind(0, 0)
    assert all(isinstance(asked(here, f"r{number}", f"job/{number}", 100_000), JoinUpdate) for number in range(50))
