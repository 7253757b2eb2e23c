"""Admission: whether a join may wait in the group that it names, and news of refusals for the others."""

from __future__ import annotations

import math
from typing import NamedTuple

from collectived_proto.devices import DeviceName
from collectived_proto.errors import Code, FailedPreconditionError
from collectived_proto.report.phrases import MAX_NAMED, find_control_character
from collectived_proto.types import unscoped_name
from collectived_proto.version import negotiate_version
from collectived_runtime.coordinator.core import draining
from collectived_runtime.coordinator.core.events import JoinAsk
from collectived_runtime.coordinator.core.registry import FormingGroup, Identity, PendingJoin, Registry
from collectived_runtime.limits.rejections import Limit, format_limit_error


class Rejection(NamedTuple):
    """Why a join may not wait. `text` is for the caller, `brief` for those that wait; `limit`: the one that is met."""

    code: Code
    text: str
    brief: str
    limit: Limit | None = None


def find_rejection(registry: Registry, task: int, ask: JoinAsk, forming: FormingGroup | None) -> Rejection | None:
    """Why this join of a client of worker `task` cannot be granted; None where it can."""
    if away := draining.refusal_reason(registry, task, ask.name):
        return Rejection(Code.UNAVAILABLE, away, away)
    if flaw := _find_flaw(ask, task):
        return Rejection(Code.INVALID_ARGUMENT, flaw, flaw)
    if forming is not None and (conflict := _find_conflict(ask, forming)):
        return conflict
    if apart := _version_conflict(registry, task, forming):
        return Rejection(Code.FAILED_PRECONDITION, apart, apart)
    return _exceeded_limit(registry, ask, forming)


def record_rejection(forming: FormingGroup, join: PendingJoin, why: Rejection) -> bool:
    """Keep the latest refused joins, with reasons, for those that wait. Return whether that is news."""
    text = f"{_describe_join(join)}: {why.brief}"
    if forming.rejected.get(join.identity) == text:
        return False
    _keep_latest(forming.rejected, join.identity, text)
    return True


def record_withdrawal(forming: FormingGroup, join: PendingJoin, why: str) -> None:
    """Keep processes that wait no longer, for those that do: so a shared timeout blames only those that never came."""
    rank = "" if join.ask.rank is None else f", rank {join.ask.rank}"
    _keep_latest(forming.withdrawn, join.place, f"{_describe_join(join)}{rank}: {why}")


def forget_absence(forming: FormingGroup, join: PendingJoin) -> None:
    """Forget that this process was refused or waited no longer, because it is here now, or another has its rank."""
    forming.rejected.pop(join.identity, None)
    forming.withdrawn.pop(join.place, None)


def _keep_latest(notes: dict[Identity | int, str], key: Identity | int, text: str) -> None:
    notes.pop(key, None)
    notes[key] = text
    while len(notes) > MAX_NAMED:
        del notes[next(iter(notes))]


def describe_absentees(forming: FormingGroup) -> str:
    """Name the processes that tried, and are not here.

    For example `; refused: host a, pid 71: it asked for size 3; was here: …`.
    """
    refused = f"; refused: {'; '.join(forming.rejected.values())}" if forming.rejected else ""
    return refused + (f"; was here: {'; '.join(forming.withdrawn.values())}" if forming.withdrawn else "")


def _find_flaw(ask: JoinAsk, task: int) -> str:
    """Find what is wrong with a join by itself, without the others that wait; '' where nothing is."""
    low, high = ask.min_size, ask.max_size
    if steering := find_control_character(ask.name):
        return f"names of groups and jobs must have no control characters, got {steering!r}"
    if not 1 <= low <= high:
        return f"a group needs 1 <= smallest size <= largest size, got {_size(low, high)}"
    if not 0 <= ask.settle_seconds < math.inf:
        return f"settle must be a number of seconds, not negative, got {ask.settle_seconds!r}"
    try:
        device = DeviceName.parse(ask.device, task)
    except ValueError as error:
        return str(error)
    if device.task != task:
        return f"{device.short} is a device of worker {device.task}, but the join came from worker {task}: join there"
    if ask.rank is not None and not 0 <= ask.rank < high:
        return f"rank {ask.rank} is out of range: a group of size {_size(low, high)} has ranks 0 to {high - 1}"
    return ""


def _find_conflict(ask: JoinAsk, forming: FormingGroup) -> Rejection | None:
    """How an ask differs from those who wait."""
    low, high = ask.min_size, ask.max_size
    if (forming.min_size, forming.max_size) != (low, high):
        here = [_describe_join(waiting) for waiting in list(forming.pending_joins.values())[:MAX_NAMED]]
        count = len(forming.pending_joins)
        more = f" and {count - MAX_NAMED} more" if count > MAX_NAMED else ""
        text = (
            f"size {_size(low, high)} was asked for, but size {_size(forming.min_size, forming.max_size)} by "
            f"the {count} waiting in group {unscoped_name(ask.name)!r} ({', '.join(here)}{more}): "
            "all ranks must name the same size"
        )
        return Rejection(Code.INVALID_ARGUMENT, text, f"it asked for size {_size(low, high)}")
    if ask.rank is not None and ask.rank in forming.joins_by_rank:
        text = (
            f"rank {ask.rank} of group {unscoped_name(ask.name)!r} is taken by "
            f"{_describe_join(forming.joins_by_rank[ask.rank])}: give every process its own rank, or none"
        )
        return Rejection(Code.INVALID_ARGUMENT, text, f"it asked for rank {ask.rank}, which is taken")
    return None


def _version_conflict(registry: Registry, task: int, forming: FormingGroup | None) -> str:
    """Why this worker cannot have links to those of a group that forms, by their versions; '' where it can."""
    theirs = registry.workers[task].hello.versions
    for versions, other in forming.worker_by_versions.items() if forming else ():
        try:
            negotiate_version(theirs, f"worker {task}", f"worker {other}", versions)
        except FailedPreconditionError as error:
            return str(error)
    return ""


def _exceeded_limit(registry: Registry, ask: JoinAsk, forming: FormingGroup | None) -> Rejection | None:
    if registry.limits.ranks and ask.max_size > registry.limits.ranks:
        what = f"a group of {ask.max_size} ranks was asked for"
        text = format_limit_error(what, registry.limits.ranks, "max_group_ranks", "make it smaller")
        return Rejection(Code.RESOURCE_EXHAUSTED, text, text, Limit.GROUP_RANKS)
    if forming is None and registry.limits.groups:
        count = len(registry.forming) + sum(not generation.is_over for generation in registry.generations.values())
        if count >= registry.limits.groups:
            text = format_limit_error(
                f"this coordinator has {count} groups", registry.limits.groups, "max_groups", "leave some"
            )
            return Rejection(Code.RESOURCE_EXHAUSTED, text, text, Limit.GROUPS)
    return None


def _size(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _describe_join(join: PendingJoin) -> str:
    ask = join.ask
    label = f"{ask.label}, " if ask.label else ""
    return f"{label}host {ask.host}, pid {ask.pid}"
