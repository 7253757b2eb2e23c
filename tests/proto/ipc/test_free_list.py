"""Slots: ranges never overlap, and what is given back can be taken again."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived_proto.ipc import free_list
from collectived_proto.ipc.free_list import ALIGNMENT, FreeList

SIZE = 100 * ALIGNMENT


@given(st.lists(st.one_of(st.integers(0, SIZE // 4), st.none()), max_size=60), st.randoms())
def test_ranges_in_use_are_disjoint_aligned_and_within(actions: list[int | None], random: st.DataObject) -> None:
    slots = FreeList(SIZE)
    used: dict[int, int] = {}
    for length in actions:
        if length is None and used:
            start = random.choice(sorted(used))  # type: ignore[attr-defined]
            slots.free(start)
            del used[start]
        elif length is not None and (start := slots.allocate(length)) is not None:
            used[start] = length
        ends = [(start, start + max(1, length)) for start, length in sorted(used.items())]
        assert all(end <= after for (_, end), (after, _) in zip(ends, ends[1:], strict=False))
        assert all(start % ALIGNMENT == 0 and end <= SIZE for start, end in ends)
    for start in used:
        slots.free(start)
    assert slots.is_unused
    assert slots.allocate(SIZE) == 0  # the free ranges have joined again


def test_what_does_not_fit_is_not_given() -> None:
    slots = FreeList(SIZE)
    assert slots.allocate(SIZE + 1) is None
    assert slots.allocate(SIZE) == 0
    assert slots.allocate(1) is None


def test_giving_back_what_is_not_in_use_is_an_error() -> None:
    with pytest.raises(KeyError):
        FreeList(SIZE).free(0)


def interrupt_at(line: int) -> Any:
    """A trace function that raises at that line of the free list, counted as they are reached.

    Not at those of what the collector of garbage calls in between.
    """
    reached = itertools.count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != free_list.__file__:
            return None
        if event == "line" and next(reached) == line:
            raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("method", ["allocate", "free"])
@pytest.mark.parametrize("free_neighbours", [(), (0,), (2,), (0, 2)])
def test_an_error_at_any_line_lets_no_ranges_overlap(method: str, free_neighbours: tuple[int, ...]) -> None:
    interrupted = 0
    for line in range(20):
        slots = FreeList(SIZE)
        used = {number * ALIGNMENT for number in range(4) if slots.allocate(1) == number * ALIGNMENT}
        for number in free_neighbours:
            slots.free(number * ALIGNMENT)
        used -= {ALIGNMENT, *(number * ALIGNMENT for number in free_neighbours)}
        act, argument = (slots.allocate, 1) if method == "allocate" else (slots.free, ALIGNMENT)
        sys.settrace(interrupt_at(line))
        try:
            taken = act(argument)
        except KeyboardInterrupt:
            interrupted += 1
        else:
            used |= {taken} if taken is not None else set()
        finally:
            sys.settrace(None)
        while (start := slots.allocate(1)) is not None:
            assert start not in used and start < SIZE
            used.add(start)
    assert 4 < interrupted < 20
