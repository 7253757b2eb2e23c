"""A plan: the schedule of one participant for one pack and shard, as data.

A *participant* is what a plan speaks of: a rank, a device or a worker, whichever the level folds to; participants are
named by integers. A *span* is a range of elements. A *plan* is a sequence of *rounds*; the *moves* of a round are
issued together and a participant enters the next round when all of them are done. There are no sockets, data types,
bytes or clocks in a plan.

Every move names a buffer:

- INPUT    what this participant contributes; never written by a plan;
- SCRATCH  partial sums, wider than the result where the type asks for it (float32 for float16);
- OUTPUT   the result.

The executor may let the three share memory, so a plan obeys: once a span of SCRATCH or OUTPUT has been written, the
same span of INPUT is not read again, and once a span of OUTPUT has been written, the same span of SCRATCH is not read
again.
`verify/verifier.py` proves it for every algorithm.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Buffer(enum.Enum):
    INPUT = "input"
    SCRATCH = "scratch"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Elements start, start+1, … stop-1."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def split(self, parts: int) -> tuple[Span, ...]:
        """`parts` neighbouring spans whose lengths differ by at most one, longer ones first; some may be empty."""
        small, longer = divmod(len(self), parts)
        spans = []
        start = self.start
        for part in range(parts):
            stop = start + small + (part < longer)
            spans.append(Span(start, stop))
            start = stop
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class SendMove:
    """Send `span` of `source` to `peer`."""

    peer: int
    span: Span
    source: Buffer


@dataclass(frozen=True, slots=True)
class FoldMove:
    """How a received span is combined: with the same span of `mine`, the received part as left operand or as right.

    The operand that holds the lowest participant's contribution stands left, so that results do not depend on the
    participant that folds.
    """

    mine: Buffer
    received_left: bool


@dataclass(frozen=True, slots=True)
class RecvMove:
    """Receive `span` from `peer` into `target`: as it is, or folded with the own part (then into SCRATCH)."""

    peer: int
    span: Span
    target: Buffer
    fold: FoldMove | None = None


@dataclass(frozen=True, slots=True)
class FinishMove:
    """The values of `span` in `source` are final: convert (last rounding, division of a mean) or copy them to OUTPUT.

    A local move; it runs before the other moves of its round, which may send what it wrote.
    """

    span: Span
    source: Buffer


Move = SendMove | RecvMove | FinishMove
Round = tuple[Move, ...]
Plan = tuple[Round, ...]
