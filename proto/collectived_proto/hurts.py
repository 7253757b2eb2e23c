"""What hurts, from a `StatusReply`: findings in the order in which somebody who looks for trouble wants to read them.

Pure: a reply in, sentences out. `collectived status`, `collectived top` and the coordinator's web page all begin with
these, so that they say the same about the same moment.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from collectived_proto.codec import member_from_proto, versions_from_proto
from collectived_proto.errors import Code
from collectived_proto.protocol import Versions
from collectived_proto.shown import SLOW_SECONDS, STALLED_SECONDS, WorkerState, clients_of, worker_state
from collectived_proto.types import Member, shown_name
from collectived_proto.v1 import status_pb2 as pb
from collectived_proto.wording import NAMED, ranks_text, span

RECENT_SECONDS = 600.0  # a failure is news for so long
NOBODY_HURT = (
    "memory",
    "session_memory",
    "session_gpu_memory",
)  # limits that only who asked is told of: MEMORY says when it is scarce
FULL = 0.9  # of its limit: memory that is nearly used up


class Trouble(enum.Enum):
    """What kind of thing hurts; in the order in which they are told."""

    ANSWER = "warning"  # something is missing from the answer: all that follows is to be read so
    MISSING = "waiting"  # ranks that others wait for
    STALLED = "stalled"  # all are here, and nothing comes of it
    LOST = "lost"  # a worker
    FAILED = "failed"  # a generation of a group, not long ago
    MEMORY = "memory"  # nearly used up
    LIMIT = "limit"  # met not long ago: somebody was refused
    VERSIONS = "versions"  # that differ
    OPEN = "insecure"  # whoever reaches a daemon may do everything
    HINT = "note"  # a hint that is not followed


class Severity(enum.IntEnum):
    NOTE = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that hurts.

    Attributes:
        sentence: for people; without the kind, which stands beside it. May have several lines.
        group: its name as its users know it, '' where this is about none. generation: of it; 0 while it forms.
        worker: its task, None where this is about none.
        since: seconds before the answer was made; None where that is not known.
        ranks: that are waited for.
    """

    kind: Trouble
    severity: Severity
    sentence: str
    group: str = ""
    generation: int = 0
    worker: int | None = None
    since: float | None = None
    ranks: tuple[int, ...] = ()


def findings(reply: pb.StatusReply) -> list[Finding]:
    """Everything that hurts: by kind in the order of `Trouble`, then the worse, then what lasts longest.

    Failures, of which the latest matters most, come latest first.
    """
    found = [
        *(Finding(Trouble.ANSWER, Severity.WARNING, text) for text in reply.warnings),
        *(finding for group in reply.groups for finding in _waiting(reply, group)),
        *_lost(reply),
        *_failed(reply),
        *_memory(reply.workers),
        *_limits(reply.workers),
        *_versions(reply),
        *_open(reply),
        *(finding for group in reply.groups for finding in _notes(reply, group)),
    ]
    place = {kind: number for number, kind in enumerate(Trouble)}
    return sorted(found, key=lambda finding: (place[finding.kind], -finding.severity, _age(finding)))


def _age(finding: Finding) -> float:
    since = finding.since or 0.0
    return since if finding.kind is Trouble.FAILED else -since


def short_name(reply: pb.StatusReply, name: str) -> str:
    """A group as those who asked know it: `world` instead of `job/world`, but `other/world` for that of another job."""
    job = reply.coordinator.job
    return name.removeprefix(f"{job}/") if job else shown_name(name)


def code_name(code: int) -> str:
    """`DEADLINE_EXCEEDED`"""
    return Code(code).name if code in set(Code) else f"code {code}"


