"""Verdicts as a worker makes them alone, when the coordinator says nothing, and as it tells them to its clients."""

from __future__ import annotations

from dataclasses import replace

from collectived_proto.codec import verdict_to_proto
from collectived_proto.errors import Code
from collectived_proto.types import Member, Report, ReportKind, Verdict, shown_name
from collectived_runtime.engine.program import Topology

MAX_TEXT = 8 << 10  # characters
NAMED_IN_FULL = 64  # missing or differing ranks of which a client hears what they did last


def alone(topology: Topology, name: str, generation: int, first: int, op: str, report: Report) -> Verdict:
    """The verdict of worker `name` from instance `first` on, given what one of its lanes reported.

    Args:
        op: the operation of that instance, '' where nobody has submitted it here.
    """
    group = replace(topology.group, name=shown_name(topology.group.name))
    code, text, ranks = _judge(topology, report)
    what = f"{op} #{first} of group {group.name!r}" if op else f"group {group.name!r}"
    return Verdict(
        group.name,
        group.key,
        generation,
        code,
        f"{what}: {text} (decided by {name} alone: the coordinator did not answer)",
        first,
        first if op else -1,
        op,
        tuple(group.members[rank] for rank in ranks),
        decided_by=name,
        members=group.members,
    )


def with_missing(topology: Topology, name: str, verdict: Verdict, absent: list[int]) -> Verdict:
    """The verdict of another worker about a deadline, with what worker `name` knows of its own ranks."""
    missing = tuple(topology.group.members[rank] for rank in absent)
    named = ", ".join(map(str, missing[:4])) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    text = f"{verdict.message}; {name} adds: {named} {'has' if len(missing) == 1 else 'have'} not come"
    return replace(verdict, message=text, missing=missing, decided_by=name)


def _judge(topology: Topology, report: Report) -> tuple[Code, str, list[int]]:
    """Code, what happened, and the ranks that are missing by it."""
    match report.kind:
        case ReportKind.EXPIRED:
            absent = [position.rank for position in report.ranks if not position.arrived]
            named = f"; of this worker's ranks {absent} have not come" if absent else ""
            return Code.DEADLINE_EXCEEDED, f"did not complete within {report.timeout_seconds:g} s{named}", absent
        case ReportKind.LOST:
            return Code.UNAVAILABLE, f"rank {report.rank} is lost: {report.text}", [report.rank]
        case ReportKind.ABORT:
            return Code.ABORTED, f"rank {report.rank} aborted the group: {report.text}", [report.rank]
        case ReportKind.LINK:
            ranks = [rank for peer in topology.peers if peer.task == report.worker for rank in peer.ranks]
            return Code.UNAVAILABLE, f"worker {report.worker} is lost: {report.text}", ranks
        case ReportKind.OVERDUE:
            text = f"{report.text} of rank {report.rank} did not complete within {report.timeout_seconds:g} s"
            return Code.DEADLINE_EXCEEDED, text, [report.peer]
        case ReportKind.UNCLAIMED:
            text = f"no memory for what rank {report.peer} has sent to rank {report.rank}: {report.text}"
            return Code.RESOURCE_EXHAUSTED, text, [report.peer]
        case ReportKind.EXHAUSTED:
            return Code.RESOURCE_EXHAUSTED, report.text, [report.rank]
        case ReportKind.MISMATCH:
            return Code.INVALID_ARGUMENT, "ranks submitted different collectives", []
    return Code.INTERNAL, f"a lane decided about a report of kind {report.kind.name}", []


def encode(verdict: Verdict) -> bytes:
    """A verdict that fits in one message: clients know who the members are, and complete them by rank."""
    crowd = len(verdict.missing) + len(verdict.differing) > NAMED_IN_FULL

    def bare(member: Member, *, short: bool) -> Member:
        member = replace(member, host="", pid=0, device="", worker=0, label="")
        return replace(member, last_op="", last_site="", idle_seconds=0.0) if short else member

    compact = replace(
        verdict,
        message=verdict.message[:MAX_TEXT],
        members=tuple(bare(member, short=True) for member in verdict.members),
        missing=tuple(bare(member, short=crowd) for member in verdict.missing),
        differing=tuple(bare(member, short=crowd) for member in verdict.differing),
    )
    return verdict_to_proto(compact).SerializeToString()
