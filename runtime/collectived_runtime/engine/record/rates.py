"""The work of a group loop in the last minute, by operation: a few numbers for each of twelve slices of five seconds.

Adding is some tenths of a microsecond, and as much memory is held as there are kinds of operations, however busy the
group loop is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from collectived_proto.report.bandwidth import BUS_FACTORS
from collectived_proto.types import AllToAll, Collective
from collectived_proto.v1 import status_pb2 as pb

SLICE_SECONDS = 5.0
SLICES = 12


@dataclass(frozen=True, slots=True)
class OperationLoad:
    """The load of one collective: its size, and the bytes on a rank's bus, as nccl-tests counts them."""

    op: str = ""
    nbytes: int = 0
    bus_bytes: float = 0.0


NO_LOAD = OperationLoad()


def compute_load(collective: Collective, ranks: int, rows: Sequence[Sequence[int]] = ()) -> OperationLoad:
    """How much a collective carries.

    Args:
        rows: of all ranks, where lengths differ; as for `compile_program`.
    """
    op = str(collective.operation).partition("(")[0]
    size = sum(leaf.nbytes for leaf in collective.leaves)
    if rows:
        # How large a row of each leaf is, beside how many rows all ranks have of it.
        widths = [leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in collective.leaves]
        if isinstance(collective.operation, AllToAll):
            size = sum(map(sum, rows)) * sum(widths) // ranks
        else:
            size = sum(width * sum(counts) for width, counts in zip(widths, zip(*rows, strict=True), strict=True))
    return OperationLoad(op, size, size * BUS_FACTORS[op].compute(ranks))


class _Slice:
    __slots__ = ("bus_bytes", "busy", "done", "nbytes", "number", "waiting")

    def __init__(self) -> None:
        self.restart(-SLICES)

    def restart(self, number: int) -> None:
        self.done = 0
        self.nbytes = 0
        self.bus_bytes = self.busy = self.waiting = 0.0
        self.number = number


class RateWindow:
    """The work of a group loop in the last minute. Written by it alone; may be read from any thread.

    Times are of the monotonic clock, in seconds.
    """

    def __init__(self, begun: float) -> None:
        self._started_at = begun
        self._slices: dict[str, list[_Slice]] = {}

    def add(self, load: OperationLoad, first: float, started: float, ended: float) -> None:
        """Count a collective: when its first rank had come, when all had and it was started, and when it ended."""
        current = self._find_slice(load.op, ended)
        current.done += 1
        current.nbytes += load.nbytes
        current.bus_bytes += load.bus_bytes
        current.waiting += started - first
        current.busy += ended - started

    def add_many(self, count: int, sums: OperationLoad, busy: float, now: float, waiting: float = 0.0) -> None:
        """Count so many collectives of one operation that have ended by now: what all carried, and took, in seconds."""
        current = self._find_slice(sums.op, now)
        current.done += count
        current.nbytes += sums.nbytes
        current.bus_bytes += sums.bus_bytes
        current.busy += busy
        current.waiting += waiting

    def _find_slice(self, op: str, now: float) -> _Slice:
        number = int(now / SLICE_SECONDS)
        slices = self._slices.get(op)
        if slices is None:
            slices = self._slices[op] = [_Slice() for _ in range(SLICES)]
        current = slices[number % SLICES]
        if current.number != number:
            current.restart(number)
        return current

    def rates(self, now: float, pending: tuple[str, float] | None = None) -> list[pb.Rate]:
        """One per operation of which any has ended in the last minute, or that ranks wait for now.

        Args:
            pending: the operation that waits for ranks, and when its first rank came; those behind it wait for it.
        """
        oldest = int(now / SLICE_SECONDS) - SLICES + 1
        seconds = now - max(self._started_at, oldest * SLICE_SECONDS)
        found = []
        slices_by_op = dict(self._slices)
        waiting_op, first = pending or ("", now)
        if waiting_op:
            slices_by_op.setdefault(waiting_op, [])
        for op, slices in slices_by_op.items():
            recent = [one for one in slices if one.number >= oldest and one.done]
            if recent or op == waiting_op:
                rate = pb.Rate(
                    op=op,
                    seconds=seconds,
                    collectives=sum(one.done for one in recent),
                    bytes=sum(one.nbytes for one in recent),
                    bus_bytes=round(sum(one.bus_bytes for one in recent)),
                    busy_seconds=sum(one.busy for one in recent),
                    waiting_seconds=sum(one.waiting for one in recent)
                    + (min(now - first, seconds) if op == waiting_op else 0.0),
                )
                found.append(with_bandwidth(rate))
        return found


def with_bandwidth(rate: pb.Rate) -> pb.Rate:
    if rate.busy_seconds > 0:
        rate.algorithm_bandwidth = rate.bytes / rate.busy_seconds
        rate.bus_bandwidth = rate.bus_bytes / rate.busy_seconds
    return rate
