"""The memory of a segment as a file: made by the worker, written by its ranks."""

from __future__ import annotations

import contextlib
import os

from collectived_native import core, segment
from collectived_native.segment import Geometry
from collectived_proto.ipc.shared_file import is_open_elsewhere, reopen

_BLOCK_BYTES = 512  # of st_blocks


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
        return os.fstat(self._descriptor).st_blocks * _BLOCK_BYTES

    def measure_parts(self) -> list[int]:
        """The same of each seat: their parts lie one after the other, of equal size, and fill it but for its start."""
        seats = self._geometry.seats
        part = os.fstat(self._descriptor).st_size // seats
        written = [0] * seats
        end = 0
        with contextlib.suppress(OSError):  # there is no more data
            while True:
                start = os.lseek(self._descriptor, end, os.SEEK_DATA)
                end = os.lseek(self._descriptor, start, os.SEEK_HOLE)
                for seat in range(start // part, min(seats, -(-end // part))):
                    written[seat] += min(end, (seat + 1) * part) - max(start, seat * part)
        return written

    def is_held_elsewhere(self) -> bool:
        """Whether a rank has it still, as a descriptor or mapped; it is given to no more."""
        if self._own >= 0:
            os.close(self._own)
            self._own = -1
        return is_open_elsewhere(self._descriptor)

    def close(self) -> None:
        for descriptor in (self._descriptor, self._own):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._own = -1
