"""Judgement: from what is known about a generation to the verdict, as pure values.

*Silent* workers did not answer or are not connected; of their ranks only old news is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from collectived_proto import wording
from collectived_proto.errors import Code
from collectived_proto.types import GroupInfo, Member, RankPosition, Report, ReportKind, Verdict, shown_name
from collectived_proto.wording import expired_text, history, not_come, seconds, span, subject
from collectived_runtime.coordinator.registry import Departure, Generation, Inquiry
from collectived_runtime.coordinator.wording import majority, mismatch_text, pending_text, unfinished_text


def verdict(
    generation: Generation,
    code: Code,
    text: str,
    from_instance: int,
    now: float,
    *,
    instance: int | None = None,
    missing: Iterable[int] = (),
    differing: Iterable[int] = (),
) -> Verdict:
    """A verdict with every member's last position; `instance` is by default the first one running that it ends."""
    info = generation.info
    failing = first_running(generation, from_instance) if instance is None else instance
    return Verdict(
        info.name,
        info.key,
        info.generation,
        code,
        text,
        from_instance,
        instance=failing,
        op=operation(generation, failing),
        missing=generation.members(now, missing),
        differing=generation.members(now, differing),
        members=generation.members(now),
    )


def first_running(generation: Generation, from_instance: int) -> int:
    """The first instance from there on that some rank is known to have submitted and not finished; -1: none.

    What a heartbeat has told of an instance says only that it ran then.
    """
    reported = [standing.position for standing in generation.standing.values() if standing.worker is None]
    starts = [(max(from_instance, position.finished + 1), position.submitted) for position in reported]
    running = [start for start, submitted in starts if start <= submitted]
    running += [
        instance for instance in generation.evidence if instance >= from_instance and _waits(generation, instance)
    ]
    return min(running, default=-1)


def _waits(generation: Generation, instance: int) -> bool:
    """Whether somebody was asked about an instance and had not finished it."""
    positions = generation.evidence[instance].positions.values()
    return any(position.arrived and position.finished < instance for position in positions)


def operation(generation: Generation, instance: int) -> str:
    """What an instance is, where anybody who submitted it, or was about to, has told: `all_reduce(sum)`."""
    evidence = generation.evidence.get(instance)
    told = (position.op for position in evidence.positions.values()) if evidence else iter(())
    last = (s.position.last_op for s in generation.standing.values() if s.position.submitted == instance >= 0)
    return next(filter(None, told), "") or next(filter(None, last), "")


def judge(generation: Generation, inquiry: Inquiry, silent: Mapping[int, str], now: float) -> Verdict | None:
    """What follows from the answers; None where nothing has failed.

    Contracts that differ are the cause wherever they are known, for then waiting longer does not help.
    """
    if inquiry.kind is ReportKind.LINK:
        return _link(generation, inquiry, now)
    if inquiry.kind is ReportKind.NATIVE:
        return _native(generation, inquiry, silent, now)
    mismatch = _mismatch(generation, inquiry, now)
    if mismatch is not None or inquiry.kind is not ReportKind.EXPIRED:
        return mismatch
    return _expired(generation, inquiry, silent, now)


def majority_open(generation: Generation, instance: int) -> bool:
    """Whether contracts differ, no side has most of the ranks yet, and some rank has not come."""
    evidence = generation.evidence.get(instance)
    positions = evidence.positions if evidence else {}
    known = {rank: position for rank, position in positions.items() if position.arrived and position.contract}
    if not known:
        return False
    us, others = majority(known)
    size = generation.info.size
    return bool(others) and len(known) < size and 2 * len(us) <= size


def _link(generation: Generation, inquiry: Inquiry, now: float) -> Verdict | None:
    ranks = generation.present(inquiry.peer)
    if not ranks:
        return None
    text = lost_text(generation, ranks, inquiry.text, now)
    return verdict(generation, Code.UNAVAILABLE, text, max(inquiry.instance, 0), now, missing=ranks)


def _native(generation: Generation, inquiry: Inquiry, silent: Mapping[int, str], now: float) -> Verdict:
    """Only who is lost is named: that NCCL failed at one end does not say that it is at fault, nor the other."""
    instance, ranks_of = inquiry.instance, generation.ranks_of
    lost = sorted(rank for rank, how in generation.departed.items() if how is Departure.LOST)
    told = [(f"worker {task}", generation.members(now, ranks_of[task]), said) for task, said in inquiry.broken.items()]
    text = wording.native_text(_subject(generation, instance), told, generation.members(now, lost))
    quiet = [why for task, why in sorted(silent.items()) if generation.present(task)]
    text = "; ".join([text, *quiet[: wording.NAMED]])
    return verdict(generation, Code.UNAVAILABLE, text, instance, now, instance=instance, missing=lost)


def _mismatch(generation: Generation, inquiry: Inquiry, now: float) -> Verdict | None:
    instance = inquiry.instance
    evidence = generation.evidence[instance]
    arrived = {rank: known for rank, known in evidence.positions.items() if known.arrived and known.contract}
    us, others = majority(arrived) if arrived else ([], [])
    op = arrived[us[0]].op if us else operation(generation, instance)
    what = subject(instance, op, generation.info.name)
    if others:
        text = mismatch_text(what, arrived, us, others)
    elif inquiry.kind is ReportKind.MISMATCH:
        text = f"{what}: {inquiry.text or 'the ranks differ in what they submitted'}"
    else:
        return None
    differing = sorted(rank for side in others for rank in side)
    decision = verdict(generation, Code.INVALID_ARGUMENT, text, instance, now, instance=instance, differing=differing)
    return replace(decision, op=op)


