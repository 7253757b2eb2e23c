"""What is summed, and how a result is checked."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.cases import ALL, MANY, REFILL, base, factor_of, fill, parse, wrong


@pytest.mark.parametrize("text", ["4 B", "64 KiB", "16 MiB", "64 x 1 KiB", "12 B"])
def test_a_size_is_shown_as_it_was_written(text: str) -> None:
    assert str(parse(text)) == text


def test_a_size_may_be_written_without_blanks() -> None:
    assert parse("64x1KiB") == MANY
    assert (MANY.tensors, MANY.count, MANY.size) == (64, 256, 64 << 10)


@pytest.mark.parametrize("text", ["", "4", "0 B", "6 B", "1 GiB", "-4 B", "x 4 B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse(text)


def test_sizes_are_those_of_the_goals() -> None:
    assert [case.size for case in ALL] == [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 64 << 10]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("turn", range(6))
def test_the_right_sum_has_nothing_wrong(ranks: int, turn: int) -> None:
    case = parse("1 KiB")
    buffers = np.empty((ranks, case.count), np.float32)
    for rank, buffer in enumerate(buffers):
        fill(buffer, base(case), rank, factor_of(turn))
    assert wrong(buffers.sum(0), base(case), ranks, factor_of(turn)) == 0


def test_every_wrong_number_is_counted() -> None:
    case = parse("1 KiB")
    result = np.full(case.count, np.nan, np.float32)
    assert wrong(result, base(case), 2, 1.0) == case.count


def test_the_sum_of_the_last_turn_is_wrong_in_the_next() -> None:
    case = parse("1 KiB")
    for turn in range(6):
        buffer = np.empty(case.count, np.float32)
        fill(buffer, base(case), 0, factor_of(turn))
        assert wrong(buffer, base(case), 1, factor_of(turn + 1)) == case.count


def test_sums_in_place_stay_exact_until_they_are_filled_again() -> None:
    case, ranks, factor = parse("64 B"), 4, max(map(factor_of, range(9)))
    total = np.zeros(case.count, np.float32)
    for rank in range(ranks):
        buffer = np.empty_like(total)
        fill(buffer, base(case), rank, factor)
        total += buffer
    for _ in range(REFILL - 1):
        total *= np.float32(ranks)
    assert wrong(total, base(case), ranks, factor * float(ranks ** (REFILL - 1))) == 0
