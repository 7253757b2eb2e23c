"""The words of errors and warnings that name ranks: their names and places, their last calls, and waiting ranks.

The coordinator speaks so in its verdicts, and a worker in those that it must make alone.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from collectived_proto.types import ANY_SOURCE, Member, RankPosition, unscoped_name

MAX_NAMED = 4  # this many are named in full; of more, the number
FRESH_SECONDS = 1.0  # older reports are shown with their age


def format_seconds(value: float) -> str:
    """`10.0 s`, `0.05 s`"""
    return f"{float(f'{value:.4g}')} s"


def format_duration(value: float) -> str:
    """A length of time in words: `0.4 s`, `3 min 20 s`, `2 h 5 min`."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def pluralize(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`"""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def numbers_text(numbers: Iterable[int]) -> str:
    """`0, 1, 3`, `0-7, 9`; `-` for none"""
    runs: list[list[int]] = []
    for rank in sorted(numbers):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > MAX_NAMED else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts) or "-"


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0, 1, 3`, `ranks 0-7, 9`"""
    ranks = tuple(ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers_text(ranks)}"


def peer_label(peer: int) -> int | str:
    """2, or `any`: the rank at the other end of a send or recv"""
    return "any" if peer == ANY_SOURCE else peer


def peer_text(peer: int) -> str:
    """`rank 2`, or `any rank`: the other end of a send or recv"""
    return "any rank" if peer == ANY_SOURCE else f"rank {peer}"


def members_text(members: Sequence[Member]) -> str:
    return names_text([str(member) for member in members])


def names_text(names: Sequence[str]) -> str:
    """`node1, node2, … and 60 more`"""
    more = len(names) - MAX_NAMED
    return f"{', '.join(names[:MAX_NAMED])} and {more} more" if more > 0 else ", ".join(names)


def is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"


def short_worker_names(names: str) -> str:
    """`worker 0` for `/job:worker/task:0`, of all workers that a text names."""
    return names.replace("/job:worker/task:", "worker ")


def collective_text(instance: int, op: str, name: str) -> str:
    """`all_reduce(sum) #17 of group 'train'`"""
    return f"{op or 'collective'} #{instance} of group {unscoped_name(name)!r}"


def last_call_text(position: RankPosition | None) -> str:
    """`all_reduce(sum) #16 at train.py:88`"""
    if position is None or position.submitted < 0:
        return ""
    site = f" at {position.last_site}" if position.last_site else ""
    return f"{position.last_op or 'collective'} #{position.submitted}{site}"


def age_text(age: float) -> str:
    """`, as of 3.2 s ago`; nothing where that is news. `age` in seconds."""
    return f", as of {age:.1f} s ago" if age > FRESH_SECONDS else ""


def stack_text(stack: str) -> str:
    """`; now: data.py:88 in load_batch <- train.py:12 in main`, of the first thread; nothing where nothing is known."""
    return f"; now: {stack.splitlines()[0]}" if stack else ""


def not_arrived_text(member: Member, position: RankPosition | None, silent: str = "", age: float = 0.0) -> str:
    """`rank 2 (…) has not come; it last did …`; `silent` says why nothing newer is known of its worker."""
    did = last_call_text(position)
    known = f"it last did {did}" if did else "it has not submitted anything in this group"
    doing = stack_text(position.stack) if position else ""
    return f"{member} has not come; {known}{age_text(age)}{doing}{f' ({silent})' if silent else ''}"


def still_missing_text(ranks: Sequence[int], position: RankPosition | None) -> str:
    """`rank 2 has still not come; now: …`, of ranks that were described before; `position`: of the only one."""
    has = "has" if len(ranks) == 1 else "have"
    return f"{ranks_text(ranks)} {has} still not come{stack_text(position.stack) if position else ''}"


def not_written_text(member: Member, position: RankPosition) -> str:
    """`rank 2 (…) has called it at train.py:88, and its GPU has not written the value`"""
    site = f" at {position.site}" if position.site else ""
    return f"{member} has called it{site}, and its GPU has not written the value"


