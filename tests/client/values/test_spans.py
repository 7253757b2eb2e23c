"""Which arrays lie over one another."""

from __future__ import annotations

import random

import numpy as np

from collectived.values.spans import Spans

MEMORY = np.zeros(1000, np.uint8)


def test_arrays_that_share_a_byte_overlap_and_neighbours_do_not() -> None:
    spans = Spans({7: MEMORY[10:20], 8: MEMORY[20:30], 9: MEMORY[25:25]})
    assert spans.find_overlapping(MEMORY[0:10]) == []
    assert spans.find_overlapping(MEMORY[0:11]) == [7]
    assert sorted(spans.find_overlapping(MEMORY[19:21])) == [7, 8]
    assert spans.find_overlapping(MEMORY[30:40]) == spans.find_overlapping(MEMORY[15:15]) == []


def test_the_same_bytes_are_the_same() -> None:
    spans = Spans({0: MEMORY[10:20]})
    assert spans.is_same(0, MEMORY[10:20])
    assert not spans.is_same(0, MEMORY[10:19])
    assert not spans.is_same(0, MEMORY[11:21])


def test_any_arrangement_is_found_as_by_comparing_all_with_all() -> None:
    chance = random.Random(1)
    for _ in range(200):
        places = {number: sorted(chance.sample(range(60), 2)) for number in range(chance.randrange(12))}
        spans = Spans({number: MEMORY[begin:end] for number, (begin, end) in places.items()})
        begin, end = sorted(chance.choices(range(60), k=2))
        wanted = [number for number, (b, e) in places.items() if max(b, begin) < min(e, end)]
        assert sorted(spans.find_overlapping(MEMORY[begin:end])) == wanted


def test_thousands_are_compared_without_comparing_all_with_all() -> None:
    class Counted(int):
        compared = 0

        def __lt__(self, other: int) -> bool:
            Counted.compared += 1
            return int(self) < int(other)

    spans = Spans({number: MEMORY[number // 10 : number // 10 + 1] for number in range(0, 10_000, 10)})
    spans._begins = [Counted(begin) for begin in spans._begins]
    for number in range(1000):
        assert spans.find_overlapping(MEMORY[number : number + 1]) == [10 * number]
    assert Counted.compared < 1000 * 20
