"""The memory of a segment as a file: made by the worker, written by its ranks."""

from __future__ import annotations

import os

from collectived_native import core, segment
from collectived_native.segment import Geometry
from collectived_proto.ipc.shared_file import SharedFile

_MOST_EXTENTS = 256  # of a part that are looked at: each takes two calls of the system


class SegmentFile(SharedFile):
    """A segment that has just been made.

    Raises:
        OSError: there is no memory, or no descriptor, for it.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        descriptor = segment.create(geometry)
        try:
            super().__init__(descriptor, os.O_RDWR)
        except BaseException:
            os.close(descriptor)
            raise

    def watch(self) -> core.Watcher:
        """Map it, to watch it."""
        return segment.watch(self._descriptor, self._geometry)

    def take_seat(self, seat: int, knock: int) -> core.Engine:
        """Take a seat that this worker operates; others ring it by the knock."""
        return segment.attach(self._descriptor, self._geometry, seat, waiting=segment.OPERATED, knock=knock)

    def measure_parts(self, ranks: int) -> list[int]:
        """Bytes that each of so many ranks has written, whose seats are the first.

        Seats' parts lie one after the other, of equal size, and fill the file. A rank whose writes are scattered over
        its part is taken to have written all of it.
        """
        part = os.fstat(self._descriptor).st_size // self._geometry.seats
        return [self._measure_part(seat * part, (seat + 1) * part) for seat in range(ranks)]

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
