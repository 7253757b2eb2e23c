"""Findings, made from a `StatusReply`, sorted by what a reader who looks for trouble needs first.

Pure: a reply in, sentences out. `collectived status`, `collectived top` and the coordinator's web page all begin with
these, so that they say the same about the same moment.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from collectived_proto.codec import member_from_proto, versions_from_proto
from collectived_proto.errors import Code
from collectived_proto.report.labels import (
    SLOW_SECONDS,
    STALLED_SECONDS,
    WorkerState,
    list_client_versions,
    worker_state,
)
from collectived_proto.report.phrases import (
    MAX_NAMED,
    format_duration,
    names_text,
    numbers_text,
    peer_text,
    ranks_text,
    stack_text,
)
from collectived_proto.report.quantities import format_bytes
from collectived_proto.types import ANY_SOURCE, Member, unscoped_name
from collectived_proto.v1 import status_pb2 as pb
from collectived_proto.version import VersionRange

RECENT_SECONDS = 600.0  # a failure is news for so long
# Limits that are shown only to the caller that met them. MEMORY says when memory is scarce.
PRIVATE_LIMITS = ("memory", "session_memory", "session_gpu_memory")
NEARLY_FULL = 0.9  # of its limit: memory that is nearly used up


class FindingKind(enum.Enum):
    """The kinds of findings, in the order in which they are shown."""

    INCOMPLETE = "warning"  # something is missing from the answer: all that follows is to be read so
    MISSING = "waiting"  # ranks that others wait for
    STALLED = "stalled"  # all are here, and nothing comes of it
    LOST = "lost"  # a worker
    RESTARTED = "restarted"  # the coordinator, not long ago
    FAILED = "failed"  # a generation of a group, not long ago
    MEMORY = "memory"  # nearly used up
    LIMIT = "limit"  # met not long ago: a request was refused
    VERSIONS = "versions"  # that differ
    INSECURE = "insecure"  # every process that can connect to a daemon may do everything
    HINT = "note"  # a hint that is not followed


class Severity(enum.IntEnum):
    NOTE = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True, slots=True)
class StatusFinding:
    """One thing that is wrong.

    Attributes:
        sentence: for people; without the kind, which stands beside it. May have several lines.
        group: its name as its users know it, '' where this is about none. generation: of it; 0 while it forms.
        worker: its task, None where this is about none.
        age_seconds: seconds before the answer was made; None where that is not known.
        ranks: that are waited for.
    """

    kind: FindingKind
    severity: Severity
    sentence: str
    group: str = ""
    generation: int = 0
    worker: int | None = None
    age_seconds: float | None = None
    ranks: tuple[int, ...] = ()


def collect_findings(reply: pb.StatusReply) -> list[StatusFinding]:
    """Everything that is wrong: by kind in the order of `FindingKind`, then the worse, then what lasts longest.

    Failures, of which the latest matters most, come latest first.
    """
    found = [
        *(StatusFinding(FindingKind.INCOMPLETE, Severity.WARNING, text) for text in reply.warnings),
        *(finding for group in reply.groups for finding in _find_waiting(reply, group)),
        *_find_lost_workers(reply),
        *_find_restart(reply.coordinator),
        *_find_failures(reply),
        *_find_low_memory(reply.workers),
        *_find_limits_met(reply.workers),
        *_find_version_differences(reply),
        *_find_insecure(reply),
        *(finding for group in reply.groups for finding in _find_ignored_hints(reply, group)),
    ]
    place = {kind: number for number, kind in enumerate(FindingKind)}
    return sorted(found, key=lambda finding: (place[finding.kind], -finding.severity, _age_sort_key(finding)))


def _age_sort_key(finding: StatusFinding) -> float:
    since = finding.age_seconds or 0.0
    return since if finding.kind is FindingKind.FAILED else -since


def short_group_name(reply: pb.StatusReply, name: str) -> str:
    """A group as those who asked know it: "world" instead of "job/world", but "other/world" for that of another job."""
    job = reply.coordinator.job
    return name.removeprefix(f"{job}/") if job else unscoped_name(name)


def code_name(code: int) -> str:
    """`DEADLINE_EXCEEDED`"""
    return Code(code).name if code in set(Code) else f"code {code}"


# Ranks that others wait for


def _find_waiting(reply: pb.StatusReply, group: pb.GroupStatus) -> Iterator[StatusFinding]:
    name = short_group_name(reply, group.name)
    if group.waiting_for:
        yield StatusFinding(
            FindingKind.MISSING,
            Severity.WARNING,
            f"group {name} {_forming_text(group.forming_seconds)}: {group.waiting_for}",
            name,
            age_seconds=group.forming_seconds,
        )
    if group.idle:  # where waiting is normal it is no trouble
        return
    told = f"group {name}"
    waiting = [flight for flight in group.in_flight if flight.seconds > SLOW_SECONDS and flight.missing]
    if waiting:  # later ones wait for the first
        first = waiting[0]
        more = f"; {len(waiting) - 1} more wait behind it" if len(waiting) > 1 else ""
        sentence = (
            f"{told}: {_collective_text(first)} has waited {format_duration(first.seconds)} for "
            f"{_missing_text(reply, group, first)}{more}"
        )
        ranks = tuple(first.missing)
        yield StatusFinding(
            FindingKind.MISSING,
            Severity.ERROR,
            sentence,
            name,
            group.generation,
            age_seconds=first.seconds,
            ranks=ranks,
        )
    for flight in group.in_flight:
        if flight.state == "running" and flight.seconds > STALLED_SECONDS and not flight.missing:
            sentence = (
                f"{told}: {_collective_text(flight)} has run for "
                f"{format_duration(flight.seconds)}{_progress_text(group, flight)}"
            )
            yield StatusFinding(
                FindingKind.STALLED, Severity.ERROR, sentence, name, group.generation, age_seconds=flight.seconds
            )
    for post in group.posts:
        if post.seconds > SLOW_SECONDS:
            awaited = () if post.peer == ANY_SOURCE else (post.peer,)
            sentence = (
                f"{told}: {post.op} of rank {post.rank}{_site_text(post.site)} has waited "
                f"{format_duration(post.seconds)} for "
                f"{_missing_rank_text(reply, group, post.peer) if awaited else peer_text(post.peer)}"
            )
            yield StatusFinding(
                FindingKind.MISSING,
                Severity.ERROR,
                sentence,
                name,
                group.generation,
                age_seconds=post.seconds,
                ranks=awaited,
            )


def _forming_text(seconds: float) -> str:
    return f"has been forming for {format_duration(seconds)}" if seconds >= SLOW_SECONDS else "is forming"


def _site_text(site: str) -> str:
    return f" at {site}" if site else ""


def _collective_text(flight: pb.InFlight) -> str:
    return f"{flight.op} #{flight.instance}{_site_text(flight.site)}"


def _progress_text(group: pb.GroupStatus, flight: pb.InFlight) -> str:
    here = "all ranks have come" if group.state != "partial" else "all ranks of this worker have come"
    packs = f", {flight.packs_done} of {flight.packs} packs are done" if flight.packs else ""
    return f": {here}{packs}{f' ({flight.algorithm})' if flight.algorithm else ''}"


def _missing_text(reply: pb.StatusReply, group: pb.GroupStatus, flight: pb.InFlight) -> str:
    """The ranks that have not come: a few in full, of more the numbers."""
    missing = sorted(flight.missing)
    if len(missing) <= MAX_NAMED:
        return "; ".join(_missing_rank_text(reply, group, rank, flight.instance) for rank in missing)
    named = "; ".join(_missing_rank_text(reply, group, rank, flight.instance) for rank in missing[: MAX_NAMED - 1])
    return f"{named}; and {len(missing) - MAX_NAMED + 1} more: {ranks_text(missing[MAX_NAMED - 1 :])}"


def _missing_rank_text(reply: pb.StatusReply, group: pb.GroupStatus, rank: int, instance: int | None = None) -> str:
    """`rank 2 (host a, pid 71, …), which last called all_reduce(sum) #6 at train.py:88, 2.5 s ago`"""
    message = next((member for member in group.members if member.rank == rank), None)
    if message is None:
        return f"rank {rank}"
    member = member_from_proto(message)
    gone = {one.rank for one in group.left}
    state = " has left" if rank in gone else _worker_state_text(reply, member.worker)
    return f"{member}{_last_call_text(member, instance)}{stack_text(member.stack)}{state}"


def _last_call_text(member: Member, instance: int | None) -> str:
    if not member.last_op:
        return "" if not member.idle_seconds else ", which has called no collective in this group yet"
    # The instance that it finished last is its last call, unless more of its calls are under way.
    number = f" #{member.last_instance}" if instance is not None and member.last_instance == instance - 1 else ""
    return (
        f", which last called {member.last_op}{number}{_site_text(member.last_site)}, "
        f"{format_duration(member.idle_seconds)} ago"
    )


def _worker_state_text(reply: pb.StatusReply, task: int) -> str:
    worker = next((worker for worker in reply.workers if worker.task == task), None)
    match worker and worker_state(worker):
        case WorkerState.LOST:
            return f" (worker {task} is lost)"
        case WorkerState.SILENT:
            return f" (worker {task} does not answer: this is old)"
    return ""


def _find_restart(coordinator: pb.CoordinatorStatus) -> Iterator[StatusFinding]:
    age = coordinator.uptime_seconds
    if coordinator.restarted and age <= RECENT_SECONDS:
        sentence = f"the coordinator was started again {format_duration(age)} ago; its counts begin there"
        yield StatusFinding(FindingKind.RESTARTED, Severity.NOTE, sentence, age_seconds=age)


# Workers


def _find_lost_workers(reply: pb.StatusReply) -> Iterator[StatusFinding]:
    """Only the coordinator knows: a worker that answers for itself without it is there."""
    for worker in reply.workers:
        if worker_state(worker) is WorkerState.LOST:
            age = worker.last_heartbeat_seconds
            sentence = (
                f"worker {worker.task} (host {worker.host}, pid {worker.pid}) last reported {format_duration(age)} ago"
            )
            yield StatusFinding(FindingKind.LOST, Severity.ERROR, sentence, worker=worker.task, age_seconds=age)


def _find_low_memory(workers: Iterable[pb.WorkerStatus]) -> Iterator[StatusFinding]:
    for worker in workers:
        limit = worker.arena_limit_bytes
        if limit and worker.arena_bytes >= NEARLY_FULL * limit:
            sentence = (
                f"worker {worker.task} (host {worker.host}) has used "
                f"{format_bytes(worker.arena_bytes)} of {format_bytes(limit)} for "
                "shared memory: ranks that ask for more are refused"
            )
            yield StatusFinding(FindingKind.MEMORY, Severity.WARNING, sentence, worker=worker.task)


def _find_limits_met(workers: Iterable[pb.WorkerStatus]) -> Iterator[StatusFinding]:
    for worker in workers:
        for met in worker.limits_met:
            if met.last_seconds > RECENT_SECONDS or met.limit in PRIVATE_LIMITS:
                continue
            times = "once" if met.refused == 1 else f"{met.refused} times"
            name = met.limit.replace("_", " ")
            sentence = (
                f"worker {worker.task} (host {worker.host}) has met its limit of {name} {times}, the last "
                f"{format_duration(met.last_seconds)} ago: a request was refused"
            )
            yield StatusFinding(
                FindingKind.LIMIT, Severity.WARNING, sentence, worker=worker.task, age_seconds=met.last_seconds
            )


def _find_version_differences(reply: pb.StatusReply) -> Iterator[StatusFinding]:
    who: dict[VersionRange, list[str]] = {}
    if reply.coordinator.release:
        who[_daemon_versions(reply.coordinator)] = ["the coordinator"]
    workers: dict[VersionRange, list[int]] = {}
    clients: dict[VersionRange, list[int]] = {}
    for worker in reply.workers:
        if worker.release:
            workers.setdefault(_daemon_versions(worker), []).append(worker.task)
        for versions in list_client_versions(worker):
            if versions.release:  # of a client in another language there is none
                clients.setdefault(versions, []).append(worker.task)
    _add_speakers(who, workers, "worker")
    _add_speakers(who, clients, "clients of worker")
    if len(who) > 1:
        protocols = len({(versions.lowest, versions.highest) for versions in who}) > 1
        told = "; ".join(
            f"{_version_text(versions, protocols)}: {', '.join(names)}"
            for versions, names in sorted(who.items(), key=_version_sort_key)
        )
        yield StatusFinding(FindingKind.VERSIONS, Severity.WARNING, f"releases differ: {told}")


def _daemon_versions(daemon: pb.CoordinatorStatus | pb.WorkerStatus) -> VersionRange:
    """The protocol versions of a daemon; the first version if it reports its release alone."""
    return replace(versions_from_proto(daemon.protocol), release=daemon.release)


def _version_text(versions: VersionRange, protocols: bool) -> str:
    """Return the release alone where all speak the same protocol."""
    return f"{versions.release} (protocol {versions.protocol_text})" if protocols else versions.release


def _version_sort_key(one: tuple[VersionRange, object]) -> tuple[str, VersionRange]:
    return one[0].release, one[0]


def _add_speakers(who: dict[VersionRange, list[str]], tasks: Mapping[VersionRange, Sequence[int]], what: str) -> None:
    for versions, those in tasks.items():
        who.setdefault(versions, []).append(f"{what}{'s' if len(those) > 1 else ''} {numbers_text(those)}")


# Ended generations, and hints that are not followed


def _find_failures(reply: pb.StatusReply) -> Iterator[StatusFinding]:
    """Failures of the last minutes; one whose group runs again is only worth a warning."""
    runs = {group.name: group.generation for group in reply.groups if group.state in ("ready", "draining")}
    for failure in reply.failures:
        verdict = failure.verdict
        ago = max(0.0, reply.unix_time - failure.unix_time)
        if ago > RECENT_SECONDS:
            continue
        name = short_group_name(reply, verdict.group)
        successor = runs.get(verdict.group, 0)
        again = " (the group runs again)" if successor > verdict.generation else ""
        yield StatusFinding(
            FindingKind.FAILED,
            Severity.WARNING if again else Severity.ERROR,
            f"group {name}, {format_duration(ago)} ago{again}: {code_name(verdict.code)}: {verdict.message}",
            name,
            verdict.generation,
            age_seconds=ago,
            ranks=tuple(member.rank for member in (*verdict.missing, *verdict.differing)),
        )


def _find_insecure(reply: pb.StatusReply) -> Iterator[StatusFinding]:
    who = ["the coordinator"] if reply.coordinator.insecure else []
    who += [f"worker {worker.task} (host {worker.host})" for worker in reply.workers if worker.insecure]
    if who:
        yield StatusFinding(
            FindingKind.INSECURE,
            Severity.WARNING,
            f"{names_text(who)}: any process that can connect to "
            f"{'it' if len(who) == 1 else 'them'} may do all (--insecure)",
        )


def _find_ignored_hints(reply: pb.StatusReply, group: pb.GroupStatus) -> Iterator[StatusFinding]:
    name = short_group_name(reply, group.name)
    for note in group.notes:
        yield StatusFinding(
            FindingKind.HINT,
            Severity.NOTE,
            f"group {name} is {note}",
            name,
            group.generation,
        )
