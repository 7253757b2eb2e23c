"""Verdicts as a worker makes them alone, when the coordinator says nothing, and as it tells them to its clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from collectived_proto.cause import Cause
from collectived_proto.errors import CODE_BY_CAUSE
from collectived_proto.report.phrases import (
    collective_text,
    expired_text,
    format_seconds,
    history_text,
    lost_text,
    members_text,
    nccl_failure_text,
    not_arrived_text,
    not_written_text,
)
from collectived_proto.types import GroupInfo, Member, RankPosition, Report, ReportKind, Verdict, unscoped_name
from collectived_runtime.engine.base.topology import GroupTopology

_ONE_RANK_BEGINS = (Cause.LOST_RANK, Cause.ABORTED, Cause.LEFT, Cause.EXHAUSTED)


def make_verdict(topology: GroupTopology, name: str, generation: int, first: int, op: str, report: Report) -> Verdict:
    """The verdict of worker `name` from instance `first` on, given what one of its group loops reported.

    Args:
        op: the operation of that instance, '' where nobody has submitted it here.
    """
    group = replace(topology.group, name=unscoped_name(topology.group.name))
    told = {position.rank: position for position in report.ranks}  # of this worker's ranks
    what = collective_text(first, op, group.name) if op else f"group {group.name!r}"
    cause, text, ranks = _classify_report(topology, name, what, report, told)
    members = tuple(_with_position(member, told.get(member.rank)) for member in group.members)
    return _verdict(group, name, generation, cause, text, first, op, [members[rank] for rank in ranks], members)


def make_departure_verdict(
    topology: GroupTopology, name: str, generation: int, first: int, op: str, ranks: Sequence[int]
) -> Verdict:
    """The verdict of worker `name` that these ranks have left the group in order, before instance `first`."""
    group = replace(topology.group, name=unscoped_name(topology.group.name))
    missing = [group.members[rank] for rank in ranks]
    what = f"{collective_text(first, op, group.name)}: " if op else ""
    text = f"{what}{members_text(missing)} {'has' if len(missing) == 1 else 'have'} left the group"
    verdict = _verdict(group, name, generation, Cause.LEFT, text, first, op, missing, group.members)
    return replace(verdict, orderly=True)


def _verdict(
    group: GroupInfo,
    name: str,
    generation: int,
    cause: Cause,
    text: str,
    first: int,
    op: str,
    missing: Sequence[Member],
    members: tuple[Member, ...],
) -> Verdict:
    return Verdict(
        group.name,
        group.key,
        generation,
        CODE_BY_CAUSE[cause],
        f"{text} (decided by {name} alone: the coordinator did not answer)",
        first,
        first if op else -1,
        op,
        tuple(missing),
        decided_by=name,
        members=members,
        cause=cause,
        origin=missing[0].rank if len(missing) == 1 and cause in _ONE_RANK_BEGINS else None,
    )


def _with_position(member: Member, position: RankPosition | None) -> Member:
    if position is None:
        return member
    return replace(
        member,
        last_instance=position.finished,
        last_op=position.last_op,
        last_site=position.last_site,
        idle_seconds=position.idle_seconds,
    )


def with_missing(topology: GroupTopology, name: str, verdict: Verdict, absent: list[int]) -> Verdict:
    """The verdict of another worker about a deadline, with what worker `name` knows of its own ranks."""
    missing = tuple(topology.group.members[rank] for rank in absent)
    text = f"{verdict.message}; {name} adds: {members_text(missing)} {'has' if len(missing) == 1 else 'have'} not come"
    return replace(verdict, message=text, missing=missing, decided_by=name)


def _classify_report(
    topology: GroupTopology, name: str, what: str, report: Report, told: dict[int, RankPosition]
) -> tuple[Cause, str, list[int]]:
    """Cause, what happened, and the ranks that are missing by it."""
    members = topology.group.members
    rank, peer = report.rank, report.peer
    match report.kind:
        case ReportKind.EXPIRED:
            absent = [position.rank for position in report.ranks if not position.arrived]
            return Cause.DEADLINE, _expired_message(members, what, report, absent, told), absent
        case ReportKind.LOST:
            known = {rank: history_text(told[rank])} if rank in told else {}
            return Cause.LOST_RANK, f"{what}: {lost_text([members[rank]], report.text, known)}", [rank]
        case ReportKind.ABORT:
            text = f"{members[rank]} aborted the group: {report.text or 'no reason given'}"
            return Cause.ABORTED, f"{what}: {text}", [rank]
        case ReportKind.LINK:
            ranks = [rank for one in topology.peers if one.task == report.worker for rank in one.ranks]
            why = f"the link of {name} to worker {report.worker} broke: {report.text}"
            return Cause.LOST_LINK, f"{what}: {lost_text([members[rank] for rank in ranks], why, {})}", ranks
        case ReportKind.NATIVE:
            here = [members[rank] for rank in topology.own_ranks]
            return Cause.NATIVE, nccl_failure_text(what, [(name, here, report.text)], ()), []
        case ReportKind.OVERDUE:
            other = not_arrived_text(members[peer], told[peer]) if peer in told else f"{members[peer]} has not come"
            text = f"{report.text} on {members[rank]} did not complete within {format_seconds(report.timeout_seconds)}"
            return Cause.DEADLINE, f"{what}: {text}: {other}", [peer]
        case ReportKind.UNCLAIMED:
            text = f"there is no memory for what {members[peer]} has sent to {members[rank]}"
            return Cause.EXHAUSTED, f"{what}: {text}, which has not received it: {report.text}", [peer]
        case ReportKind.EXHAUSTED:
            return Cause.EXHAUSTED, f"{what}: {members[rank]} has no memory left: {report.text}", [rank]
        case ReportKind.MISMATCH:
            return Cause.MISMATCH, f"{what}: ranks submitted different collectives", []
    return Cause.DEFECT, f"{what}: a group loop decided about a report of kind {report.kind.name}", []


def _expired_message(
    members: Sequence[Member], what: str, report: Report, absent: list[int], told: dict[int, RankPosition]
) -> str:
    """Nothing is known here but of the ranks of this worker."""
    here = {position.rank: position.site or position.last_site for position in report.ranks if position.arrived}
    named = [
        not_written_text(members[rank], told[rank])
        if told[rank].contract
        else not_arrived_text(members[rank], told[rank])
        for rank in absent
    ]
    return expired_text(what, report.timeout_seconds, named or ["all ranks of this worker have come"], here)
