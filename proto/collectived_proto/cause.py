"""The causes of a verdict, for programs to decide by. Its message says the same to people."""

from __future__ import annotations

import enum


class Cause(enum.IntEnum):
    """The cause of a verdict, numbered as on the wire; see common.proto."""

    UNSPECIFIED = 0
    DEADLINE = 1
    LOST_RANK = 2
    LOST_WORKER = 3
    LOST_LINK = 4
    ABORTED = 5
    LEFT = 6
    MISMATCH = 7
    EXHAUSTED = 8
    NATIVE = 9
    DRAINED = 10
    FORGOTTEN = 11
    CANCELLED = 12
    REFUSED = 13
    DEFECT = 14
    LINK_REFUSED = 15


# The causes with which one rank may end a generation for all, beside an abort: a failure of its own process, or of its
# connection to its worker.
RANK_FAILURES = (Cause.DEADLINE, Cause.EXHAUSTED, Cause.REFUSED, Cause.DEFECT)
