"""The memory of a segment as a file: made by the worker, written by its ranks."""

from __future__ import annotations

import os

from collectived_native import core, segment
from collectived_native.segment import Geometry
from collectived_proto.ipc.shared_file import is_open_elsewhere, measure, reopen

_MOST_EXTENTS = 256  # of a part that are looked at: each takes two calls of the system


class SegmentFile:
    """A segment that has just been made.

    Attributes:
        shared: the descriptor that ranks are given.

    Raises:
        OSError: there is no memory, or no descriptor, for it.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._descriptor = segment.create(geometry)
        try:
            self._own = reopen(self._descriptor, os.O_RDWR)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.shared = self._own if self._own >= 0 else self._descriptor

    def watch(self) -> core.Watcher:
        """Map it, to watch it."""
        return segment.watch(self._descriptor, self._geometry)

    def measure(self) -> int:
        """Bytes that have been written, in whole pages."""
        return measure(self._descriptor)

    def measure_parts(self) -> list[int]:
        """The same of each seat: their parts lie one after the other, of equal size, and fill it but for its start.

        Who has scattered what it wrote over its part is taken to have written all of it.
        """
        seats = self._geometry.seats
        part = os.fstat(self._descriptor).st_size // seats
        return [self._measure_part(seat * part, (seat + 1) * part) for seat in range(seats)]

    def _measure_part(self, start: int, end: int) -> int:
        written, at = 0, start
        for _ in range(_MOST_EXTENTS):
            try:
                first = os.lseek(self._descriptor, at, os.SEEK_DATA)
            except OSError:  # there is no more data
                return written
            if first >= end:
                return written
            at = min(end, os.lseek(self._descriptor, first, os.SEEK_HOLE))
            written += at - first
            if at == end:
                return written
        return end - start

    def is_held_elsewhere(self) -> bool | None:
        """Whether a rank has it still, as a descriptor or mapped; it is given to no more. None: nobody can say."""
        if self.shared == self._descriptor:
            return None
        if self._own >= 0:
            os.close(self._own)
            self._own = -1
        return is_open_elsewhere(self._descriptor)

    def close(self) -> None:
        for descriptor in (self._descriptor, self._own):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._own = -1