def size(count: float) -> str:
    """Bytes in words: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


# Who is waited for


def _waiting(reply: pb.StatusReply, group: pb.GroupStatus) -> Iterator[Finding]:
    name = short_name(reply, group.name)
    if group.waiting_for:
        yield Finding(
            Trouble.MISSING,
            Severity.WARNING,
            f"group {name} {_forming(group.forming_seconds)}: {group.waiting_for}",
            name,
            since=group.forming_seconds,
        )
    if group.idle:  # where waiting is normal it is no trouble
        return
    told = f"group {name} generation {group.generation}"
    waiting = [flight for flight in group.in_flight if flight.seconds > SLOW_SECONDS and flight.missing]
    if waiting:  # later ones wait for the first
        first = waiting[0]
        more = f"; {len(waiting) - 1} more wait behind it" if len(waiting) > 1 else ""
        sentence = (
            f"{told}: {_subject(first)} has waited {span(first.seconds)} for {_absent(reply, group, first)}{more}"
        )
        ranks = tuple(first.missing)
        yield Finding(
            Trouble.MISSING, Severity.ERROR, sentence, name, group.generation, since=first.seconds, ranks=ranks
        )
    for flight in group.in_flight:
        if flight.state == "running" and flight.seconds > STALLED_SECONDS and not flight.missing:
            sentence = f"{told}: {_subject(flight)} has run for {span(flight.seconds)}{_so_far(group, flight)}"
            yield Finding(Trouble.STALLED, Severity.ERROR, sentence, name, group.generation, since=flight.seconds)
    for post in group.posts:
        if post.seconds > SLOW_SECONDS:
            sentence = (
                f"{told}: {post.op} of rank {post.rank}{_at(post.site)} has waited {span(post.seconds)} for "
                f"{_absentee(reply, group, post.peer)}"
            )
            yield Finding(
                Trouble.MISSING,
                Severity.ERROR,
                sentence,
                name,
                group.generation,
                since=post.seconds,
                ranks=(post.peer,),
            )


def _forming(seconds: float) -> str:
    return f"has been forming for {span(seconds)}" if seconds >= SLOW_SECONDS else "is forming"


def _at(site: str) -> str:
    return f" at {site}" if site else ""


def _subject(flight: pb.InFlight) -> str:
    return f"{flight.op} #{flight.instance}{_at(flight.site)}"


def _so_far(group: pb.GroupStatus, flight: pb.InFlight) -> str:
    here = "all ranks have come" if group.state != "partial" else "all ranks of this worker have come"
    packs = f", {flight.packs_done} of {flight.packs} packs are done" if flight.packs else ""
    return f": {here}{packs}{f' ({flight.algorithm})' if flight.algorithm else ''}"


def _absent(reply: pb.StatusReply, group: pb.GroupStatus, flight: pb.InFlight) -> str:
    """The ranks that have not come: a few in full, of more the numbers."""
    missing = sorted(flight.missing)
    if len(missing) <= NAMED:
        return "; ".join(_absentee(reply, group, rank, flight.instance) for rank in missing)
    named = "; ".join(_absentee(reply, group, rank, flight.instance) for rank in missing[: NAMED - 1])
    return f"{named}; and {len(missing) - NAMED + 1} more: {ranks_text(missing[NAMED - 1 :])}"


def _absentee(reply: pb.StatusReply, group: pb.GroupStatus, rank: int, instance: int | None = None) -> str:
    """`rank 2 (host a, pid 71, …), which last called all_reduce(sum) #6 at train.py:88, 2.5 s ago`"""
    message = next((member for member in group.members if member.rank == rank), None)
    if message is None:
        return f"rank {rank}"
    member = member_from_proto(message)
    gone = {one.rank for one in group.left}
    state = " has left" if rank in gone else _worker_state(reply, member.worker)
    return f"{member}{_last_call(member, instance)}{state}"


def _last_call(member: Member, instance: int | None) -> str:
    if not member.last_op:
        return "" if not member.idle_seconds else ", which has called nothing in this group yet"
    # What it has finished last is what it called last, unless more of its calls are under way.
    number = f" #{member.last_instance}" if instance is not None and member.last_instance == instance - 1 else ""
    return f", which last called {member.last_op}{number}{_at(member.last_site)}, {span(member.idle_seconds)} ago"


def _worker_state(reply: pb.StatusReply, task: int) -> str:
    worker = next((worker for worker in reply.workers if worker.task == task), None)
    match worker and worker_state(worker):
        case WorkerState.LOST:
            return f" (worker {task} is lost)"
        case WorkerState.SILENT:
            return f" (worker {task} does not answer: this is old)"
    return ""


# Workers


def _lost(reply: pb.StatusReply) -> Iterator[Finding]:
    """Only the coordinator knows: a worker that answers for itself without it is there."""
    for worker in reply.workers:
        if worker_state(worker) is WorkerState.LOST:
            age = worker.last_heartbeat_seconds
            sentence = f"worker {worker.task} (host {worker.host}, pid {worker.pid}) was last heard {span(age)} ago"
            yield Finding(Trouble.LOST, Severity.ERROR, sentence, worker=worker.task, since=age)


def _memory(workers: Iterable[pb.WorkerStatus]) -> Iterator[Finding]:
    for worker in workers:
        limit = worker.arena_limit_bytes
        if limit and worker.arena_bytes >= FULL * limit:
            sentence = (
                f"worker {worker.task} (host {worker.host}) has used {size(worker.arena_bytes)} of {size(limit)} for "
                "arenas: ranks that ask for more are refused"
            )
            yield Finding(Trouble.MEMORY, Severity.WARNING, sentence, worker=worker.task)


def _limits(workers: Iterable[pb.WorkerStatus]) -> Iterator[Finding]:
    for worker in workers:
        for met in worker.limits_met:
            if met.last_seconds > RECENT_SECONDS or met.limit in NOBODY_HURT:
                continue
            times = "once" if met.refused == 1 else f"{met.refused} times"
            name = met.limit.replace("_", " ")
            sentence = (
                f"worker {worker.task} (host {worker.host}) has met its limit of {name} {times}, the last "
                f"{span(met.last_seconds)} ago: somebody was refused"
            )
            yield Finding(Trouble.LIMIT, Severity.WARNING, sentence, worker=worker.task, since=met.last_seconds)


def _versions(reply: pb.StatusReply) -> Iterator[Finding]:
    who: dict[Versions, list[str]] = {}
    if reply.coordinator.release:
        who[_spoken(reply.coordinator)] = ["the coordinator"]
    workers: dict[Versions, list[int]] = {}
    clients: dict[Versions, list[int]] = {}
    for worker in reply.workers:
        if worker.release:
            workers.setdefault(_spoken(worker), []).append(worker.task)
        for versions in clients_of(worker):
            if versions.release:  # of a client in another language there is none
                clients.setdefault(versions, []).append(worker.task)
    _name(who, workers, "worker")
    _name(who, clients, "clients of worker")
    if len(who) > 1:
        protocols = len({(versions.lowest, versions.highest) for versions in who}) > 1
        told = "; ".join(
            f"{_version(versions, protocols)}: {', '.join(names)}"
            for versions, names in sorted(who.items(), key=_age_of)
        )
        yield Finding(Trouble.VERSIONS, Severity.WARNING, f"releases differ: {told}")


def _spoken(daemon: pb.CoordinatorStatus | pb.WorkerStatus) -> Versions:
    """Of one that tells no more than its release, the first version of the protocol."""
    return replace(versions_from_proto(daemon.protocol), release=daemon.release)


def _version(versions: Versions, protocols: bool) -> str:
    """The release alone, where all speak the same protocol."""
    return f"{versions.release} (protocol {versions.protocol})" if protocols else versions.release


def _age_of(one: tuple[Versions, object]) -> tuple[str, Versions]:
    return one[0].release, one[0]


def _name(who: dict[Versions, list[str]], tasks: Mapping[Versions, Sequence[int]], what: str) -> None:
    for versions, those in tasks.items():
        numbers = ranks_text(those).partition(" ")[2]
        who.setdefault(versions, []).append(f"{what}{'s' if len(those) > 1 else ''} {numbers}")


# What is over, and what is not as asked


def _failed(reply: pb.StatusReply) -> Iterator[Finding]:
    """Failures of the last minutes; one whose group runs again is only worth a warning."""
    runs = {group.name: group.generation for group in reply.groups if group.state in ("ready", "draining")}
    for failure in reply.failures:
        verdict = failure.verdict
        ago = max(0.0, reply.unix_time - failure.unix_time)
        if ago > RECENT_SECONDS:
            continue
        name = short_name(reply, verdict.group)
        successor = runs.get(verdict.group, 0)
        again = f" (the group runs again, as generation {successor})" if successor > verdict.generation else ""
        yield Finding(
            Trouble.FAILED,
            Severity.WARNING if again else Severity.ERROR,
            f"group {name} generation {verdict.generation}, {span(ago)} ago{again}: {code_name(verdict.code)}: "
            f"{verdict.message}",
            name,
            verdict.generation,
            since=ago,
            ranks=tuple(member.rank for member in (*verdict.missing, *verdict.differing)),
        )


def _open(reply: pb.StatusReply) -> Iterator[Finding]:
    who = ["the coordinator"] if reply.coordinator.insecure else []
    who += [f"worker {worker.task} (host {worker.host})" for worker in reply.workers if worker.insecure]
    if who:
        shown = ", ".join(who[:NAMED]) + (f" and {len(who) - NAMED} more" if len(who) > NAMED else "")
        yield Finding(
            Trouble.OPEN,
            Severity.WARNING,
            f"{shown}: whoever reaches {'it' if len(who) == 1 else 'them'} may do everything (--insecure)",
        )


def _notes(reply: pb.StatusReply, group: pb.GroupStatus) -> Iterator[Finding]:
    name = short_name(reply, group.name)
    for note in group.notes:
        yield Finding(
            Trouble.HINT,
            Severity.NOTE,
            f"group {name} generation {group.generation} is {note}",
            name,
            group.generation,
        )
