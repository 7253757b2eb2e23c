"""A `StatusReply` for people: first what is wrong, then counts, and all the rest where it is wanted.

Pure: a reply and its findings in, parts to print out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from collectived_proto.codec import tiers_from_proto, versions_from_proto
from collectived_proto.report.findings import (
    FindingKind,
    Severity,
    StatusFinding,
    code_name,
    short_group_name,
)
from collectived_proto.report.labels import (
    WorkerState,
    finished_text,
    has_counts,
    has_reported,
    list_client_versions,
    rank_count,
    size_text,
    worker_state,
)
from collectived_proto.report.phrases import (
    format_duration,
    numbers_text,
    peer_label,
    pluralize,
    sanitize_text,
    short_worker_names,
)
from collectived_proto.report.quantities import format_bytes
from collectived_proto.v1 import status_pb2 as pb

MAX_FAILURES = 3  # among the findings, unless all is wanted
_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "yellow"}
_STATES = {WorkerState.CONNECTED: "", WorkerState.DRAINING: "yellow"}
_PARTIAL = "seen from here"


def build_tables(reply: pb.StatusReply, found: Sequence[StatusFinding], wide: bool = False) -> Iterator[Table | Text]:
    """Build the tables and texts to print, in order."""
    yield from _findings(found, wide)
    yield _coordinator(reply, wide)
    yield _counts(reply)
    if reply.groups:
        yield from (Text(), _groups(reply, wide))
    if any(group.rates for group in reply.groups):
        yield from (Text(), _rates(reply))
    if wide:
        yield from _wide_tables(reply)


def _wide_tables(reply: pb.StatusReply) -> Iterator[Table | Text]:
    if any(group.in_flight or group.posts for group in reply.groups):
        yield from (Text(), _in_flight(reply))
    yield from _auto_choices(reply)
    if reply.workers:
        yield from (Text(), _workers(reply.workers))
    if any(group.members for group in reply.groups):
        yield from (Text(), _ranks(reply))
    if any(member.stack for group in reply.groups for member in group.members):
        yield from (Text(), _stacks(reply))
    if reply.failures:
        yield from (Text(), _failures(reply))


# Findings


def _findings(found: Sequence[StatusFinding], wide: bool) -> Iterator[Text]:
    failures = [finding for finding in found if finding.kind is FindingKind.FAILED]
    left_out = [] if wide else failures[MAX_FAILURES:]
    for finding in found:
        if not any(finding is one for one in left_out):
            yield _text(f"{finding.kind.value.upper():8} {finding.sentence}", style=_COLOURS[finding.severity])
        if left_out and finding is failures[-1]:
            yield _text(f"{'':8} and {len(left_out)} more failures: --wide shows them", style="yellow")
    if not found:
        yield _text("OK       nothing waits, and nothing has failed lately", style="green")


# Counts


def _coordinator(reply: pb.StatusReply, wide: bool) -> Text:
    coordinator = reply.coordinator
    if not coordinator.address:
        answered = f"  answered by {short_worker_names(reply.answered_by)}" if reply.answered_by else ""
        return _text(f"coordinator  not reachable{answered}", style="yellow")
    speaks = versions_from_proto(coordinator.protocol).protocol_text if coordinator.HasField("protocol") else ""
    epoch = f"epoch {coordinator.epoch}  " if wide else ""
    return _text(
        f"coordinator  {coordinator.address}  job {coordinator.job}  pid {coordinator.pid}  {epoch}"
        f"up {format_duration(coordinator.uptime_seconds)}  release {coordinator.release}"
        f"{f'  protocol {speaks}' if speaks else ''}"
    )


def _counts(reply: pb.StatusReply) -> Text:
    workers, hosts = len(reply.workers), len({worker.host for worker in reply.workers})
    states = Counter(_state_text(group) for group in reply.groups)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    flights = sum(len(group.in_flight) + len(group.posts) for group in reply.groups)
    used, limit = (
        (sum(numbers) for numbers in zip(*map(_arena_bytes, reply.workers), strict=True)) if workers else (0, 0)
    )
    return _text(
        f"{pluralize(workers, 'worker')} on {pluralize(hosts, 'host')}, {pluralize(len(reply.groups), 'group')}"
        f"{f' ({told})' if told else ''}, {pluralize(rank_count(reply), 'rank')}, {flights} in flight, "
        f"shared memory {format_bytes(used)} of {format_bytes(limit)}"
    )


def _arena_bytes(worker: pb.WorkerStatus) -> tuple[int, int]:
    return worker.arena_bytes, worker.arena_limit_bytes


def _groups(reply: pb.StatusReply, wide: bool) -> Table:
    """Key and generation are numbers for those who compare status with trace, log and errors of programs."""
    numbers = ("key", "generation") if wide else ()
    table = _new_table("groups", "group", *numbers, "state", "size", "done", "failed", "bytes", "in flight")
    for group in reply.groups:
        _add_row(
            table,
            short_group_name(reply, group.name),
            *((str(group.key or "-"), str(group.generation or "-")) if wide else ()),
            _text(_state_text(group), style="red" if group.state == "failed" else ""),
            size_text(group),
            *_group_counts(reply, group),
            str(len(group.in_flight) + len(group.posts)),
        )
    return table


def _state_text(group: pb.GroupStatus) -> str:
    return _PARTIAL if group.state == "partial" else group.state


def _group_counts(reply: pb.StatusReply, group: pb.GroupStatus) -> tuple[str, str, str]:
    if not has_counts(reply, group):
        return "-", "-", "-"
    return str(group.collectives_done), str(group.collectives_failed), format_bytes(group.bytes_reduced)


def _rates(reply: pb.StatusReply) -> Table:
    columns = ("per second", "mean size", "algbw GB/s", "busbw GB/s", "moving", "waiting")
    table = _new_table("last minute", "group", "operation", "collectives", *columns)
    for group in reply.groups:
        for rate in sorted(group.rates, key=lambda rate: -rate.busy_seconds):
            _add_row(
                table,
                short_group_name(reply, group.name),
                rate.op,
                str(rate.collectives),
                f"{rate.collectives / rate.seconds:.1f}" if rate.seconds else "-",
                format_bytes(rate.bytes / rate.collectives) if rate.collectives else "-",
                _bandwidth(rate.algorithm_bandwidth),
                _bandwidth(rate.bus_bandwidth),
                _percent_text(rate.busy_seconds, rate.seconds),
                _percent_text(rate.waiting_seconds, rate.seconds),
            )
    return table


def _bandwidth(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3f}" if bytes_per_second else "-"


def _percent_text(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


# The rest


def _auto_choices(reply: pb.StatusReply) -> Iterator[Text]:
    """The choices of AUTO. A group of one worker has none: the worker folds it."""
    for group in reply.groups:
        if group.table and len({member.worker for member in group.members}) > 1:
            rows = "; ".join(map(str, tiers_from_proto(group.table)))
            pack = group.table[0].bytes_per_pack
            packs = f"; packs of {format_bytes(pack)}" if pack else ""
            yield from (Text(), _text(f"AUTO in {short_group_name(reply, group.name)}: {rows}{packs}"))


def _in_flight(reply: pb.StatusReply) -> Table:
    columns = ("state", "bytes", "since", "arrived", "missing", "at", "algorithm", "why", "packs done")
    table = _new_table("in flight", "group", "collective", *columns)
    for group in reply.groups:
        name = short_group_name(reply, group.name)
        for flight in group.in_flight:
            _add_row(
                table,
                name,
                f"{flight.op} #{flight.instance}",
                flight.state or "-",
                format_bytes(flight.bytes),
                format_duration(flight.seconds),
                numbers_text(flight.arrived),
                numbers_text(flight.missing),
                flight.site or "-",
                flight.algorithm + (f" in {flight.shards} shards" if flight.shards > 1 else "") or "-",
                flight.why or "-",
                f"{flight.packs_done} of {flight.packs}" if flight.packs else "-",
            )
        for post in group.posts:
            row = (
                format_bytes(post.bytes) if post.bytes else "-",
                format_duration(post.seconds),
                str(post.rank),
                str(peer_label(post.peer)),
            )
            _add_row(table, name, post.op, "waiting", *row, post.site or "-", "-", "-", "-")
    return table


def _workers(workers: Sequence[pb.WorkerStatus]) -> Table:
    columns = (
        "devices",
        "sessions",
        "shared memory",
        "resident",
        "threads",
        "descriptors",
        "up",
        "release",
        "protocol",
        "clients",
        "coordinator",
    )
    table = _new_table("workers", "task", "host", "pid", "incarnation", *columns)
    for worker in sorted(workers, key=lambda worker: worker.task):
        limit = f" of {format_bytes(worker.arena_limit_bytes)}" if worker.arena_limit_bytes else ""
        kept = f", {format_bytes(worker.retained_bytes)} of it kept by clients" if worker.retained_bytes else ""
        told = (
            str(worker.sessions),
            f"{format_bytes(worker.arena_bytes)}{limit}{kept}",
            format_bytes(worker.resident_bytes),
            str(worker.threads),
            str(worker.descriptors),
            format_duration(worker.uptime_seconds),
        )
        _add_row(
            table,
            str(worker.task),
            worker.host,
            str(worker.pid),
            worker.incarnation or "-",
            devices_text(worker.devices)
            + (f" ({worker.nccl})" if worker.nccl else "")
            + (f"; no GPU: {worker.gpus_missing}" if worker.gpus_missing else ""),
            *(told if has_reported(worker) else ("-",) * len(told)),
            worker.release or "-",
            versions_from_proto(worker.protocol).protocol_text,
            ", ".join(
                f"{client.release or 'unknown'} ({client.protocol_text})" for client in list_client_versions(worker)
            )
            or "-",
            _connection_text(worker),
        )
    return table


def _connection_text(worker: pb.WorkerStatus) -> Text:
    state = worker_state(worker)
    age = f" {format_duration(worker.last_heartbeat_seconds)} ago" if state is WorkerState.LOST else ""
    return _text(f"{state}{age}", style=_STATES.get(state, "red"))


def _ranks(reply: pb.StatusReply) -> Table:
    columns = ("worker", "device", "pid", "label", "finished", "last call", "at", "idle")
    table = _new_table("ranks", "group", "rank", *columns)
    for group in reply.groups:
        gone = {member.rank for member in group.left}
        for member in group.members:
            _add_row(
                table,
                short_group_name(reply, group.name),
                f"{member.rank}{' (left)' if member.rank in gone else ''}",
                f"{member.worker} ({member.host})",
                short_device(member.device),
                str(member.pid),
                member.label or "-",
                finished_text(member),
                member.last_op or "-",
                member.last_site or "-",
                format_duration(member.idle_seconds),
            )
    return table


def _stacks(reply: pb.StatusReply) -> Table:
    """Where the threads of ranks are that others wait for."""
    table = _new_table("now", "group", "rank", "innermost call first")
    for group in reply.groups:
        for member in group.members:
            if member.stack:
                _add_row(table, short_group_name(reply, group.name), str(member.rank), member.stack)
    return table


def _failures(reply: pb.StatusReply) -> Table:
    table = _new_table("failures", "ago", "group", "generation", "from", "verdict", "decided by")
    for failure in reply.failures:
        verdict = failure.verdict
        _add_row(
            table,
            format_duration(max(0.0, reply.unix_time - failure.unix_time)),
            short_group_name(reply, verdict.group),
            str(verdict.generation),
            f"#{verdict.from_instance}",
            _text(f"{code_name(verdict.code)}: {verdict.message}"),
            short_worker_names(verdict.decided_by) or "-",
        )
    return table


# Words


def _text(told: str, style: str = "") -> Text:
    """Make a text without markup or control characters, because others choose the names in it."""
    return Text(sanitize_text(told), style=style)


def _add_row(table: Table, *cells: str | Text) -> None:
    table.add_row(*(cell if isinstance(cell, Text) else _text(cell) for cell in cells))


def _new_table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def short_device(device: str) -> str:
    """`/job:worker/replica:0/task:1/device:CPU:0` as `CPU:0`."""
    return device.rsplit("device:", 1)[-1]


def devices_text(names: Sequence[str]) -> str:
    """`CPU:0…7` instead of eight names."""
    kinds: dict[str, list[int]] = {}
    for name in names:
        kind, _, number = short_device(name).rpartition(":")
        kinds.setdefault(kind, []).append(int(number))
    return " ".join(_device_range_text(kind, sorted(numbers)) for kind, numbers in kinds.items())


def _device_range_text(kind: str, numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{kind}:{numbers[0]}…{numbers[-1]}"
    return f"{kind}:{','.join(map(str, numbers))}"
