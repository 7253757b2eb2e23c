"""A `StatusReply` as the rows of each view, what hurts first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from collectived_launcher.status.tables import devices, short_device
from collectived_launcher.top.state import View
from collectived_proto.hurts import (
    Finding,
    Severity,
    Trouble,
    code_name,
    short_name,
    size,
)
from collectived_proto.shown import (
    WorkerState,
    finished,
    has_counts,
    has_told,
    is_late,
    is_late_post,
    size_text,
    worker_state,
)
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import status_pb2 as pb
from collectived_proto.wording import ranks_text, span

BAD, WARN, GOOD, PLAIN = "red", "yellow", "green", ""
_STATES = tuple(WorkerState)  # the worst first
_COLOURS = {Severity.ERROR: BAD, Severity.WARNING: WARN, Severity.NOTE: "cyan"}


@dataclass(frozen=True, slots=True)
class Column:
    """`share`: of the room that is left, for columns that take what they get; 0: as wide as its cells. `least`: columns
    of the terminal from which on it is shown at all."""

    name: str
    right: bool = False
    share: int = 0
    least: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One text per column, and the colour of the row."""

    cells: tuple[str, ...]
    colour: str = PLAIN


@dataclass(frozen=True, slots=True)
class Listing:
    """`wraps`: long cells go on in the next line. `empty`: what to say where there are no rows."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    empty: str
    wraps: bool = False


def listing(view: View, reply: pb.StatusReply, found: Sequence[Finding]) -> Listing:
    """
    found: `findings(reply)`, which every view needs.
    """
    return _LISTINGS[view](reply, found)


def counts(reply: pb.StatusReply, found: Sequence[Finding]) -> dict[View, int]:
    """How many rows each view has."""
    return {
        View.HURTS: len(found),
        View.GROUPS: len(reply.groups),
        View.RANKS: sum(len(group.members) for group in reply.groups),
        View.IN_FLIGHT: sum(len(group.in_flight) + len(group.posts) for group in reply.groups),
        View.WORKERS: len(reply.workers),
        View.FAILURES: len(reply.failures),
    }


def _hurts(reply: pb.StatusReply, found: Sequence[Finding]) -> Listing:
    rows = (Row((one.kind.value.upper(), one.sentence), _COLOURS[one.severity]) for one in found)
    return Listing((Column("kind"), Column("what hurts", share=1)), tuple(rows), "Nothing hurts.", wraps=True)


def _groups(reply: pb.StatusReply, found: Sequence[Finding]) -> Listing:
    columns = (
        Column("group", share=2),
        Column("generation", least=110),
        Column("state"),
        Column("ranks", right=True),
        Column("done", right=True),
        Column("failed", right=True, least=90),
        Column("bytes", right=True),
        Column("per second", right=True, least=80),
        Column("bus bandwidth", right=True, least=100),
        Column("in flight", right=True),
    )
    worst = _worst(found)
    least = len(found)
    ordered = sorted(reply.groups, key=lambda group: (worst.get(_key(reply, group), least), group.name))
    return Listing(columns, tuple(_group(reply, group, found, worst) for group in ordered), "No groups yet.")


def _key(reply: pb.StatusReply, group: pb.GroupStatus) -> tuple[str, int]:
    return short_name(reply, group.name), group.generation  # which all have that form is 0


def _worst(found: Sequence[Finding]) -> dict[tuple[str, int], int]:
    """By group: the place of its first finding among all, of those that say that something is wrong."""
    places: dict[tuple[str, int], int] = {}
    for place, finding in enumerate(found):
        if finding.group and finding.severity is not Severity.NOTE:
            places.setdefault((finding.group, finding.generation), place)
    return places


def _group(
    reply: pb.StatusReply, group: pb.GroupStatus, found: Sequence[Finding], worst: dict[tuple[str, int], int]
) -> Row:
    per_second = sum(rate.collectives / max(rate.seconds, 1.0) for rate in group.rates)
    busiest = max(group.rates, key=lambda rate: rate.bytes, default=pb.Rate())
    told = (f"{group.collectives_done:,}", f"{group.collectives_failed:,}", size(group.bytes_reduced))
    cells = (
        short_name(reply, group.name),
        str(group.generation or "-"),
        group.state,
        size_text(group),
        *(told if has_counts(reply, group) else ("-",) * len(told)),
        f"{per_second:.1f}" if group.rates else "-",
        f"{busiest.bus_bandwidth / 1e9:.2f} GB/s {busiest.op}" if busiest.bus_bandwidth else "-",
        str(len(group.in_flight) + len(group.posts)),
    )
    colour = {"failed": BAD, "forming": WARN}.get(group.state, PLAIN)
    place = worst.get(_key(reply, group))
    return Row(cells, colour if place is None else _COLOURS[found[place].severity])


def _ranks(reply: pb.StatusReply, found: Sequence[Finding]) -> Listing:
    columns = (
        Column("group", share=1),
        Column("rank", right=True),
        Column("worker"),
        Column("device", least=90),
        Column("pid", right=True),
        Column("label", least=130),
        Column("finished", right=True, least=100),
        Column("last call", share=2),
        Column("at", share=2),
        Column("idle", right=True),
    )
    stalls = (finding for finding in found if finding.kind is Trouble.MISSING)
    awaited = {(finding.generation, rank) for finding in stalls for rank in finding.ranks}
    rows = []
    for group in reply.groups:
        for member in group.members:
            bad = (group.generation, member.rank) in awaited
            rows.append((not bad, short_name(reply, group.name), member.rank, _rank(reply, group, member, bad)))
    return Listing(columns, tuple(row[-1] for row in sorted(rows, key=lambda row: row[:-1])), "No ranks yet.")


def _rank(reply: pb.StatusReply, group: pb.GroupStatus, member: common.Member, bad: bool) -> Row:
    cells = (
        short_name(reply, group.name),
        str(member.rank),
        f"{member.worker} ({member.host})",
        short_device(member.device),
        str(member.pid),
        member.label or "-",
        finished(member),
        member.last_op or "-",
        member.last_site or "-",
        span(member.idle_seconds),
    )
    return Row(cells, BAD if bad else PLAIN)


def _in_flight(reply: pb.StatusReply, found: Sequence[Finding]) -> Listing:
    columns = (
        Column("group", share=1),
        Column("collective", share=2),
        Column("since", right=True),
        Column("missing", share=1),
        Column("arrived", share=1, least=100),
        Column("at", share=2),
        Column("bytes", right=True, least=90),
        Column("packs", right=True, least=130),
        Column("state", least=120),
        Column("algorithm", share=1, least=110),
    )
    rows = []
    for group in reply.groups:
        name = short_name(reply, group.name)
        for flight in group.in_flight:
            late = is_late(group, flight)
            rows.append((not late, -flight.seconds, _flight(name, flight, late)))
        for post in group.posts:
            late = is_late_post(group, post)
            rows.append((not late, -post.seconds, _post(name, post, late)))
    return Listing(columns, tuple(row[-1] for row in sorted(rows, key=lambda row: row[:2])), "Nothing is in flight.")


def _flight(name: str, flight: pb.InFlight, late: bool) -> Row:
    cells = (
        name,
        f"{flight.op} #{flight.instance}",
        span(flight.seconds),
        _numbers(flight.missing),
        _numbers(flight.arrived),
        flight.site or "-",
        size(flight.bytes),
        f"{flight.packs_done} of {flight.packs}" if flight.packs else "-",
        flight.state or "-",
        flight.algorithm or "-",
    )
    return Row(cells, BAD if late else PLAIN)


def _post(name: str, post: pb.PostInFlight, late: bool) -> Row:
    nbytes = size(post.bytes) if post.bytes else "-"
    cells = (name, post.op, span(post.seconds), str(post.peer), str(post.rank), post.site or "-", nbytes, "-", "-", "-")
    return Row(cells, BAD if late else PLAIN)


def _numbers(ranks: Iterable[int]) -> str:
    """`0 to 5, 7`"""
    return ranks_text(sorted(ranks)).partition(" ")[2] or "-"


def _workers(reply: pb.StatusReply, found: Sequence[Finding]) -> Listing:
    columns = (
        Column("task", right=True),
        Column("host", share=1),
        Column("coordinator"),
        Column("heard", right=True, least=90),
        Column("pid", right=True),
        Column("devices", share=1, least=80),
        Column("sessions", right=True),
        Column("arenas", right=True),
        Column("limit", right=True, least=120),
        Column("resident", right=True, least=100),
        Column("up", right=True),
        Column("release", least=110),
    )
    ordered = sorted(reply.workers, key=lambda worker: (_STATES.index(worker_state(worker)), worker.task))
    return Listing(columns, tuple(map(_worker, ordered)), "No workers.")


def _worker(worker: pb.WorkerStatus) -> Row:
    state = worker_state(worker)
    told = (
        str(worker.sessions),
        size(worker.arena_bytes),
        size(worker.arena_limit_bytes) if worker.arena_limit_bytes else "-",
        size(worker.resident_bytes),
        span(worker.uptime_seconds),
    )
    cells = (
        str(worker.task),
        worker.host,
        state,
        f"{span(worker.last_heartbeat_seconds)} ago" if worker.connected or worker.last_heartbeat_seconds else "-",
        str(worker.pid),
        devices(worker.devices),
        *(told if has_told(worker) else ("-",) * len(told)),
        worker.release or "-",
    )
    return Row(cells, {WorkerState.LOST: BAD, WorkerState.CONNECTED: PLAIN}.get(state, WARN))


def _failures(reply: pb.StatusReply, found: Sequence[Finding]) -> Listing:
    columns = (
        Column("ago", right=True),
        Column("group"),
        Column("generation", least=110),
        Column("error"),
        Column("message", share=1),
    )
    rows = []
    for failure in reply.failures:
        verdict = failure.verdict
        ago = span(max(0.0, reply.unix_time - failure.unix_time)) if failure.unix_time else "-"
        name, code = short_name(reply, verdict.group), code_name(verdict.code)
        rows.append(Row((ago, name, str(verdict.generation), code, verdict.message), BAD))
    return Listing(columns, tuple(rows), "Nothing has failed.", wraps=True)


_LISTINGS: dict[View, Callable[[pb.StatusReply, Sequence[Finding]], Listing]] = {
    View.HURTS: _hurts,
    View.GROUPS: _groups,
    View.RANKS: _ranks,
    View.IN_FLIGHT: _in_flight,
    View.WORKERS: _workers,
    View.FAILURES: _failures,
}
