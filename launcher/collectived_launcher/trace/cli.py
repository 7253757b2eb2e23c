"""`collectived trace`: what the flight recorders have kept, in a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

import click

from collectived_launcher.quantities import ByteCount, Time
from collectived_launcher.target_options import target_options
from collectived_proto.report.phrases import pluralize, sanitize_text

_VIEWER = "https://ui.perfetto.dev"
_MAX_UINT32 = (1 << 32) - 1  # that can be asked for
_MAX_ABSENT = 10  # named on the screen
_NAMES_QUERY_BYTES = 256 << 10  # bytes of each worker, to say which groups there are


@click.command(short_help="Write the latest collectives as a trace for Perfetto.")
@click.option(
    "--last",
    type=Time(minimum=0.001),
    help="Only events that ended within this time (500ms, 30s, 5m, 1h), and events that have not ended.  [default: "
    "all that is kept]",
)
@click.option("--group", metavar="NAME", default="", help="Only this group.")
@click.option(
    "--most",
    type=ByteCount(),
    default="8MiB",
    show_default=True,
    help="The most bytes of each worker's answer, newest first; at most 16MiB.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default="trace.json",
    show_default=True,
    help="File of the trace; compressed if it ends in .gz; - is standard output.",
)
@target_options
@click.option("--local", is_flag=True, help="Only the recording of this one worker.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON.")
def trace(
    last: float | None,
    group: str,
    most: int,
    output: str,
    worker: str | None,
    job: str | None,
    local: bool,
    as_json: bool,
) -> None:
    """Write the latest collectives, and the ranks that others waited for, as a trace for Perfetto.

    Asks one worker of the running job, which asks all through the coordinator, also while collectives hang. Exit status
    2 if nothing is recorded of the group, 3 if no job runs or no daemon answers.
    """
    from collectived_launcher.status.discovery import find_target  # gRPC: `launch` must start without it
    from collectived_launcher.trace.collect import request_trace
    from collectived_launcher.trace.perfetto import PerfettoTrace
    from collectived_proto.report.progress import Progress
    from collectived_proto.v1.trace_pb2 import TraceRequest

    target = find_target(worker, job, os.environ)
    with Progress("collectived trace", "asking workers"):
        account = request_trace(
            target,
            TraceRequest(last_seconds=last or 0.0, group=group, local_only=local, most_bytes=min(most, _MAX_UINT32)),
        )
    if group and not account.group_names:
        known = request_trace(target, TraceRequest(local_only=local, most_bytes=_NAMES_QUERY_BYTES)).group_names
        text = (
            f"nothing is recorded of a group {group!r}{' in that time' if last else ''}; expected one of: "
            f"{', '.join(sorted(known)) or 'none, for no group is known'}"
        )
        raise click.UsageError(sanitize_text(text))
    made = PerfettoTrace(account)
    count = len(account.workers.keys() | account.silent_workers.keys())
    with Progress("collectived trace", f"writing {output}", count, "workers") as progress:
        _write_trace(output, made.lines(on_worker=progress.advance))
    about = made.metadata
    told = {
        "file": output,
        "collectives": made.collective_count,
        "seconds": round(made.seconds, 6),
        "events": made.event_count,
    }
    if as_json:
        click.echo(json.dumps(told | about, indent=2), err=output == "-")
        return
    for line in _summary_lines(told, about):
        click.echo(sanitize_text(line), err=output == "-")


def _summary_lines(told: dict[str, Any], about: dict[str, Any]) -> Iterable[str]:
    workers = about["workers"]
    yield (
        f"{told['file']}: {pluralize(told['collectives'], 'collective')} of {pluralize(len(workers), 'worker')} in "
        f"{told['seconds']:.3f} s{_clock_text(workers, about['clock_error_seconds'])}; open it in {_VIEWER}"
    )
    absences = about["absences"]
    for absence in absences[:_MAX_ABSENT]:
        at = f" at {absence['site']}" if absence["site"] else ""
        head = "LOST     " if absence["outcome"] == "lost" else "ABSENT   "
        yield (
            f"{head}{absence['group']} #{absence['instance']} {absence['op']}{at}: {absence['text']} "
            f"{'after' if absence['outcome'] == 'lost' else 'for'} {absence['waited_seconds']:.1f} "
            f"s{_member_text(absence)}"
        )
    if len(absences) > _MAX_ABSENT:
        yield f"ABSENT   and {len(absences) - _MAX_ABSENT} more"
    for worker in workers:
        if worker["collectives_left_out"]:
            more = "ask for less with --last or --group, or for up to --most 16MiB"
            yield f"WARNING  worker {worker['task']} has {worker['collectives_left_out']} collectives more: {more}"
    for warning in about["warnings"]:
        yield f"WARNING  {warning}"


def _clock_text(workers: list[dict[str, Any]], error: float) -> str:
    if len(workers) < 2:
        return ""
    return f", clocks within {error * 1e3:.3f} ms" if error else ", one clock"


def _member_text(absence: dict[str, Any]) -> str:
    if "pid" not in absence:
        return f" (worker {absence['worker']})" if absence["worker"] is not None else ""
    last = f"last did {absence['last_op']}" if absence["last_op"] else "has done nothing yet"
    at = f" at {absence['last_site']}" if absence["last_site"] else ""
    return f" (host {absence['host']}, pid {absence['pid']}; {last}{at})"


def _write_trace(output: str, lines: Iterable[str]) -> None:
    """Into a file whole or not at all; a link stays, and what it leads to is written."""
    if output == "-":
        sys.stdout.writelines(lines)
        return
    path = Path(output)
    compressed = path.suffix == ".gz"
    try:
        if path.exists() and not path.is_file():  # a pipe or device stays what it is
            with _open_output(path, compressed) as file:
                file.writelines(lines)
            return
        path = Path(os.path.realpath(path))
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with _open_output(draft, compressed) as file:
                file.writelines(lines)
            os.replace(draft, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
    except OSError as error:
        raise click.ClickException(
            f"{output!r} cannot be written: {error.strerror or error}; give another file with -o"
        ) from error


def _open_output(path: Path, compressed: bool) -> IO[str]:
    return cast(IO[str], gzip.open(path, "wt", compresslevel=6)) if compressed else path.open("w")
