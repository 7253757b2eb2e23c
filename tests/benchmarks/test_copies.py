"""What the benchmark of copies makes of its figures."""

from __future__ import annotations

import mmap

from benchmarks.copies import BEHIND, NBYTES, copy_by_numpy, make_room, measure, table


def test_every_distance_is_measured() -> None:
    found = measure(copy_by_numpy)
    assert len(found) == len(BEHIND)
    assert all(seconds > 0 for seconds in found)


def test_memory_begins_where_it_is_to_begin() -> None:
    room = make_room(16)
    assert len(room) == NBYTES
    assert room.ctypes.data % mmap.PAGESIZE == 16


def test_a_row_for_each_way_to_copy() -> None:
    rows = table([2e-6] * len(BEHIND), [1.5e-6] * len(BEHIND)).splitlines()
    assert rows[2] == "| memcpy |" + " 2.0 µs |" * len(BEHIND)
    assert rows[3] == "| the core |" + " 1.5 µs |" * len(BEHIND)
