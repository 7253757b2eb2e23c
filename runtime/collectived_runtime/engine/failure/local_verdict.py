"""Verdicts as a worker makes them alone, when the coordinator does not answer, and as it sends them to its clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from collectived_proto.cause import Cause
from collectived_proto.errors import CODE_BY_CAUSE
from collectived_proto.report.phrases import (
    collective_text,
    history_text,
    members_text,
    not_arrived_text,
    not_written_text,
)
from collectived_proto.types import Member, RankPosition, Report, ReportKind, Verdict, unscoped_name, with_progress
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.verdicts import decisions
from collectived_runtime.verdicts.decisions import Decision


def make_verdict(topology: GroupTopology, name: str, generation: int, first: int, op: str, report: Report) -> Verdict:
    """The verdict of worker `name` from instance `first` on, given what one of its group loops reported.

    Args:
        op: the operation of that instance, '' where no rank has submitted it here.
    """
    told = {position.rank: position for position in report.ranks}  # of this worker's ranks
    members = tuple(
        with_progress(member, one.finished, one.last_op, one.last_site, one.idle_seconds, one.stack)
        if (one := told.get(member.rank))
        else member
        for member in topology.group.members
    )
    what = collective_text(first, op, topology.group.name) if op else f"group {unscoped_name(topology.group.name)!r}"
    decision = _decide(topology, members, what, report, told)
    return _make(topology, name, generation, decision, first, op, members)


def make_departure_verdict(
    topology: GroupTopology, name: str, generation: int, first: int, op: str, ranks: Sequence[int]
) -> Verdict:
    """The verdict of worker `name` that these ranks have left the group in order, before instance `first`."""
    members = topology.group.members
    decision = decisions.judge_departure([members[rank] for rank in ranks], None)
    return replace(_make(topology, name, generation, decision, first, op, members), orderly=True)


def _own_text(topology: GroupTopology) -> str:
    """This worker, as people know it."""
    return f"worker {topology.peers[topology.place].task}"


def _make(
    topology: GroupTopology,
    name: str,
    generation: int,
    decision: Decision,
    first: int,
    op: str,
    members: tuple[Member, ...],
) -> Verdict:
    members = decisions.bound_stacks(members, decision.missing)
    return Verdict(
        unscoped_name(topology.group.name),
        topology.group.key,
        generation,
        CODE_BY_CAUSE[decision.cause],
        f"{decision.text} (decided by {_own_text(topology)} alone: the coordinator did not answer)",
        first,
        first if op else -1,
        op,
        missing=tuple(members[rank] for rank in decision.missing),
        differing=tuple(members[rank] for rank in decision.differing),
        decided_by=name,
        members=members,
        cause=decision.cause,
        origin=decision.origin,
    )


def with_missing(topology: GroupTopology, name: str, verdict: Verdict, absent: list[int]) -> Verdict:
    """The verdict of another worker about a deadline, with what worker `name` knows of its own ranks."""
    missing = tuple(topology.group.members[rank] for rank in absent)
    adds = f"{_own_text(topology)} adds"
    text = f"{verdict.message}; {adds}: {members_text(missing)} {'has' if len(missing) == 1 else 'have'} not come"
    return replace(verdict, message=text, missing=missing, decided_by=name)


def _decide(
    topology: GroupTopology,
    members: Sequence[Member],
    what: str,
    report: Report,
    told: dict[int, RankPosition],
) -> Decision:
    """The decision that follows from a report, where only the ranks of this worker are known."""
    rank, peer = report.rank, report.peer
    match report.kind:
        case ReportKind.EXPIRED:
            return _decide_expiry(members, what, report)
        case ReportKind.LOST:
            return decisions.judge_lost_rank(
                members[rank], report.text, history_text(told[rank]) if rank in told else ""
            )
        case ReportKind.ABORT:
            return decisions.judge_abort(members[rank], report.text, report.cause)
        case ReportKind.LINK if report.cause is Cause.LINK_REFUSED:
            peer_worker = next(one for one in topology.peers if one.task == report.worker)
            return decisions.judge_refused_link(topology.peers[topology.place], peer_worker, report.text)
        case ReportKind.LINK:
            there = [members[rank] for one in topology.peers if one.task == report.worker for rank in one.ranks]
            why = f"the link of {_own_text(topology)} to worker {report.worker} broke: {report.text}"
            return decisions.judge_lost_workers(Cause.LOST_LINK, there, why)
        case ReportKind.NATIVE:
            here = [members[rank] for rank in topology.own_ranks]
            return decisions.judge_nccl_failure(what, [(_own_text(topology), here, report.text)], ())
        case ReportKind.OVERDUE:
            absent = not_arrived_text(members[peer], told[peer]) if peer in told else f"{members[peer]} has not come"
            return decisions.judge_overdue(members[rank], report.text, report.timeout_seconds, peer, absent)
        case ReportKind.UNCLAIMED:
            return decisions.judge_unclaimed(members[rank], members[peer], report.text)
        case ReportKind.EXHAUSTED:
            return decisions.judge_exhaustion(members[rank], report.text)
        case ReportKind.MISMATCH:
            arrived = {position.rank: position for position in report.ranks if position.contract}
            return decisions.judge_mismatch(what, arrived, report.text, topology.group.size)
    return Decision(Cause.DEFECT, f"{what}: a worker decided about a report of kind {report.kind.name}")


def _decide_expiry(members: Sequence[Member], what: str, report: Report) -> Decision:
    absent = {
        position.rank: (not_written_text if position.contract else not_arrived_text)(members[position.rank], position)
        for position in report.ranks
        if not position.arrived
    }
    sites = {position.rank: position.site or position.last_site for position in report.ranks if position.arrived}
    return decisions.judge_expiry(what, report.timeout_seconds, absent, "all ranks of this worker have come", sites)
