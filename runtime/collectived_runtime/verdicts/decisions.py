"""The decision for each kind of fault: the cause, the words, and the ranks that are to blame.

The coordinator decides by what all workers have said, a lone worker by what it knows itself; from there on both decide
alike. Pure.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from collectived_proto.cause import RANK_FAILURES, Cause
from collectived_proto.report.phrases import (
    MAX_NAMED,
    expired_text,
    format_seconds,
    lost_text,
    members_text,
    nccl_failure_text,
    ranks_text,
)
from collectived_proto.types import Member, Peer, RankPosition
from collectived_runtime.verdicts.difference_text import describe_collective, find_difference


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a group fails. `missing` and `differing` are ranks; `origin` is the one with which it began, if it is one."""

    cause: Cause
    text: str
    missing: tuple[int, ...] = ()
    differing: tuple[int, ...] = ()
    origin: int | None = None


def bound_stacks(members: Iterable[Member], missing: Sequence[int]) -> tuple[Member, ...]:
    """Only the first few missing ranks say where their threads are: verdicts that go to all ranks stay small."""
    told = missing[:MAX_NAMED]
    return tuple(
        replace(member, stack="") if member.stack and member.rank not in told else member for member in members
    )


def judge_lost_rank(member: Member, why: str, history: str) -> Decision:
    """The process of a rank is gone. `history` is what it did last, '' where that is not known."""
    text = lost_text([member], why or "its process ended", {member.rank: history} if history else {})
    return Decision(Cause.LOST_RANK, text, (member.rank,), origin=member.rank)


def judge_lost_workers(
    cause: Cause, members: Sequence[Member], why: str, histories: Mapping[int, str] | None = None
) -> Decision:
    """Workers, or the links to them, are gone (`cause`), and with them their ranks."""
    text = lost_text(members, why, histories or {})
    return Decision(cause, text, tuple(member.rank for member in members))


def judge_refused_link(worker: Peer, peer: Peer, why: str) -> Decision:
    """Two workers have no link, and both are there: no rank is to blame."""
    text = f"{worker} has no link to {peer}: {why}; no rank is known to be lost"
    return Decision(Cause.LINK_REFUSED, text)


def judge_abort(member: Member, reason: str, cause: Cause = Cause.ABORTED) -> Decision:
    """A rank ends the generation for all: because it wants to, or because of a failure of its own (`cause`)."""
    if cause in RANK_FAILURES:
        text = f"{member} cannot go on: {reason or 'no details given'}"
        return Decision(cause, text, (member.rank,), origin=member.rank)
    text = f"{member} aborted the group: {reason or 'no reason given'}"
    return Decision(Cause.ABORTED, text, (member.rank,), origin=member.rank)


def judge_departure(members: Sequence[Member], last: int | None, did: str = "") -> Decision:
    """Ranks have left in order, or their programs have ended.

    Args:
        last: the instance after which: -1 where it is none, None where that is not known.
        did: what the only one of them did last, as `last_call_text` says it.
    """
    when = "" if last is None else f" after instance {last}" if last >= 0 else " before its first instance"
    ranks = tuple(member.rank for member in members)
    text = f"{members_text(members)} left the group{when}{f'; it last did {did}' if did else ''}"
    return Decision(Cause.LEFT, text, ranks, origin=ranks[0] if len(ranks) == 1 else None)


def judge_exhaustion(member: Member, details: str) -> Decision:
    text = f"{member} has no memory left: {details or 'no details given'}"
    return Decision(Cause.EXHAUSTED, text, (member.rank,), origin=member.rank)


def judge_overdue(member: Member, operation: str, timeout: float, peer: int, absent: str) -> Decision:
    """A send or recv of `member` whose other end, rank `peer`, did not come in time; `absent` says so of that."""
    text = f"{operation} on {member} did not complete within {format_seconds(timeout)}: {absent}"
    return Decision(Cause.DEADLINE, text, (peer,))


def judge_unclaimed(member: Member, peer: Member, details: str) -> Decision:
    """Unclaimed messages of `peer` have used up the memory for such messages."""
    text = f"there is no memory for what {peer} has sent to {member}, which has not received it: {details}"
    return Decision(Cause.EXHAUSTED, text, (peer.rank,), origin=peer.rank)


def judge_nccl_failure(
    what: str, reports: Sequence[tuple[str, Sequence[Member], str]], lost: Sequence[Member]
) -> Decision:
    """Name lost ranks alone: a failure of NCCL at one end does not say that it is at fault, nor the other.

    Args:
        reports: a worker, its ranks and the message of NCCL there, in order of time.
    """
    return Decision(Cause.NATIVE, nccl_failure_text(what, reports, lost), tuple(member.rank for member in lost))


