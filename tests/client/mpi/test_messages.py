"""Which elements of a buffer a call of MPI means."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from collectived import mpi
from collectived.mpi.messages import read_blocks, read_elements


@pytest.mark.parametrize(
    "buffer",
    [
        np.arange(6.0),
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(3, 2).T),
        array.array("d", range(6)),
        [np.arange(6.0), mpi.DOUBLE],
        (np.arange(6.0), None),
        [np.arange(9.0), 6],
        [np.arange(9.0), 6, mpi.DOUBLE],
        [bytearray(np.arange(6.0).tobytes()), "d"],
    ],
)
def test_one_block_is_seen_flat_whatever_holds_it(buffer: Any) -> None:
    assert read_elements(buffer, "buf").tolist() == [0, 1, 2, 3, 4, 5]


def test_what_is_written_into_a_block_is_in_the_buffer() -> None:
    memory = bytearray(8)
    read_elements([memory, mpi.INT], "buf", writes=True)[1] = 1
    assert memory == bytearray([0, 0, 0, 0, 1, 0, 0, 0])


@pytest.mark.parametrize(
    ("where", "counts", "displacements"),
    [
        ([], (2, 2, 2), (0, 2, 4)),
        ([1], (1, 1, 1), (0, 1, 2)),
        ([[1, 2, 3]], (1, 2, 3), (0, 1, 3)),
        ([([1, 2, 1], [4, 1, 0])], (1, 2, 1), (4, 1, 0)),
        ([(1, 2)], (1, 1, 1), (0, 2, 4)),
        ([[1, 1, 1], [0, 2, 4]], (1, 1, 1), (0, 2, 4)),
        ([1, mpi.LONG], (1, 1, 1), (0, 1, 2)),
    ],
)
def test_blocks_lie_where_counts_and_displacements_say(
    where: list[Any], counts: tuple[int, ...], displacements: tuple[int, ...]
) -> None:
    blocks = read_blocks([np.arange(6), *where], 3, "recvbuf")
    assert (blocks.counts, blocks.displacements) == (counts, displacements)
    joined = [at + step for at, count in zip(displacements, counts, strict=True) for step in range(count)]
    assert blocks.join().tolist() == joined


def test_blocks_with_gaps_are_written_one_by_one() -> None:
    memory = np.zeros(6, int)
    blocks = read_blocks([memory, (1, 2)], 3, "recvbuf", writes=True)
    assert blocks.span is None
    blocks.put(np.array([7, 8, 9]))
    assert memory.tolist() == [7, 0, 8, 0, 9, 0]


@pytest.mark.parametrize(
    ("buffer", "error", "said"),
    [
        (3.0, TypeError, "buf must be an array, .* got a float"),
        ([np.arange(3), 1, 2, 3, 4], TypeError, "buf must be an array"),
        ([np.arange(3), [1, 2]], TypeError, "buf takes one count"),
        ([np.arange(3), "x"], TypeError, "data type 'x' not understood"),
        ([np.arange(3), 4], ValueError, "buf has 3 elements of int64, and 4 are asked for"),
        ([np.arange(3), -1], ValueError, "must not be negative, got -1"),
        ([bytearray(3), mpi.INT], ValueError, "buf has 3 bytes, which are no whole number of int32"),
        (np.arange(6)[::2], ValueError, "buf has gaps in its memory"),
        (b"abc", ValueError, "buf is read-only"),
    ],
)
def test_what_is_no_buffer_is_told_what_was_expected(buffer: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        read_elements(buffer, "buf", writes=True)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ([], "sendbuf has 7 elements, which cannot be cut evenly for 3 ranks"),
        ([[1, 2]], "counts of sendbuf must be one for each of the 3 ranks, got 2"),
        ([([1, 1, 1], [0, 1])], "displacements of sendbuf must be one for each of the 3 ranks, got 2"),
        ([3], "sendbuf has 7 elements of int64, and 9 are asked for"),
    ],
)
def test_blocks_that_do_not_fit_are_told_why(where: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_blocks([np.arange(7), *where], 3, "sendbuf")
