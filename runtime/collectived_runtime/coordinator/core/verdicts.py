"""Judgement: from what is known about a generation to the verdict, as pure values.

*Silent* workers did not answer or are not connected; of their ranks only old news is known.

The sentences of verdicts and progress: what failed or waits, why, and how ranks differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from collectived_proto.cause import Cause
from collectived_proto.errors import CODE_BY_CAUSE
from collectived_proto.report.phrases import (
    MAX_NAMED,
    collective_text,
    format_duration,
    history_text,
    last_call_text,
    members_text,
    not_arrived_text,
    not_written_text,
    ranks_text,
    still_missing_text,
    waiting_text,
)
from collectived_proto.types import ANY_SOURCE, Member, RankPosition, Report, ReportKind, Verdict, unscoped_name
from collectived_runtime.coordinator.core.registry import Departure, GenerationRecord, Inquiry
from collectived_runtime.verdicts import decisions
from collectived_runtime.verdicts.decisions import Decision, split_majority


def make_verdict(
    generation: GenerationRecord, decision: Decision, from_instance: int, now: float, *, instance: int | None = None
) -> Verdict:
    """A verdict with every member's last position; `instance` is by default the first one running that it ends."""
    info = generation.info
    failing = find_first_running(generation, from_instance) if instance is None else instance
    members = decisions.bound_stacks(generation.members(now), decision.missing)
    return Verdict(
        info.name,
        info.key,
        info.generation,
        CODE_BY_CAUSE[decision.cause],
        decision.text,
        from_instance,
        instance=failing,
        op=describe_operation(generation, failing),
        missing=tuple(members[rank] for rank in decision.missing),
        differing=tuple(members[rank] for rank in decision.differing),
        members=members,
        cause=decision.cause,
        origin=decision.origin,
    )


def find_first_running(generation: GenerationRecord, from_instance: int) -> int:
    """The first instance from there on that some rank is known to have submitted and not finished; -1: none.

    A heartbeat's report of an instance says only that it ran then.
    """
    reported = [standing.position for standing in generation.progress.values() if standing.worker is None]
    least = max(from_instance, generation.first_instance)
    starts = [(max(least, position.finished + 1), position.submitted) for position in reported]
    running = [start for start, submitted in starts if start <= submitted]
    running += [
        instance for instance in generation.evidence if instance >= from_instance and _is_pending(generation, instance)
    ]
    return min(running, default=-1)


def _is_pending(generation: GenerationRecord, instance: int) -> bool:
    """Whether some rank had come to an instance, by its answer, and not finished it."""
    positions = generation.evidence[instance].positions.values()
    return any((position.arrived or position.contract) and position.finished < instance for position in positions)


def describe_operation(generation: GenerationRecord, instance: int) -> str:
    """The operation of an instance, where a rank that submitted it, or was about to, is known: `all_reduce(sum)`."""
    evidence = generation.evidence.get(instance)
    told = (position.op for position in evidence.positions.values()) if evidence else iter(())
    last = (s.position.last_op for s in generation.progress.values() if s.position.submitted == instance >= 0)
    return next(filter(None, told), "") or next(filter(None, last), "")


def judge(generation: GenerationRecord, inquiry: Inquiry, silent: Mapping[int, str], now: float) -> Verdict | None:
    """Judge by the answers; None where nothing has failed.

    Contracts that differ are the cause wherever they are known, for then waiting longer does not help.
    """
    if inquiry.kind is ReportKind.LINK:
        return _judge_link(generation, inquiry, silent, now)
    if inquiry.kind is ReportKind.NATIVE:
        return _judge_native(generation, inquiry, silent, now)
    mismatch = _judge_mismatch(generation, inquiry, now)
    if mismatch is not None or inquiry.kind is not ReportKind.EXPIRED:
        return mismatch
    return _judge_expiry(generation, inquiry, silent, now)


def is_majority_undecided(generation: GenerationRecord, instance: int) -> bool:
    """Whether ranks that have not come decide which ranks differ from most."""
    known = _known_contracts(generation, instance)
    return bool(known) and decisions.is_majority_undecided(*split_majority(known), generation.info.size)


def are_known_ranks_alike(generation: GenerationRecord, inquiry: Inquiry) -> bool:
    """Whether ranks differ, but none of those that are known does: a verdict would name none of them."""
    if inquiry.kind is not ReportKind.MISMATCH or inquiry.text:
        return False
    known = _known_contracts(generation, inquiry.instance)
    return not known or not split_majority(known)[1]


def _known_contracts(generation: GenerationRecord, instance: int) -> dict[int, RankPosition]:
    """The positions of ranks that have submitted a collective, or are about to."""
    evidence = generation.evidence.get(instance)
    positions = evidence.positions if evidence else {}
    return {rank: position for rank, position in positions.items() if position.contract}


