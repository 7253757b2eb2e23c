"""`python -m collectived.bench ORDER`: one rank of a measurement, as `collectived bench` starts it.

It joins the group that its environment names. ORDER is the JSON of `config.BenchConfig`. `report` describes the
lines on standard output. Exit status: 0 measured, whatever the results; 1 failed, 2 no order, 3 no worker answers,
130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys

import collectived as cd
from collectived.bench import report
from collectived.bench.config import BenchConfig
from collectived.bench.measure import measure, plan_extents
from collectived.bench.operation_kinds import Extent

FAILED, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130


def main(arguments: list[str]) -> int:
    """Runs one rank; returns its exit status."""
    try:
        (text,) = arguments
        order = BenchConfig.from_json(text)
    except ValueError as error:
        print(f"collectived.bench: {error}; run `collectived bench`, which starts this program", file=sys.stderr)
        return USAGE
    try:
        return _run_connected(order)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        _print_event(report.failed_event(_rank(), error))
        return FAILED


def _run_connected(order: BenchConfig) -> int:
    try:
        session = cd.connect()
    except cd.errors.UnavailableError as error:
        _print_event(report.failed_event(_rank(), error))
        return UNREACHABLE
    options = cd.CommunicationOptions(timeout_seconds=order.timeout or None)
    with session, session.join(options=options) as group:
        _run(order, session, group)
    return 0


def _run(order: BenchConfig, session: cd.Session, group: cd.Group) -> None:
    tells = group.rank == 0
    todo = plan_extents(order, group.size)
    if tells:
        _print_event(report.begin_event(order, group.members, session.transport, todo))
    for extent in todo:
        row = measure(order, group, session, extent, _report_size if tells else _ignore_size)
        if row is not None:
            _print_event(report.row_event(row))
    if tells:
        _print_event(report.end_event())


def _report_size(extent: Extent, iterations: int) -> None:
    _print_event(report.size_event(extent, iterations))


def _ignore_size(extent: Extent, iterations: int) -> None:
    pass


def _print_event(event: report.Event) -> None:
    print(json.dumps(event), flush=True)


def _rank() -> int | None:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