def _expired(generation: Generation, inquiry: Inquiry, silent: Mapping[int, str], now: float) -> Verdict | None:
    instance = inquiry.instance
    ranks = range(generation.info.size)
    missing = [rank for rank in ranks if not generation.arrived(rank, instance)]
    unfinished = [rank for rank in ranks if generation.finished(rank) < instance]
    if not unfinished:
        return None  # it was complete before the answers came
    what, sites = _subject(generation, instance), _sites(generation, instance)
    if missing:
        text = expired_text(what, inquiry.timeout_seconds, _absent(generation, missing, silent, now), sites)
    else:
        text = unfinished_text(what, inquiry.timeout_seconds, unfinished, sites)
    return verdict(generation, Code.DEADLINE_EXCEEDED, text, instance, now, instance=instance, missing=missing)


def overdue(generation: Generation, report: Report, now: float) -> Verdict:
    """A send or recv whose other end did not come in time."""
    what = f"{report.text} on {generation.member(report.rank, now)}"
    text = f"{what} did not complete within {seconds(report.timeout_seconds)}: {_other_end(generation, report, now)}"
    return verdict(generation, Code.DEADLINE_EXCEEDED, text, 0, now, missing=[_peer(generation, report)])


def unclaimed(generation: Generation, report: Report, now: float) -> Verdict:
    """Letters that nobody asks for have used up what memory there is for them."""
    peer = _peer(generation, report)
    text = (
        f"there is no memory for what {generation.member(peer, now)} has sent to "
        f"{generation.member(report.rank, now)}, which has not received it: {report.text}"
    )
    return verdict(generation, Code.RESOURCE_EXHAUSTED, text, 0, now, missing=[peer])


def unanswered(generation: Generation, report: Report, now: float) -> str:
    """The warning that a send or recv waits for its other end."""
    what = f"group {shown_name(generation.info.name)!r}: {report.text} on {generation.member(report.rank, now)}"
    return f"{what} has waited for {span(report.timeout_seconds)}: {_other_end(generation, report, now)}"


def _other_end(generation: Generation, report: Report, now: float) -> str:
    peer = _peer(generation, report)
    return _not_come(generation, peer, "", now)


def _peer(generation: Generation, report: Report) -> int:
    return report.peer if report.peer < generation.info.size else report.rank


def pending(generation: Generation, instance: int, silent: Mapping[int, str], stall_seconds: float, now: float) -> str:
    """The warning that an instance waits for ranks; '' where all have come."""
    missing = [rank for rank in range(generation.info.size) if not generation.arrived(rank, instance)]
    if not missing:
        return ""
    waited = stall_seconds + max(0.0, now - generation.evidence[instance].since)
    absent = _absent(generation, missing, silent, now)
    return pending_text(_subject(generation, instance), waited, absent, _sites(generation, instance))


def lost_text(generation: Generation, ranks: Sequence[int], why: str, now: float) -> str:
    """`rank 2 (…) is lost: its process ended (last finished #16, last did all_reduce(sum) #17 at train.py:88)`"""
    standings = {rank: generation.standing[rank] for rank in ranks if rank in generation.standing}
    histories = {rank: history(known.position, known.age(now)) for rank, known in standings.items()}
    if not histories and len(ranks) == 1:
        histories = {ranks[0]: "what it did last has not been reported"}
    return wording.lost_text(generation.members(now, ranks), why, histories)


def with_successor(decision: Verdict, successor: int) -> Verdict:
    return replace(decision, successor=successor)


def successor_info(generation: Generation, number: int) -> GroupInfo:
    """The same members in a new generation, in which nothing has been submitted."""
    return replace(generation.info, generation=number, members=tuple(map(_fresh, generation.info.members)))


def _fresh(member: Member) -> Member:
    return replace(member, last_instance=-1, last_op="", last_site="", idle_seconds=0.0)


def _subject(generation: Generation, instance: int) -> str:
    return subject(instance, operation(generation, instance), generation.info.name)


def _absent(generation: Generation, missing: Sequence[int], silent: Mapping[int, str], now: float) -> list[str]:
    members = generation.info.members
    return [_not_come(generation, rank, silent.get(members[rank].worker, ""), now) for rank in missing]


def _not_come(generation: Generation, rank: int, silent: str, now: float) -> str:
    member, standing = generation.member(rank, now), generation.standing.get(rank)
    return (
        not_come(member, standing.position, silent, standing.age(now)) if standing else not_come(member, None, silent)
    )


def _sites(generation: Generation, instance: int) -> dict[int, str]:
    """Rank -> source line, of those that wait in this instance."""
    evidence = generation.evidence.get(instance)
    sites = {}
    for rank in range(generation.info.size):
        if generation.arrived(rank, instance) and generation.finished(rank) < instance:
            known = evidence.positions.get(rank) if evidence else None
            sites[rank] = _site(
                known, generation.standing[rank].position if rank in generation.standing else None, instance
            )
    return sites


def _site(asked: RankPosition | None, last: RankPosition | None, instance: int) -> str:
    if asked is not None and asked.arrived and asked.site:
        return asked.site
    return last.last_site if last is not None and last.submitted == instance else ""
