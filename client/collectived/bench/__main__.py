"""`python -m collectived.bench ORDER`: one rank of a measurement, as `collectived bench` starts it.

It joins the group that its environment names. ORDER is the JSON of `order.Order`; what is told on standard output is
said in `report`. Exit status: 0 measured, whatever the results; 1 failed, 2 no order, 3 no worker answers, 130
interrupted.
"""

from __future__ import annotations

import json
import os
import sys

import collectived as cd
from collectived.bench import report
from collectived.bench.kinds import Extent
from collectived.bench.measure import measure, planned
from collectived.bench.order import Order

FAILED, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130


def main(arguments: list[str]) -> int:
    """Runs one rank; returns its exit status."""
    try:
        (text,) = arguments
        order = Order.read(text)
    except ValueError as error:
        print(f"collectived.bench: {error}; run `collectived bench`, which starts this program", file=sys.stderr)
        return USAGE
    try:
        return _connected(order)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        _say(report.failed(_rank(), error))
        return FAILED


def _connected(order: Order) -> int:
    try:
        session = cd.connect()
    except cd.errors.UnavailableError as error:
        _say(report.failed(_rank(), error))
        return UNREACHABLE
    options = cd.CommunicationOptions(timeout_seconds=order.timeout or None)
    with session, session.join(options=options) as group:
        _run(order, session, group)
    return 0


def _run(order: Order, session: cd.Session, group: cd.Group) -> None:
    tells = group.rank == 0
    todo = planned(order, group.size)
    if tells:
        _say(report.begin(order, group.members, session.transport, todo))
    for extent in todo:
        row = measure(order, group, session, extent, _tell_size if tells else _keep_quiet)
        if row is not None:
            _say(report.row(row))
    if tells:
        _say(report.end())


def _tell_size(extent: Extent, iterations: int) -> None:
    _say(report.size(extent, iterations))


def _keep_quiet(extent: Extent, iterations: int) -> None:
    pass


def _say(event: report.Event) -> None:
    print(json.dumps(event), flush=True)


def _rank() -> int | None:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
