"""Parcels: results as their outlines say, and none that says something impossible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectived.calls.buffers import Backing
from collectived.calls.described_result import DescribedResult, ResultSpec
from collectived_proto import codec
from collectived_proto.ipc.result_header import OWN_ROWS, ResultHeader
from collectived_proto.types import Broadcast, Collective, DType, Leaf

FLOAT = np.dtype(np.float32)


class Slot:
    """A result in ordinary memory, some bytes behind its start."""

    offset = 8
    where = (0, 8)

    def __init__(self, outline: bytes, data: bytes = b"") -> None:
        self.views: dict[tuple[int, int], list[Any]] = {}
        self.memory = bytes(8) + outline + data

    def acquire_backing(self, nbytes: int) -> Backing | None:
        return None


def slot(extent: int, *leaves: tuple[tuple[int, int], ...], description: bytes = b"", data: Any = ()) -> Slot:
    return Slot(ResultHeader(extent, leaves, description).encode(), np.asarray(data, FLOAT).tobytes())


def closed(*shapes: tuple[int, ...], axis: int = 0) -> ResultSpec:
    return ResultSpec(tuple((FLOAT, shape) for shape in shapes), True, axis)


def described(*leaves: Leaf, structure: str = "*") -> bytes:
    return codec.collective_to_proto(Collective(Broadcast(), structure, leaves)).SerializeToString()


def test_pieces_follow_each_other_along_the_axis() -> None:
    # Two pieces of one row of two elements each, the second one first in memory.
    parcel = DescribedResult(closed((9, 2), axis=1), slot(80, ((72, 1), (64, 1)), data=[1, 2, 3, 4]))
    assert parcel.get_type(0) == (FLOAT, (2, 2))
    assert parcel.array(0).tolist() == [[3, 1], [4, 2]]
    assert parcel.array(0).flags.c_contiguous


def test_a_leaf_without_rows_is_empty() -> None:
    parcel = DescribedResult(closed((9, 2), (3, 0), axis=1), slot(56, (), ((0, 5),)))
    assert parcel.array(0).shape == (2, 0) and parcel.array(1).shape == (0, 5)


def test_rows_of_the_own_value_stand_between_those_that_came() -> None:
    own = [np.arange(8, dtype=FLOAT).reshape(4, 2)]
    parcel = DescribedResult(closed((9, 2)), slot(96, ((80, 1), (OWN_ROWS + 1, 2), (88, 1)), data=[9, 9, 7, 7]), own)
    assert parcel.own_rows == (range(1, 3),)
    assert parcel.array(0).tolist() == [[9, 9], [2, 3], [4, 5], [7, 7]]


@pytest.mark.parametrize("own", [None, [np.zeros((2, 2), FLOAT)], [np.zeros((4, 3), FLOAT)], [np.zeros((4, 2))]])
def test_rows_that_the_own_value_lacks_are_refused(own: Any) -> None:
    with pytest.raises(ValueError, match="no such rows"):
        DescribedResult(closed((9, 2)), slot(48, ((OWN_ROWS + 1, 2),)), own)


def test_a_parcel_may_describe_itself() -> None:
    description = described(Leaf("[0]", DType.FLOAT32, ()), Leaf("[1]", DType.FLOAT32, (0, 3)), structure="[*, *]")
    at = ResultHeader(0, (((0, 1),), ()), description).nbytes
    parcel = DescribedResult(ResultSpec(None, False), slot(at + 4, ((at, 1),), (), description=description, data=[7]))
    assert (parcel.structure, len(parcel)) == ("[*, *]", 2)
    assert parcel.array(0).shape == () and parcel.array(0) == 7 and parcel.array(1).shape == (0, 3)


@pytest.mark.parametrize(
    ("form", "found", "says"),
    [
        (closed((1,)), Slot(b"short"), "ends early"),
        (closed((1,)), slot(10_000, ((0, 1),)), "10000 bytes in"),
        (closed((1,)), slot(24), "0 leaves where there are 1"),
        (closed((1,)), slot(48, ((44, 2),)), "2 rows of 4 bytes at 44 in an outline of 48 bytes"),
        (closed((1,)), slot(48, ((1 << 62, 1 << 63),)), "rows of 4 bytes"),
        (closed((1,)), slot(48, ((OWN_ROWS + 1, 1 << 63),)), "no such rows"),
        (closed(()), slot(48, ((40, 1),)), "rows along axis 0 of a leaf of"),
        (closed((2,), axis=-2), slot(48, ((40, 1),)), r"rows along axis -2 of a leaf of \[2\]"),
        (ResultSpec(None, False), slot(24), "without an operation"),
        (ResultSpec(None, False), slot(30, description=b"\xff" * 6), "a description that cannot be read"),
    ],
    ids=["short", "beyond", "leaves", "piece", "overflow", "own rows", "0-d", "axis", "nothing", "nonsense"],
)
def test_an_impossible_one_is_refused(form: ResultSpec, found: Slot, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DescribedResult(form, found)


def test_a_described_leaf_must_have_its_rows() -> None:
    description = described(Leaf("", DType.FLOAT32, (2,)))
    extent = ResultHeader(0, (((0, 1),),), description).nbytes
    with pytest.raises(ValueError, match=r"1 rows of a leaf of \[2\]"):
        DescribedResult(ResultSpec(None, False), slot(extent, ((0, 1),), description=description))
