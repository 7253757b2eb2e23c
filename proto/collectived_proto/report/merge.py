"""Merge the reports of all group loops of a generation. A *group loop* is a group as one worker sees it.

Pure: for the coordinator, which gets all of the reports, and for commands that read them without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from collectived_proto.v1 import status_pb2 as pb

RESTARTED_WARNING = "the coordinator was started again and has no report from some workers yet"


def merge_in_flight(
    group_loops: Sequence[pb.LaneStatus], ranks: Iterable[int], pending: Iterable[pb.InFlight] = ()
) -> list[pb.InFlight]:
    """Merge entries into one per instance: which ranks have arrived, since when, and which of `ranks` have not."""
    merged: dict[int, pb.InFlight] = {}
    arrived: dict[int, set[int]] = {}
    for flight in (*pending, *(flight for group_loop in group_loops for flight in group_loop.in_flight)):
        arrived.setdefault(flight.instance, set()).update(flight.arrived)
        _add_flight(merged.setdefault(flight.instance, pb.InFlight(instance=flight.instance)), flight)
    # A rank that is through with an instance, such as a root that only sends, has arrived there too.
    finished = {member.rank: member.last_instance for group_loop in group_loops for member in group_loop.members}
    known = sorted(ranks)
    for instance, entry in merged.items():
        here = arrived[instance] | {rank for rank, last in finished.items() if last >= instance}
        entry.arrived.extend(sorted(here))
        entry.missing.extend(rank for rank in known if rank not in here)
        entry.state = "arriving" if entry.missing else entry.state
    return [merged[instance] for instance in sorted(merged)]


def _add_flight(entry: pb.InFlight, flight: pb.InFlight) -> None:
    """Add the report of one worker. Of packs that are done, the worker counts that is furthest behind."""
    entry.op, entry.site = entry.op or flight.op, entry.site or flight.site
    entry.seconds, entry.bytes = max(entry.seconds, flight.seconds), max(entry.bytes, flight.bytes)
    entry.state = "running" if "running" in (entry.state, flight.state) else flight.state
    entry.algorithm, entry.why = entry.algorithm or flight.algorithm, entry.why or flight.why
    if flight.packs:
        entry.packs_done = min(entry.packs_done, flight.packs_done) if entry.packs else flight.packs_done
        entry.packs, entry.shards = flight.packs, flight.shards


def merge_rates(group_loops: Iterable[pb.LaneStatus]) -> list[pb.Rate]:
    """By operation. Every worker takes part in every collective, so nothing is added up but counts are the largest.

    A worker is busy from when its own ranks have come, though others may be late: the one that was busy for the
    shortest time shows best how long carrying took. The waiting time is that of the worker that waited longest.
    """
    by_op: dict[str, list[pb.Rate]] = {}
    for rate in (rate for group_loop in group_loops for rate in group_loop.rates):
        by_op.setdefault(rate.op, []).append(rate)
    return [_merge_rate(of_op) for of_op in by_op.values()]


def _merge_rate(of_op: list[pb.Rate]) -> pb.Rate:
    most = max(rate.collectives for rate in of_op)
    found = pb.Rate()
    found.CopyFrom(min((rate for rate in of_op if rate.collectives == most), key=lambda rate: rate.busy_seconds))
    found.waiting_seconds = max(rate.waiting_seconds for rate in of_op)
    return found


def merge_replies(parts: Sequence[pb.StatusReply]) -> pb.StatusReply:
    """Merge answers that each know a part into one. Only parts that no answer has are missing from it.

    Args:
        parts: one or more, that of a coordinator first where there is one; the first one's warnings are said.
    """
    whole = pb.StatusReply()
    whole.CopyFrom(parts[0])
    whole.answered_by = ", ".join(part.answered_by for part in parts)
    del whole.workers[:], whole.groups[:]
    whole.workers.extend(_merge_workers(parts))
    group_loops: dict[int, list[pb.LaneStatus]] = {}
    for group_loop in (group_loop for worker in whole.workers for group_loop in worker.lanes):
        group_loops.setdefault(group_loop.generation, []).append(group_loop)
    groups: dict[tuple[str, int], pb.GroupStatus] = {}
    for group in (group for part in parts for group in part.groups):
        groups.setdefault((group.name, group.generation), group)
    whole.groups.extend(_merge_group(group, group_loops.get(group.generation, [])) for group in groups.values())
    return whole


def _merge_workers(parts: Iterable[pb.StatusReply]) -> list[pb.WorkerStatus]:
    """One of each worker: its own where it gives one, with what the coordinator knows of the same incarnation."""
    found: dict[int, pb.WorkerStatus] = {}
    for worker in (worker for part in parts for worker in part.workers):
        before = found.get(worker.task)
        found[worker.task] = account = pb.WorkerStatus()
        account.CopyFrom(worker)
        if before is not None and before.incarnation == worker.incarnation:
            account.connected = before.connected
            account.last_heartbeat_seconds = before.last_heartbeat_seconds
    return [found[task] for task in sorted(found)]


def merge_own_reply(reply: pb.StatusReply, own: pb.StatusReply) -> pb.StatusReply:
    """The answer of a coordinator that does not list the worker of `own`, because that has not reported to it yet."""
    whole = merge_replies([reply, own])
    if RESTARTED_WARNING not in whole.warnings:
        whole.warnings.append(RESTARTED_WARNING)
    return whole


def _merge_group(seen: pb.GroupStatus, group_loops: Sequence[pb.LaneStatus]) -> pb.GroupStatus:
    group = pb.GroupStatus()
    group.CopyFrom(seen)
    if not group_loops and seen.state != "partial":  # known to the coordinator alone
        return group
    for member in (member for group_loop in group_loops for member in group_loop.members):
        if member.rank < len(group.members):
            group.members[member.rank].CopyFrom(member)
    pending = [] if seen.state == "partial" else seen.in_flight
    del group.in_flight[:], group.posts[:], group.notes[:], group.rates[:]
    group.in_flight.extend(
        merge_in_flight(group_loops, {rank for group_loop in group_loops for rank in group_loop.ranks}, pending)
    )
    group.posts.extend(post for group_loop in group_loops for post in group_loop.posts)
    group.notes.extend(dict.fromkeys(note for group_loop in group_loops for note in group_loop.notes))
    group.rates.extend(merge_rates(group_loops))
    group.collectives_done = max((group_loop.collectives_done for group_loop in group_loops), default=0)
    group.collectives_failed = max((group_loop.collectives_failed for group_loop in group_loops), default=0)
    group.bytes_reduced = sum(group_loop.bytes_reduced for group_loop in group_loops)
    return group
