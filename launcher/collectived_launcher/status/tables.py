"""A `StatusReply` as tables: first what hurts, then who is there, then what they do. Pure: a reply in, parts out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from collectived_proto.codec import tiers_from_proto
from collectived_proto.types import shown_name
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import status_pb2 as pb

SLOW = 1.0  # seconds in flight after which a collective that waits for somebody is worth a word
_LOCAL = "seen from here"  # the state of a group of which only one worker's part is known
_CODES = {
    1: "CANCELLED",
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    10: "ABORTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
}


def tables(reply: pb.StatusReply) -> Iterator[Table | Text]:
    """What to print, in order."""
    reply = _with_short_names(_with_lanes(reply))
    yield from _troubles(reply)
    yield _coordinator(reply.coordinator)
    if reply.workers:
        yield from (Text(), _workers(reply.workers))
    if reply.groups:
        yield from (Text(), _groups(reply.groups))
        yield from _choices(reply.groups)
        yield from _notes(reply.groups)
        yield from (Text(), _ranks(reply.groups))
    if any(group.in_flight or group.posts for group in reply.groups):
        yield from (Text(), _in_flight(reply.groups))


def _with_lanes(reply: pb.StatusReply) -> pb.StatusReply:
    """Without a coordinator nobody sees a group as a whole: the lanes of those who answered stand for it."""
    if reply.coordinator.address or reply.groups:
        return reply
    local = pb.StatusReply()
    local.CopyFrom(reply)
    for lane in (lane for worker in reply.workers for lane in worker.lanes):
        local.groups.add(
            name=shown_name(lane.group),
            generation=lane.generation,
            state=_LOCAL,
            members=lane.members,
            collectives_done=lane.collectives_done,
            bytes_reduced=lane.bytes_reduced,
            in_flight=lane.in_flight,
            posts=lane.posts,
            notes=lane.notes,
            idle=lane.idle,
        )
    return local


def _with_short_names(reply: pb.StatusReply) -> pb.StatusReply:
    """A group of the job that was asked is known by its own name, `world` instead of `job/world`."""
    short = pb.StatusReply()
    short.CopyFrom(reply)
    for group in short.groups:
        group.name = group.name.removeprefix(f"{reply.coordinator.job}/")
    for failure in short.failures:
        failure.verdict.group = failure.verdict.group.removeprefix(f"{reply.coordinator.job}/")
    return short


def _troubles(reply: pb.StatusReply) -> Iterator[Text]:
    for warning in reply.warnings:
        yield Text(f"WARNING  {warning}", style="yellow")
    for group in reply.groups:
        if group.waiting_for:
            yield Text(f"WAITING  {_name(group)} is forming: {group.waiting_for}", style="yellow")
        if group.idle:  # where waiting is normal it is no trouble
            continue
        for flight in group.in_flight:
            if flight.seconds > SLOW and flight.missing:
                yield Text(f"WAITING  {_name(group)}: {_stuck(flight)}", style="red")
        for post in group.posts:
            if post.seconds > SLOW:
                yield Text(f"WAITING  {_name(group)}: {_unanswered(post)}", style="red")
    for failure in reply.failures:
        yield Text(_failed(failure, reply.unix_time), style="red")


def _stuck(flight: pb.InFlight) -> str:
    return (
        f"{flight.op} #{flight.instance} waits for rank {_list(flight.missing)} since {flight.seconds:.1f} s"
        f"{f' (called at {flight.site})' if flight.site else ''}"
    )


def _unanswered(post: pb.PostInFlight) -> str:
    return (
        f"{post.op} of rank {post.rank} waits for rank {post.peer} since {post.seconds:.1f} s"
        f"{f' (called at {post.site})' if post.site else ''}"
    )


def _failed(failure: pb.Failure, now: float) -> str:
    verdict = failure.verdict
    code = _CODES.get(verdict.code, f"code {verdict.code}")
    ago = f" {span(now - failure.unix_time)} ago" if now >= failure.unix_time > 0 else ""
    return f"FAILED   {verdict.group} generation {verdict.generation}: {code}{ago}: {verdict.message}"


def _coordinator(coordinator: pb.CoordinatorStatus) -> Text:
    if not coordinator.address:
        return Text("coordinator  not reachable", style="yellow")
    return Text(
        f"coordinator  {coordinator.address}  job {coordinator.job}  pid {coordinator.pid}  epoch {coordinator.epoch}  "
        f"up {span(coordinator.uptime_seconds)}  release {coordinator.release}"
    )


def _workers(workers: Sequence[pb.WorkerStatus]) -> Table:
    table = _table(
        "workers", "task", "host", "pid", "devices", "sessions", "arenas", "resident", "threads", "up", "coordinator"
    )
    for worker in sorted(workers, key=lambda worker: worker.task):
        table.add_row(
            str(worker.task),
            worker.host,
            str(worker.pid),
            devices(worker.devices),
            str(worker.sessions),
            size(worker.arena_bytes),
            size(worker.resident_bytes),
            str(worker.threads),
            span(worker.uptime_seconds),
            "connected" if worker.connected else Text(_lost(worker.last_heartbeat_seconds), style="red"),
        )
    return table


def _lost(heartbeat: float) -> str:
    """Only the coordinator knows when it last heard a worker; a worker that speaks for itself gives no age."""
    return f"lost {span(heartbeat)} ago" if heartbeat else "lost"


def _groups(groups: Sequence[pb.GroupStatus]) -> Table:
    table = _table("groups", "group", "generation", "state", "size", "collectives done", "bytes", "in flight")
    for group in groups:
        table.add_row(
            group.name,
            str(group.generation),
            Text(group.state, style="red" if group.state == "failed" else ""),
            _size_of(group),
            str(group.collectives_done),
            size(group.bytes_reduced),
            str(len(group.in_flight) + len(group.posts)),
        )
    return table


def _size_of(group: pb.GroupStatus) -> str:
    if group.state == _LOCAL:
        return f"{len(group.members)} here"
    return f"{len(group.members)} of {group.size}" if group.state == "forming" else str(group.size)


def _choices(groups: Sequence[pb.GroupStatus]) -> Iterator[Text]:
    """What AUTO chooses, where there is a choice: a group of one worker is folded by it."""
    for group in groups:
        if group.table and len({member.worker for member in group.members}) > 1:
            rows = "; ".join(map(str, tiers_from_proto(group.table)))
            pack = group.table[0].bytes_per_pack
            yield Text(f"AUTO in {group.name}: {rows}{f'; packs of {size(pack)}' if pack else ''}")


def _notes(groups: Sequence[pb.GroupStatus]) -> Iterator[Text]:
    for group in groups:
        for note in group.notes:
            yield Text(f"NOTE     {_name(group)} is {note}", style="yellow")


def _ranks(groups: Sequence[pb.GroupStatus]) -> Table:
    table = _table("ranks", "group", "rank", "worker", "device", "pid", "label", "last done", "at", "idle")
    for group in groups:
        for member in group.members:
            table.add_row(
                group.name,
                str(member.rank),
                f"{member.worker} ({member.host})",
                short_device(member.device),
                str(member.pid),
                member.label or "-",
                _last(member),
                member.last_site or "-",
                span(member.idle_seconds),
            )
    return table


def _last(member: common.Member) -> str:
    return f"{member.last_op} #{member.last_instance}" if member.last_instance >= 0 else "nothing yet"


def _in_flight(groups: Sequence[pb.GroupStatus]) -> Table:
    table = _table("in flight", "group", "collective", "bytes", "since", "arrived", "missing", "at", "algorithm")
    for group in groups:
        for flight in group.in_flight:
            table.add_row(
                group.name,
                f"{flight.op} #{flight.instance}",
                size(flight.bytes),
                span(flight.seconds),
                _list(flight.arrived),
                _list(flight.missing),
                flight.site or "-",
                flight.algorithm or "-",
            )
        for post in group.posts:
            table.add_row(
                group.name,
                post.op,
                size(post.bytes) if post.bytes else "-",
                span(post.seconds),
                str(post.rank),
                str(post.peer),
                post.site or "-",
                "-",
            )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _name(group: pb.GroupStatus) -> str:
    return f"group {group.name} generation {group.generation}"


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "-"


def short_device(device: str) -> str:
    """`/job:worker/replica:0/task:1/device:CPU:0` as `CPU:0`."""
    return device.rsplit("device:", 1)[-1]


def devices(names: Sequence[str]) -> str:
    """`CPU:0…7` instead of eight names."""
    kinds: dict[str, list[int]] = {}
    for name in names:
        kind, _, number = short_device(name).rpartition(":")
        kinds.setdefault(kind, []).append(int(number))
    return " ".join(_numbered(kind, sorted(numbers)) for kind, numbers in kinds.items())


def _numbered(kind: str, numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{kind}:{numbers[0]}…{numbers[-1]}"
    return f"{kind}:{','.join(map(str, numbers))}"


def size(count: float) -> str:
    """Bytes in words: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def span(seconds: float) -> str:
    """A length of time in words: `0.4 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
