"""Totals that other processes wrote: what they say is counted once, and never more than is complete."""

from __future__ import annotations

from collectived_native import core
from collectived_native.segment import Total
from collectived_runtime.engine.record.segment_totals import MessageTotals, SegmentTotals

MOST = (1 << 64) - 1


def test_what_has_been_added_since_the_last_look_is_taken() -> None:
    totals = SegmentTotals(start=100)
    assert totals.take([Total(5, 1, 3, 30, 300)], 103) == [Total(5, 1, 3, 30, 300)]
    assert totals.take([Total(5, 1, 3, 30, 300)], 103) == []
    later = [Total(5, 1, 4, 40, 350), Total(6, 9, 2, 0, 7)]
    assert totals.take(later, 106) == [Total(5, 1, 1, 10, 50), Total(6, 9, 2, 0, 7)]
    assert totals.settle(106) == 0


def test_never_more_is_counted_than_is_complete() -> None:
    totals = SegmentTotals(start=0)
    assert [one.calls for one in totals.take([Total(5, 1, MOST, 0, 0), Total(6, 1, MOST, 0, 0)], 7)] == [7]
    assert totals.take([Total(5, 1, MOST, MOST, MOST)], 7) == []
    (gained,) = totals.take([Total(5, 1, MOST, MOST, MOST)], 8)
    assert gained.calls == 1 and gained.bytes <= 1 << 44 and gained.nanoseconds <= 1 << 53


def test_numbers_that_fall_take_nothing_back() -> None:
    totals = SegmentTotals(start=0)
    totals.take([Total(5, 1, 4, 40, 400)], 4)
    assert totals.take([Total(5, 1, 0, 0, 0)], 6) == []
    assert totals.take([Total(5, 1, 5, 0, 0)], 6) == [Total(5, 1, 1, 0, 0)]


def test_what_nobody_counts_any_more_is_settled_once() -> None:
    totals = SegmentTotals(start=0)
    totals.take([Total(5, 1, 4, 40, 400)], 5)
    assert totals.settle(5) == 1
    assert totals.settle(5) == 0
    assert totals.take([Total(5, 1, 5, 50, 500)], 5) == []


def test_messages_are_no_instances_and_each_seat_has_its_own() -> None:
    sent = Total(-1, core.SENDS, 3, 30, 300)
    assert SegmentTotals(start=0).take([sent, Total(5, 1, 1, 10, 10)], 9) == [Total(5, 1, 1, 10, 10)]
    totals = MessageTotals()
    assert totals.take(0, [Total(5, 1, 1, 10, 10), sent]) == [sent]
    assert totals.take(1, [sent]) == [sent]
    assert totals.take(0, [sent]) == []
    assert totals.take(0, [Total(-1, core.SENDS, 4, 50, 310)]) == [Total(-1, core.SENDS, 1, 20, 10)]
    assert totals.take(0, [Total(-1, core.SENDS, 2, 0, 0)]) == [], "numbers that fall take nothing back"


def test_what_a_process_makes_up_about_messages_is_bounded() -> None:
    (gained,) = MessageTotals().take(0, [Total(-1, core.RECEIVES, MOST, MOST, MOST)])
    assert gained.calls <= 1 << 32 and gained.bytes <= MOST and gained.nanoseconds <= 1 << 53