def judge_expiry(
    what: str, timeout: float, absent: Mapping[int, str], present: str, sites: Mapping[int, str]
) -> Decision:
    """A deadline has passed.

    Args:
        absent: of each rank that has not come, a sentence that says so.
        present: the sentence where no rank is known to be missing.
        sites: of each rank that waits, where.
    """
    text = expired_text(what, timeout, list(absent.values()) or [present], sites)
    return Decision(Cause.DEADLINE, text, tuple(absent))


def judge_mismatch(what: str, arrived: Mapping[int, RankPosition], details: str, size: int) -> Decision:
    """Name the ranks that submitted another collective than the majority, by the contracts that are known.

    Where those of the `size` ranks that have not come decide the majority, all that have come are named.

    Args:
        details: what is wrong with a collective, though all may have submitted the same; '' where nothing is.
    """
    us, others = split_majority(arrived) if arrived else ([], [])
    if not others:
        side = f"\n  {_describe_side(us, _representative(us, arrived))}" if details and us else ""
        return Decision(Cause.MISMATCH, f"{what}: {details or 'the ranks differ in what they submitted'}{side}")
    if is_majority_undecided(us, others, size):
        what += f"; {len(arrived)} of {size} ranks have come, so that it is not known which of these are mistaken"
        differing = tuple(sorted(arrived))
    else:
        differing = tuple(sorted(rank for side in others for rank in side))
    text = _mismatch_text(what, arrived, us, others)
    return Decision(Cause.MISMATCH, text, (), differing, differing[0] if len(differing) == 1 else None)


def is_majority_undecided(us: Sequence[int], others: Sequence[Sequence[int]], size: int) -> bool:
    """Whether contracts differ, no side has most of the ranks yet, and some rank has not come."""
    return bool(others) and len(us) + sum(map(len, others)) < size and 2 * len(us) <= size


def split_majority(arrived: Mapping[int, RankPosition]) -> tuple[list[int], list[list[int]]]:
    """Ranks of the majority's contract, then those of each other one; a tie goes to the side of the lowest rank.

    Ranks that take what comes are with the first side with which they can be.
    """
    sides: dict[bytes, list[int]] = {}
    for rank in sorted(arrived, key=lambda rank: (_accepts_any_value(arrived[rank]), rank)):
        contract = arrived[rank].contract
        if _accepts_any_value(arrived[rank]):
            contract = next(
                (side for side, ranks in sides.items() if _is_compatible(arrived[rank], arrived[ranks[0]])), contract
            )
        insort(sides.setdefault(contract, []), rank)
    ordered = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    return ordered[0], ordered[1:]


def _accepts_any_value(position: RankPosition) -> bool:
    return position.collective is not None and position.collective.open


def _is_compatible(position: RankPosition, other: RankPosition) -> bool:
    """Whether a rank that takes what comes can be with another, whose value may be too large to have been described."""
    theirs, ours = position.collective, other.collective
    if theirs is None or ours is None:
        return position.op == other.op
    return theirs.open_contract() == ours.open_contract()


def _mismatch_text(what: str, arrived: Mapping[int, RankPosition], us: list[int], others: list[list[int]]) -> str:
    """The ranks that differ from the majority and where, then both sides in full with their source lines."""
    first = _representative(us, arrived)
    sentences = []
    for them in others[:MAX_NAMED]:
        verb = "differs" if len(them) == 1 else "differ"
        sentences.append(f"{ranks_text(them)} {verb}: {_difference_text(_representative(them, arrived), first, us)}")
    if len(others) > MAX_NAMED:
        sentences.append(f"{sum(map(len, others[MAX_NAMED:]))} more ranks differ in other ways")
    sides = [f"\n  {_describe_side(ranks, _representative(ranks, arrived))}" for ranks in [*others[:MAX_NAMED], us]]
    return f"{'; '.join(sentences)} ({what}){''.join(sides)}"


def _representative(ranks: Sequence[int], arrived: Mapping[int, RankPosition]) -> RankPosition:
    """The first of a side that says what its value is."""
    return next((arrived[rank] for rank in ranks if not _accepts_any_value(arrived[rank])), arrived[ranks[0]])


def _difference_text(theirs: RankPosition, ours: RankPosition, us: list[int]) -> str:
    found = find_difference(theirs.collective, ours.collective) if theirs.collective and ours.collective else None
    if found is None:
        return f"{theirs.op or 'another collective'} there, {ours.op or 'another collective'} on {ranks_text(us)}"
    return f"{found.where} is {found.theirs} there, {found.ours} on {ranks_text(us)}"


def _describe_side(ranks: list[int], position: RankPosition) -> str:
    site = position.site or (position.collective.site if position.collective else "")
    what = describe_collective(position.collective) if position.collective else position.op or "unknown"
    return f"{ranks_text(ranks)}{f' at {site}' if site else ''}: {what}"
