"""The sentences of verdicts and progress: what failed or waits, why, and how ranks differ."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence

from collectived_proto.types import Member, RankPosition
from collectived_proto.wording import NAMED, members_text, ranks_text, seconds, span, waiting_text
from collectived_runtime.coordinator.differences import describe, difference


def microseconds(value: float) -> str:
    """`25 us`, from seconds"""
    return f"{value * 1e6:.3g} us"


def bandwidth(value: float) -> str:
    """`125 MB/s`, from bytes per second"""
    return f"{value / 1e6:.4g} MB/s"


def unfinished_text(what: str, timeout_seconds: float, unfinished: Iterable[int], sites: Mapping[int, str]) -> str:
    """The text of a deadline that passed although every rank had come."""
    ranks = list(unfinished)
    return (
        f"{what} did not complete within {seconds(timeout_seconds)}: all ranks have come and data was still moving; "
        f"{ranks_text(ranks)} had not finished; {waiting_text({rank: sites.get(rank, '') for rank in ranks})}"
    )


def pending_text(what: str, waited: float, absent: Sequence[str], sites: Mapping[int, str]) -> str:
    named = "; ".join(absent[:NAMED])
    more = f"; {len(absent) - NAMED} more ranks have not come" if len(absent) > NAMED else ""
    waiting = waiting_text(sites)
    return f"{what} has waited for {span(waited)}: {named}{more}{f'; {waiting}' if waiting else ''}"


def majority(arrived: Mapping[int, RankPosition]) -> tuple[list[int], list[list[int]]]:
    """Ranks of the majority's contract, then those of each other one; a tie goes to the side of the lowest rank.

    Ranks that take what comes are with the first side with which they can be.
    """
    sides: dict[bytes, list[int]] = {}
    for rank in sorted(arrived, key=lambda rank: (_takes_what_comes(arrived[rank]), rank)):
        contract = arrived[rank].contract
        if _takes_what_comes(arrived[rank]):
            contract = next(
                (side for side, ranks in sides.items() if _fits(arrived[rank], arrived[ranks[0]])), contract
            )
        insort(sides.setdefault(contract, []), rank)
    ordered = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    return ordered[0], ordered[1:]


def _takes_what_comes(position: RankPosition) -> bool:
    return position.collective is not None and position.collective.open


def _fits(position: RankPosition, other: RankPosition) -> bool:
    theirs, ours = position.collective, other.collective
    return theirs is not None and ours is not None and theirs.terms() == ours.terms()


def mismatch_text(what: str, arrived: Mapping[int, RankPosition], us: list[int], others: list[list[int]]) -> str:
    """Who differs from the majority and where, then both sides in full with their source lines."""
    first = _speaker(us, arrived)
    sentences = []
    for them in others[:NAMED]:
        verb = "differs" if len(them) == 1 else "differ"
        sentences.append(f"{ranks_text(them)} {verb}: {_difference_text(_speaker(them, arrived), first, us)}")
    if len(others) > NAMED:
        sentences.append(f"{sum(map(len, others[NAMED:]))} more ranks differ in other ways")
    sides = [f"\n  {_side(ranks, _speaker(ranks, arrived))}" for ranks in [*others[:NAMED], us]]
    return f"{'; '.join(sentences)} ({what}){''.join(sides)}"


def _speaker(ranks: Sequence[int], arrived: Mapping[int, RankPosition]) -> RankPosition:
    """The first of a side that says what its value is."""
    return next((arrived[rank] for rank in ranks if not _takes_what_comes(arrived[rank])), arrived[ranks[0]])


def _difference_text(theirs: RankPosition, ours: RankPosition, us: list[int]) -> str:
    found = difference(theirs.collective, ours.collective) if theirs.collective and ours.collective else None
    if found is None:
        return f"{theirs.op or 'another collective'} there, {ours.op or 'another collective'} on {ranks_text(us)}"
    return f"{found.where} is {found.there} there, {found.here} on {ranks_text(us)}"


def _side(ranks: list[int], position: RankPosition) -> str:
    site = position.site or (position.collective.site if position.collective else "")
    what = describe(position.collective) if position.collective else position.op or "unknown"
    return f"{ranks_text(ranks)}{f' at {site}' if site else ''}: {what}"


def progress_text(present: int, low: int, high: int, settling: bool) -> str:
    """`3 of 4 ranks here, waiting for 1 more`"""
    if low == high:
        return f"{present} of {high} ranks here, waiting for {high - present} more"
    if settling:
        return f"{present} of {low} to {high} ranks here, enough; waiting a while for up to {high - present} more"
    return f"{present} of {low} to {high} ranks here, waiting for at least {low - present} more"


def elsewhere_text(members: Sequence[Member]) -> str:
    """Who still lives in the previous generation."""
    verb = "lives" if len(members) == 1 else "live"
    return f"{members_text(members)} still {verb} in the previous generation"