def _judge_link(
    generation: GenerationRecord, inquiry: Inquiry, silent: Mapping[int, str], now: float
) -> Verdict | None:
    """A worker that refuses a link and answers here is not lost, nor is any of its ranks."""
    ranks = generation.active_ranks(inquiry.peer)
    if not ranks:
        return None
    if inquiry.is_refused and inquiry.peer not in silent:
        workers = {worker.task: worker for worker in generation.peers}
        decision = decisions.judge_refused_link(workers[inquiry.reporter], workers[inquiry.peer], inquiry.text)
    else:
        why = f"the link of worker {inquiry.reporter} to worker {inquiry.peer} broke: {inquiry.text}"
        decision = judge_lost(generation, ranks, Cause.LOST_LINK, why, now)
    return make_verdict(generation, decision, max(inquiry.instance, 0), now)


def _judge_native(generation: GenerationRecord, inquiry: Inquiry, silent: Mapping[int, str], now: float) -> Verdict:
    instance, ranks_of = inquiry.instance, generation.ranks_by_worker
    lost = sorted(rank for rank, how in generation.departed.items() if how is Departure.LOST)
    told = [
        (f"worker {task}", generation.members(now, ranks_of[task]), said)
        for task, said in inquiry.native_errors.items()
    ]
    decision = decisions.judge_nccl_failure(
        _describe_instance(generation, instance), told, generation.members(now, lost)
    )
    quiet = [why for task, why in sorted(silent.items()) if generation.active_ranks(task)]
    decision = replace(decision, text="; ".join([decision.text, *quiet[:MAX_NAMED]]))
    return make_verdict(generation, decision, instance, now, instance=instance)


def _judge_mismatch(generation: GenerationRecord, inquiry: Inquiry, now: float) -> Verdict | None:
    instance = inquiry.instance
    arrived = _known_contracts(generation, instance)
    us, others = split_majority(arrived) if arrived else ([], [])
    if not others and inquiry.kind is not ReportKind.MISMATCH:
        return None
    op = arrived[us[0]].op if us else describe_operation(generation, instance)
    decision = decisions.judge_mismatch(
        collective_text(instance, op, generation.info.name), arrived, inquiry.text, generation.info.size
    )
    return replace(make_verdict(generation, decision, instance, now, instance=instance), op=op)


def _judge_expiry(
    generation: GenerationRecord, inquiry: Inquiry, silent: Mapping[int, str], now: float
) -> Verdict | None:
    ranks = range(generation.info.size)
    if all(generation.last_finished(rank) >= inquiry.instance for rank in ranks):
        return None  # it was complete before the answers came
    # A rank that is missing because it still waits in an earlier instance gets the same verdict: it covers that one
    # too.
    standings = [(generation.last_submitted(rank), generation.last_finished(rank)) for rank in ranks]
    waited_in = [finished + 1 for submitted, finished in standings if finished < submitted < inquiry.instance]
    first = max(generation.first_instance, min([inquiry.instance, *waited_in]))
    # Where it waits for another rank, which has not come to that either, it is not to blame.
    blocked = any(submitted < first for submitted, _ in standings)
    instance = first if blocked else inquiry.instance
    missing = [rank for rank in ranks if not generation.has_submitted(rank, instance)]
    unfinished = [rank for rank in ranks if generation.last_finished(rank) < instance]
    what, sites = _describe_instance(generation, instance), _waiting_sites(generation, instance)
    absent = dict(zip(missing, _describe_missing(generation, missing, silent, now, instance), strict=True))
    present = f"all ranks have come and data was still moving; {ranks_text(unfinished)} had not finished"
    if not absent:
        sites = {rank: sites.get(rank, "") for rank in unfinished}
    decision = decisions.judge_expiry(what, inquiry.timeout_seconds, absent, present, sites)
    return make_verdict(generation, decision, first, now, instance=instance)


def judge_p2p(generation: GenerationRecord, report: Report, now: float) -> Verdict:
    """A send or recv whose other end did not come in time, or messages that no recv asks for."""
    member, peer = generation.member(report.rank, now), _peer_rank(generation, report)
    if report.kind is ReportKind.OVERDUE:
        absent = _describe_peer(generation, report, now)
        decision = decisions.judge_overdue(member, report.text, report.timeout_seconds, peer, absent)
    else:
        decision = decisions.judge_unclaimed(member, generation.member(peer, now), report.text)
    return make_verdict(generation, decision, 0, now)


def judge_departure(generation: GenerationRecord, rank: int, last: int | None, now: float) -> Decision:
    known = generation.progress.get(rank)
    did = last_call_text(known.position) if known and known.position.last_op else ""
    return decisions.judge_departure([generation.member(rank, now)], last, did)


def judge_lost_rank(generation: GenerationRecord, rank: int, why: str, now: float) -> Decision:
    known = generation.progress.get(rank)
    history = history_text(known.position, known.age(now)) if known else "its last call has not been reported"
    return decisions.judge_lost_rank(generation.member(rank, now), why, history)


