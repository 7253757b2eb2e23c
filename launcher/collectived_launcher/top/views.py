"""A `StatusReply` as the rows of each view, problems first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectived_launcher.status.tables import devices_text, short_device
from collectived_launcher.top.state import View
from collectived_proto.report.findings import (
    FindingKind,
    Severity,
    StatusFinding,
    code_name,
    short_group_name,
)
from collectived_proto.report.labels import (
    WorkerState,
    finished_text,
    has_counts,
    has_reported,
    is_late,
    is_late_p2p,
    size_text,
    worker_state,
)
from collectived_proto.report.phrases import format_duration, numbers_text, peer_label
from collectived_proto.report.quantities import format_bytes
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import status_pb2 as pb

BAD, WARN, GOOD, PLAIN = "red", "yellow", "green", ""
_STATES = tuple(WorkerState)  # the worst first
_COLOURS = {Severity.ERROR: BAD, Severity.WARNING: WARN, Severity.NOTE: "cyan"}


@dataclass(frozen=True, slots=True)
class Column:
    """`ratio`: of the room that is left, for columns that take what they get; 0: as wide as its cells. `min_width`:
    columns of the terminal from which on it is shown at all."""

    name: str
    right_aligned: bool = False
    ratio: int = 0
    min_width: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One text per column, and the colour of the row."""

    cells: tuple[str, ...]
    colour: str = PLAIN


