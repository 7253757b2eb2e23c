"""What is summed, and how a result is checked."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.cases import (
    ALL,
    MANY,
    OPERATIONS,
    REFILL,
    SIZES,
    Array,
    Case,
    base,
    expected,
    factor_of,
    fill,
    parse,
    wrong,
)


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


@pytest.mark.parametrize("text", ["reduce 4 B", "barrier 4 B", "broadcast 2 x 4 B", "broadcast"])
def test_what_is_not_measured_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse(text)


def test_sizes_are_those_of_the_goals() -> None:
    assert [case.size for case in SIZES] == [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 64 << 10]


def test_every_case_is_shown_as_it_is_parsed() -> None:
    assert [parse(str(case)) for case in ALL] == list(ALL)
    assert {case.operation for case in ALL} == set(OPERATIONS)


def inputs(case: Case, ranks: int, factor: float) -> list[Array]:
    arrays = [np.empty(case.counts(rank, ranks)[0], np.float32) for rank in range(ranks)]
    for rank, array in enumerate(arrays):
        fill(array, base(case, ranks), rank, factor)
    return arrays


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("turn", range(6))
def test_the_right_sum_has_nothing_wrong(ranks: int, turn: int) -> None:
    case, factor = parse("1 KiB"), factor_of(turn)
    total = np.sum(inputs(case, ranks, factor), axis=0)
    for rank in range(ranks):
        assert wrong(total, expected(case, base(case, ranks), rank, ranks, factor)) == 0


@pytest.mark.parametrize("size", ["4 B", "64 B"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_expected_of_each_operation(ranks: int, size: str) -> None:
    def of(operation: str) -> tuple[list[Array], list[Array]]:
        case = parse(f"{operation} {size}")
        numbers = base(case, ranks)
        got = [expected(case, numbers, rank, ranks, 2.0) for rank in range(ranks)]
        assert [array.size for array in got] == [case.counts(rank, ranks)[1] for rank in range(ranks)]
        return inputs(case, ranks, 2.0), got

    given, got = of("broadcast")
    assert all(np.array_equal(one, given[0]) for one in got)
    given, got = of("all_gather")
    assert all(np.array_equal(one, np.concatenate(given)) for one in got)
    given, got = of("gather")
    assert np.array_equal(got[0], np.concatenate(given))
    given, got = of("scatter")
    assert np.array_equal(np.concatenate(got), given[0])
    given, got = of("reduce_scatter")
    assert np.array_equal(np.concatenate(got), np.sum(given, axis=0))
    given, got = of("all_to_all")
    pieces = [np.split(one, ranks) for one in given]
    assert all(np.array_equal(one, np.concatenate([piece[rank] for piece in pieces])) for rank, one in enumerate(got))
    given, got = of("send_recv")
    assert all(np.array_equal(one, given[rank ^ 1]) for rank, one in enumerate(got))


def test_every_wrong_number_is_counted() -> None:
    case = parse("1 KiB")
    right = expected(case, base(case, 2), 0, 2, 1.0)
    assert wrong(np.full(case.count, np.nan, np.float32), right) == case.count
    assert wrong(right[:-1], right) == case.count - 1


def test_the_sum_of_the_last_turn_is_wrong_in_the_next() -> None:
    case = parse("1 KiB")
    numbers = base(case, 1)
    for turn in range(6):
        last, right = (expected(case, numbers, 0, 1, factor_of(number)) for number in (turn, turn + 1))
        assert wrong(last, right) == case.count


def test_sums_in_place_stay_exact_until_they_are_filled_again() -> None:
    case, ranks, factor = parse("64 B"), 4, max(map(factor_of, range(9)))
    total = np.sum(inputs(case, ranks, factor), axis=0)
    for _ in range(REFILL - 1):
        total *= np.float32(ranks)
    assert wrong(total, expected(case, base(case, ranks), 0, ranks, factor * float(ranks ** (REFILL - 1)))) == 0