def judge_lost(generation: GenerationRecord, ranks: Sequence[int], cause: Cause, why: str, now: float) -> Decision:
    """The ranks of workers that are lost, or to which a link is."""
    known = {rank: generation.progress[rank] for rank in ranks if rank in generation.progress}
    histories = {rank: history_text(one.position, one.age(now)) for rank, one in known.items()}
    if not histories and len(ranks) == 1:
        histories = {ranks[0]: "its last call has not been reported"}
    return decisions.judge_lost_workers(cause, generation.members(now, ranks), why, histories)


def p2p_wait_warning(generation: GenerationRecord, report: Report, now: float) -> str:
    """The warning that a send or recv waits for its other end."""
    what = f"group {unscoped_name(generation.info.name)!r}: {report.text} on {generation.member(report.rank, now)}"
    waited = f"{what} has waited for {format_duration(report.timeout_seconds)}"
    if report.peer == ANY_SOURCE:
        return f"{waited}: no rank has sent anything for it"
    return f"{waited}: {_describe_peer(generation, report, now)}"


def _describe_peer(generation: GenerationRecord, report: Report, now: float) -> str:
    peer = _peer_rank(generation, report)
    return _describe_absent_rank(generation, peer, "", now)


def _peer_rank(generation: GenerationRecord, report: Report) -> int:
    return report.peer if report.peer < generation.info.size else report.rank


def pending_warning(
    generation: GenerationRecord,
    instance: int,
    missing: Sequence[int],
    silent: Mapping[int, str],
    stall_seconds: float,
    now: float,
) -> str:
    """The warning that an instance waits for ranks; short where the last one named the same ranks."""
    evidence = generation.evidence[instance]
    what, waited = _describe_instance(generation, instance), stall_seconds + max(0.0, now - evidence.since)
    if evidence.warned_of == missing and not silent:
        known = generation.progress.get(missing[0]) if len(missing) == 1 else None
        return pending_text(what, waited, [still_missing_text(missing, known.position if known else None)], {})
    absent = _describe_missing(generation, missing, silent, now, instance)
    return pending_text(what, waited, absent, _waiting_sites(generation, instance))


def with_successor(decision: Verdict, successor: int) -> Verdict:
    """The same, with which the group goes on: all ranks number on from there, whatever they had submitted."""
    return replace(decision, successor=successor, next_instance=decision.from_instance + 1)


def _describe_instance(generation: GenerationRecord, instance: int) -> str:
    return collective_text(instance, describe_operation(generation, instance), generation.info.name)


def _describe_missing(
    generation: GenerationRecord, missing: Sequence[int], silent: Mapping[int, str], now: float, instance: int
) -> list[str]:
    members, evidence = generation.info.members, generation.evidence.get(instance)
    asked = evidence.positions if evidence else {}
    return [
        not_written_text(generation.member(rank, now), asked[rank])
        if rank in asked and asked[rank].contract
        else _describe_absent_rank(generation, rank, silent.get(members[rank].worker, ""), now)
        for rank in missing
    ]


def _describe_absent_rank(generation: GenerationRecord, rank: int, silent: str, now: float) -> str:
    member, standing = generation.member(rank, now), generation.progress.get(rank)
    return (
        not_arrived_text(member, standing.position, silent, standing.age(now))
        if standing
        else not_arrived_text(member, None, silent)
    )


def _waiting_sites(generation: GenerationRecord, instance: int) -> dict[int, str]:
    """Rank -> source line, of those that wait in this instance."""
    evidence = generation.evidence.get(instance)
    sites = {}
    for rank in range(generation.info.size):
        if generation.has_submitted(rank, instance) and generation.last_finished(rank) < instance:
            known = evidence.positions.get(rank) if evidence else None
            sites[rank] = _select_site(
                known, generation.progress[rank].position if rank in generation.progress else None, instance
            )
    return sites


def _select_site(asked: RankPosition | None, last: RankPosition | None, instance: int) -> str:
    if asked is not None and asked.arrived and asked.site:
        return asked.site
    return last.last_site if last is not None and last.submitted == instance else ""


def pending_text(what: str, waited: float, absent: Sequence[str], sites: Mapping[int, str]) -> str:
    named = "; ".join(absent[:MAX_NAMED])
    more = f"; {len(absent) - MAX_NAMED} more ranks have not come" if len(absent) > MAX_NAMED else ""
    waiting = waiting_text(sites)
    return f"{what} has waited for {format_duration(waited)}: {named}{more}{f'; {waiting}' if waiting else ''}"


def progress_text(present: int, low: int, high: int, settling: bool) -> str:
    """`3 of 4 ranks here, waiting for 1 more`"""
    if low == high:
        return f"{present} of {high} ranks here, waiting for {high - present} more"
    if settling:
        return f"{present} of {low} to {high} ranks here, enough; waiting a while for up to {high - present} more"
    return f"{present} of {low} to {high} ranks here, waiting for at least {low - present} more"


def previous_generation_text(members: Sequence[Member]) -> str:
    """Name the ranks that still live in the previous generation."""
    verb = "lives" if len(members) == 1 else "live"
    return f"{members_text(members)} still {verb} in the previous generation"
