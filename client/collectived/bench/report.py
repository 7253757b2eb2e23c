"""Reports of rank 0 to the process that started it: one JSON object per line. Pure: values in, objects out.

`begin` comes first, then `size` and `row` in turn, then `end`; any rank may say `failed`.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from collectived.bench.config import BenchConfig
from collectived.bench.measure import Row
from collectived.bench.operation_kinds import Extent
from collectived.errors import CollectiveError
from collectived_proto.cause import Cause
from collectived_proto.types import RELEASE, Member

Event = dict[str, Any]


def begin_event(order: BenchConfig, members: Sequence[Member], transport: str, extents: Sequence[Extent]) -> Event:
    """The event before all others: the measurement and its ranks."""
    kind = order.kind
    conditions = {
        "operation": order.operation,
        "dtype": order.dtype if kind.moves_data else None,
        "reduce_op": order.reduction.value if kind.reduces else None,
        "root": order.root if kind.has_root else None,
        "ranks": len(members),
        "workers": len({member.worker for member in members}),
        "hosts": len({member.host for member in members}),
        "transport": transport,
        "memory": order.memory,
        "in_flight": order.in_flight,
        "warmup": order.warmup,
        "checked": order.should_check,
        "time": "slowest rank",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "version": RELEASE,
    }
    return {"event": "begin", "conditions": conditions, "sizes": [extent.size for extent in extents]}


def size_event(extent: Extent, iterations: int) -> Event:
    """This one is measured next."""
    return {"event": "size", "size_bytes": extent.size, "iterations": iterations}


def row_event(found: Row) -> Event:
    """One size was measured."""
    shown = asdict(found.figures)
    return {
        "event": "row",
        "size_bytes": found.extent.size,
        "count": found.extent.count,
        "iterations": shown["iterations"],
        "p50_seconds": shown["p50"],
        "p99_seconds": shown["p99"],
        "mean_seconds": shown["mean"],
        "algorithm_bandwidth": shown["algorithm_bandwidth"],
        "bus_bandwidth": shown["bus_bandwidth"],
        "errors": found.errors,
    }


def end_event() -> Event:
    return {"event": "end"}


def failed_event(rank: int | None, error: BaseException) -> Event:
    """This rank has failed. An error that is none of a collective comes with its traceback."""
    text = "".join(traceback.format_exception_only(error)).strip()
    trace = "" if isinstance(error, CollectiveError) else "".join(traceback.format_exception(error)).strip()
    error_text = text.removeprefix("collectived_proto.errors.")
    return {"event": "failed", "rank": rank, "error": error_text, "trace": trace, "follows": _find_cause(rank, error)}


def _find_cause(rank: int | None, error: BaseException) -> int | None:
    """The rank that aborted the group, where it is another one: this failure follows from its."""
    verdict = error.verdict if isinstance(error, CollectiveError) else None
    if verdict is None or verdict.cause is not Cause.ABORTED or verdict.origin == rank:
        return None
    return verdict.origin
