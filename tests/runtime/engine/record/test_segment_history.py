"""What ranks remember of a segment: each instance is told once, when all that take part have ended it."""

from __future__ import annotations

from collectived_native.segment import Past
from collectived_runtime.engine.record.segment_history import PastArrival, SegmentHistory

NS = 1_000_000_000
MOST = (1 << 64) - 1


def pasts(*numbers: int, description: int = 5, began: int = 0) -> list[Past]:
    return [Past(number, description, (number + began) * NS, (number + 2) * NS) for number in numbers]


def test_an_instance_is_told_once_with_its_ranks_in_the_order_in_which_they_came() -> None:
    history = SegmentHistory((3, 4), start=10)
    assert history.find_first(12) == 10
    told = history.take({3: pasts(10, 11, began=1), 4: pasts(10, 11, description=6)}, 12, 99.0)
    assert [(one.number, one.ended_at) for one in told] == [(10, 12.0), (11, 13.0)]
    assert told[0].arrivals == (PastArrival(4, 10.0, 6), PastArrival(3, 11.0, 5))
    assert history.find_first(12) == 12 and history.take({}, 12, 99.0) == []


def test_the_last_one_waits_for_ranks_that_are_still_at_it_until_none_is() -> None:
    history = SegmentHistory((0, 1), start=0)
    assert [one.number for one in history.take({0: pasts(0, 1), 1: pasts(0)}, 2, 99.0)] == [0]
    assert history.find_first(2) == 1
    (last,) = history.take({0: pasts(1), 1: []}, 2, 99.0, is_over=True)
    assert (last.number, [one.rank for one in last.arrivals]) == (1, [0])


def test_what_ranks_have_forgotten_is_left_out() -> None:
    history = SegmentHistory((0, 1), start=0)
    told = history.take({0: pasts(7, 9), 1: pasts(9)}, 10, 99.0)
    assert [(one.number, len(one.arrivals)) for one in told] == [(7, 1), (9, 2)]


def test_one_look_reads_a_bounded_number_however_many_ranks_there_are() -> None:
    for size in (1, 2, 100, 256):
        first = SegmentHistory(range(size), start=0).find_first(1_000_000)
        assert 1 <= (1_000_000 - first) * size <= 1024


def test_made_up_times_and_numbers_reach_no_further_than_now() -> None:
    history = SegmentHistory((0, 1), start=5)
    made_up = [Past(2, 5, 0, 0), Past(5, MOST, MOST, 0), Past(9, 5, 0, 0)]
    (told,) = history.take({0: made_up, 1: pasts(5)}, 7, 99.0)
    assert told.number == 5 and told.ended_at == 99.0
    assert [one.at for one in told.arrivals] == [5.0, 99.0]
