"""What a lane has done so far, in numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Written by the lane alone; may be read from any thread.

    Attributes:
        done, failed: instances.
        result_bytes: of what was done.
        folded_bytes: that folds of local contributions have read.
        copied_bytes: of local contributions that were copied where they might have been read in place.
    """

    done: int = 0
    failed: int = 0
    result_bytes: int = 0
    folded_bytes: int = 0
    copied_bytes: int = 0