@dataclass(frozen=True, slots=True)
class Listing:
    """`wraps`: long cells go on in the next line. `empty_text`: what to say where there are no rows."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    empty_text: str
    wraps: bool = False


def build_listing(view: View, reply: pb.StatusReply, found: Sequence[StatusFinding]) -> Listing:
    """
    found: `findings(reply)`, which every view needs.
    """
    return _LISTINGS[view](reply, found)


def count_rows(reply: pb.StatusReply, found: Sequence[StatusFinding]) -> dict[View, int]:
    """How many rows each view has."""
    return {
        View.FINDINGS: len(found),
        View.GROUPS: len(reply.groups),
        View.RANKS: sum(len(group.members) for group in reply.groups),
        View.IN_FLIGHT: sum(len(group.in_flight) + len(group.posts) for group in reply.groups),
        View.WORKERS: len(reply.workers),
        View.FAILURES: len(reply.failures),
    }


def _findings(reply: pb.StatusReply, found: Sequence[StatusFinding]) -> Listing:
    rows = (Row((one.kind.value.upper(), one.sentence), _COLOURS[one.severity]) for one in found)
    return Listing((Column("kind"), Column("what is wrong", ratio=1)), tuple(rows), "Nothing is wrong.", wraps=True)


def _groups(reply: pb.StatusReply, found: Sequence[StatusFinding]) -> Listing:
    columns = (
        Column("group", ratio=2),
        Column("state"),
        Column("ranks", right_aligned=True),
        Column("done", right_aligned=True),
        Column("failed", right_aligned=True, min_width=90),
        Column("bytes", right_aligned=True),
        Column("per second", right_aligned=True, min_width=80),
        Column("bus bandwidth", right_aligned=True, min_width=100),
        Column("in flight", right_aligned=True),
    )
    worst = _first_finding_by_group(found)
    least = len(found)
    ordered = sorted(reply.groups, key=lambda group: (worst.get(_group_key(reply, group), least), group.name))
    return Listing(columns, tuple(_group_row(reply, group, found, worst) for group in ordered), "No groups yet.")


def _group_key(reply: pb.StatusReply, group: pb.GroupStatus) -> tuple[str, int]:
    return short_group_name(reply, group.name), group.generation  # which all have that form is 0


def _first_finding_by_group(found: Sequence[StatusFinding]) -> dict[tuple[str, int], int]:
    """By group: the place of its first finding among all, of those that say that something is wrong."""
    places: dict[tuple[str, int], int] = {}
    for place, finding in enumerate(found):
        if finding.group and finding.severity is not Severity.NOTE:
            places.setdefault((finding.group, finding.generation), place)
    return places


def _group_row(
    reply: pb.StatusReply, group: pb.GroupStatus, found: Sequence[StatusFinding], worst: dict[tuple[str, int], int]
) -> Row:
    per_second = sum(rate.collectives / max(rate.seconds, 1.0) for rate in group.rates)
    busiest = max(group.rates, key=lambda rate: rate.bytes, default=pb.Rate())
    told = (f"{group.collectives_done:,}", f"{group.collectives_failed:,}", format_bytes(group.bytes_reduced))
    cells = (
        short_group_name(reply, group.name),
        group.state,
        size_text(group),
        *(told if has_counts(reply, group) else ("-",) * len(told)),
        f"{per_second:.1f}" if group.rates else "-",
        f"{busiest.bus_bandwidth / 1e9:.2f} GB/s {busiest.op}" if busiest.bus_bandwidth else "-",
        str(len(group.in_flight) + len(group.posts)),
    )
    colour = {"failed": BAD, "forming": WARN}.get(group.state, PLAIN)
    place = worst.get(_group_key(reply, group))
    return Row(cells, colour if place is None else _COLOURS[found[place].severity])


def _ranks(reply: pb.StatusReply, found: Sequence[StatusFinding]) -> Listing:
    columns = (
        Column("group", ratio=1),
        Column("rank", right_aligned=True),
        Column("worker"),
        Column("device", min_width=90),
        Column("pid", right_aligned=True),
        Column("label", min_width=130),
        Column("finished", right_aligned=True, min_width=100),
        Column("last call", ratio=2),
        Column("at", ratio=2),
        Column("idle", right_aligned=True),
    )
    stalls = (finding for finding in found if finding.kind is FindingKind.MISSING)
    awaited = {(finding.generation, rank) for finding in stalls for rank in finding.ranks}
    rows = []
    for group in reply.groups:
        for member in group.members:
            bad = (group.generation, member.rank) in awaited
            rows.append(
                (not bad, short_group_name(reply, group.name), member.rank, _rank_row(reply, group, member, bad))
            )
    return Listing(columns, tuple(row[-1] for row in sorted(rows, key=lambda row: row[:-1])), "No ranks yet.")


def _rank_row(reply: pb.StatusReply, group: pb.GroupStatus, member: common.Member, bad: bool) -> Row:
    cells = (
        short_group_name(reply, group.name),
        str(member.rank),
        f"{member.worker} ({member.host})",
        short_device(member.device),
        str(member.pid),
        member.label or "-",
        finished_text(member),
        member.last_op or "-",
        member.last_site or "-",
        format_duration(member.idle_seconds),
    )
    return Row(cells, BAD if bad else PLAIN)


def _in_flight(reply: pb.StatusReply, found: Sequence[StatusFinding]) -> Listing:
    columns = (
        Column("group", ratio=1),
        Column("collective", ratio=2),
        Column("since", right_aligned=True),
        Column("missing", ratio=1),
        Column("arrived", ratio=1, min_width=100),
        Column("at", ratio=2),
        Column("bytes", right_aligned=True, min_width=90),
        Column("packs", right_aligned=True, min_width=130),
        Column("state", min_width=120),
        Column("algorithm", ratio=1, min_width=110),
    )
    rows = []
    for group in reply.groups:
        name = short_group_name(reply, group.name)
        for flight in group.in_flight:
            late = is_late(group, flight)
            rows.append((not late, -flight.seconds, _in_flight_row(name, flight, late)))
        for post in group.posts:
            late = is_late_p2p(group, post)
            rows.append((not late, -post.seconds, _p2p_row(name, post, late)))
    return Listing(columns, tuple(row[-1] for row in sorted(rows, key=lambda row: row[:2])), "Nothing is in flight.")


def _in_flight_row(name: str, flight: pb.InFlight, late: bool) -> Row:
    cells = (
        name,
        f"{flight.op} #{flight.instance}",
        format_duration(flight.seconds),
        numbers_text(flight.missing),
        numbers_text(flight.arrived),
        flight.site or "-",
        format_bytes(flight.bytes),
        f"{flight.packs_done} of {flight.packs}" if flight.packs else "-",
        flight.state or "-",
        flight.algorithm or "-",
    )
    return Row(cells, BAD if late else PLAIN)


def _p2p_row(name: str, post: pb.PostInFlight, late: bool) -> Row:
    nbytes = format_bytes(post.bytes) if post.bytes else "-"
    cells = (
        name,
        post.op,
        format_duration(post.seconds),
        str(peer_label(post.peer)),
        str(post.rank),
        post.site or "-",
        nbytes,
        "-",
        "-",
        "-",
    )
    return Row(cells, BAD if late else PLAIN)


def _workers(reply: pb.StatusReply, found: Sequence[StatusFinding]) -> Listing:
    columns = (
        Column("task", right_aligned=True),
        Column("host", ratio=1),
        Column("coordinator"),
        Column("heard", right_aligned=True, min_width=90),
        Column("pid", right_aligned=True),
        Column("devices", ratio=1, min_width=80),
        Column("sessions", right_aligned=True),
        Column("arenas", right_aligned=True),
        Column("limit", right_aligned=True, min_width=120),
        Column("resident", right_aligned=True, min_width=100),
        Column("up", right_aligned=True),
        Column("release", min_width=110),
    )
    ordered = sorted(reply.workers, key=lambda worker: (_STATES.index(worker_state(worker)), worker.task))
    return Listing(columns, tuple(map(_worker_row, ordered)), "No workers.")


def _worker_row(worker: pb.WorkerStatus) -> Row:
    state = worker_state(worker)
    told = (
        str(worker.sessions),
        format_bytes(worker.arena_bytes),
        format_bytes(worker.arena_limit_bytes) if worker.arena_limit_bytes else "-",
        format_bytes(worker.resident_bytes),
        format_duration(worker.uptime_seconds),
    )
    cells = (
        str(worker.task),
        worker.host,
        state,
        f"{format_duration(worker.last_heartbeat_seconds)} ago"
        if worker.connected or worker.last_heartbeat_seconds
        else "-",
        str(worker.pid),
        devices_text(worker.devices),
        *(told if has_reported(worker) else ("-",) * len(told)),
        worker.release or "-",
    )
    return Row(cells, {WorkerState.LOST: BAD, WorkerState.CONNECTED: PLAIN}.get(state, WARN))


def _failures(reply: pb.StatusReply, found: Sequence[StatusFinding]) -> Listing:
    columns = (
        Column("ago", right_aligned=True),
        Column("group"),
        Column("error"),
        Column("message", ratio=1),
    )
    rows = []
    for failure in reply.failures:
        verdict = failure.verdict
        ago = format_duration(max(0.0, reply.unix_time - failure.unix_time)) if failure.unix_time else "-"
        name, code = short_group_name(reply, verdict.group), code_name(verdict.code)
        rows.append(Row((ago, name, code, verdict.message), BAD))
    return Listing(columns, tuple(rows), "Nothing has failed.", wraps=True)


_LISTINGS: dict[View, Callable[[pb.StatusReply, Sequence[StatusFinding]], Listing]] = {
    View.FINDINGS: _findings,
    View.GROUPS: _groups,
    View.RANKS: _ranks,
    View.IN_FLIGHT: _in_flight,
    View.WORKERS: _workers,
    View.FAILURES: _failures,
}