def history_text(position: RankPosition, age: float = 0.0) -> str:
    """`last finished #16, last did all_reduce(sum) #17 at train.py:88, as of 3.2 s ago`"""
    did = last_call_text(position)
    if not did:
        return f"had submitted nothing{age_text(age)}"
    finished = f"#{position.finished}" if position.finished >= 0 else "nothing"
    return f"last finished {finished}, last did {did}{age_text(age)}"


def lost_text(members: Sequence[Member], why: str, histories: Mapping[int, str]) -> str:
    """`rank 2 (…) is lost: its process ended (last finished #16, last did …)`; `histories` by rank, where known."""
    ranks: dict[str, list[int]] = {}
    for member in members:
        if member.rank in histories:
            ranks.setdefault(histories[member.rank], []).append(member.rank)
    told = [text if len(members) == 1 else f"{ranks_text(those)} {text}" for text, those in ranks.items()]
    if len(told) > MAX_NAMED:
        told = [*told[:MAX_NAMED], f"{len(told) - MAX_NAMED} more places"]
    known = f" ({'; '.join(told)})" if told else ""
    return f"{members_text(members)} {is_or_are(len(members))} lost: {why}{known}"


def waiting_text(sites: Mapping[int, str]) -> str:
    """`ranks 0, 1, 3 are waiting at train.py:88`, from rank -> site."""
    by_site: dict[str, list[int]] = {}
    for rank in sorted(sites):
        by_site.setdefault(sites[rank], []).append(rank)
    parts = [
        f"{ranks_text(ranks)} {is_or_are(len(ranks))} waiting{f' at {site}' if site else ''}"
        for site, ranks in by_site.items()
    ]
    if len(parts) > MAX_NAMED:
        parts = [*parts[:MAX_NAMED], f"{len(parts) - MAX_NAMED} more places"]
    return ", ".join(parts)


def expired_text(what: str, timeout_seconds: float, absent: Sequence[str], sites: Mapping[int, str]) -> str:
    """The text of a deadline that passed while ranks had not come; `absent` are sentences of `not_arrived_text`."""
    named = list(absent[:MAX_NAMED])
    if len(absent) > MAX_NAMED:
        named.append(f"{len(absent) - MAX_NAMED} more ranks have not come")
    waiting = waiting_text(sites)
    return "; ".join(
        [
            f"{what} did not complete within {format_seconds(timeout_seconds)}: {named[0]}",
            *named[1:],
            *([waiting] * bool(waiting)),
        ]
    )


def nccl_failure_text(what: str, reports: Sequence[tuple[str, Sequence[Member], str]], lost: Sequence[Member]) -> str:
    """The text of a failure of NCCL, which does not name a culprit.

    Args:
        reports: a worker, its ranks and the message of NCCL there, in order of time.
        lost: the ranks that are known to be lost.
    """
    places = [f"on {worker}, of {members_text(members)}, {said}" for worker, members, said in reports[:MAX_NAMED]]
    if len(reports) > MAX_NAMED:
        places.append(f"NCCL failed on {len(reports) - MAX_NAMED} more workers")
    known = (
        f"{members_text(lost)} {is_or_are(len(lost))} lost" if lost else "no member of the group is known to be lost"
    )
    return f"{what} failed: {'; '.join([*places, known])}"


def sanitize_text(text: str) -> str:
    """Without what would steer a terminal: names and messages are made by others. Line breaks stay."""
    return text if text.isascii() and text.isprintable() else "".join(map(_replace_control, text))


def _replace_control(character: str) -> str:
    return "\N{REPLACEMENT CHARACTER}" if character != "\n" and _is_control(character) else character


def find_control_character(text: str) -> str:
    """The first character that would steer a terminal, or begin another line; '' if there is none."""
    return "" if text.isascii() and text.isprintable() else next(filter(_is_control, text), "")


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
