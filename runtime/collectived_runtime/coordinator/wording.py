"""The sentences of verdicts and progress: who, where, what they last did, and what is to be done."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence

from collectived_proto.types import Member, RankPosition, shown_name
from collectived_runtime.coordinator.differences import describe, difference

NAMED = 4  # this many are named in full; of more, the number


def seconds(value: float) -> str:
    """`10.0 s`, `0.05 s`"""
    return f"{float(f'{value:.4g}')} s"


def microseconds(value: float) -> str:
    """`25 us`, from seconds"""
    return f"{value * 1e6:.3g} us"


def bandwidth(value: float) -> str:
    """`125 MB/s`, from bytes per second"""
    return f"{value / 1e6:.4g} MB/s"


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0, 1, 3`, `ranks 0-7, 9`"""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > NAMED else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts)}"


def members_text(members: Sequence[Member]) -> str:
    named = ", ".join(str(member) for member in members[:NAMED])
    more = len(members) - NAMED
    return f"{named} and {more} more" if more > 0 else named


def be(count: int) -> str:
    return "is" if count == 1 else "are"


def subject(instance: int, op: str, name: str) -> str:
    """`all_reduce(sum) #17 of group 'train'`"""
    return f"{op or 'collective'} #{instance} of group {shown_name(name)!r}"


def last_did(position: RankPosition | None) -> str:
    """`all_reduce(sum) #16 at train.py:88`"""
    if position is None or position.submitted < 0:
        return ""
    site = f" at {position.last_site}" if position.last_site else ""
    return f"{position.last_op or 'collective'} #{position.submitted}{site}"


def waiting_text(sites: Mapping[int, str]) -> str:
    """`ranks 0, 1, 3 are waiting at train.py:88`, from rank -> site."""
    by_site: dict[str, list[int]] = {}
    for rank in sorted(sites):
        by_site.setdefault(sites[rank], []).append(rank)
    parts = [
        f"{ranks_text(ranks)} {be(len(ranks))} waiting{f' at {site}' if site else ''}"
        for site, ranks in by_site.items()
    ]
    if len(parts) > NAMED:
        parts = [*parts[:NAMED], f"{len(parts) - NAMED} more places"]
    return ", ".join(parts)


def not_come(member: Member, position: RankPosition | None, silent: str) -> str:
    """`rank 2 (…) has not come; it last did …`; `silent` says why nothing newer is known of its worker."""
    did = last_did(position)
    known = f"it last did {did}" if did else "it has not submitted anything in this group"
    return f"{member} has not come; {known}{f' ({silent})' if silent else ''}"


def expired_text(what: str, timeout_seconds: float, absent: Sequence[str], sites: Mapping[int, str]) -> str:
    """The text of a deadline that passed while ranks had not come; `absent` are sentences of `not_come`."""
    named = list(absent[:NAMED])
    if len(absent) > NAMED:
        named.append(f"{len(absent) - NAMED} more ranks have not come")
    waiting = waiting_text(sites)
    return "; ".join(
        [
            f"{what} did not complete within {seconds(timeout_seconds)}: {named[0]}",
            *named[1:],
            *([waiting] * bool(waiting)),
        ]
    )


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
    return f"{what} has waited for {seconds(waited)}: {named}{more}{f'; {waiting}' if waiting else ''}"


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
