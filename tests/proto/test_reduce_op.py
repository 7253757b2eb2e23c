"""Reduce ops by every name under which callers know them."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest

from collectived_proto.reduce_op import ReduceOp


@pytest.mark.parametrize("name", ["sum", "SUM", "Mean", "avg", "AVERAGE", "prod", "product", "bxor"])
def test_reduce_ops_are_known_by_every_spelling(name: str) -> None:
    expected = {"avg": "mean", "average": "mean", "prod": "product"}.get(name.lower(), name.lower())
    assert ReduceOp.of(name) is ReduceOp(expected)


def test_an_unknown_reduce_op_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="sum, mean, min, max"):
        ReduceOp.of("median")


def test_swapped_arguments_are_recognised() -> None:
    with pytest.raises(TypeError, match=r'the reduce op comes first: reduce\("sum", tensor\)'):
        ReduceOp.of(np.ones(3), "reduce")


class TensorFlow:
    ReduceOp = enum.Enum("ReduceOp", {"SUM": "SUM", "MEAN": "MEAN"})


class Mpi:
    """As `mpi4py.MPI` has it."""

    class Op:
        def __init__(self, name: str) -> None:
            self.name = name


@pytest.mark.parametrize(
    ("foreign", "expected"),
    [
        (TensorFlow.ReduceOp.MEAN, ReduceOp.MEAN),
        (Mpi.Op("MPI_PROD"), ReduceOp.PRODUCT),
        (Mpi.Op("MPI_BXOR"), ReduceOp.BXOR),
    ],
    ids=["tf.distribute", "mpi4py", "mpi4py, bitwise"],
)
def test_those_of_other_libraries_are_taken_by_name(foreign: Any, expected: ReduceOp) -> None:
    assert ReduceOp.of(foreign) is expected


def test_those_of_torch_distributed_are_taken() -> None:
    torch = pytest.importorskip("torch")
    names = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max", "PRODUCT": "product", "BAND": "band"}
    for name, expected in names.items():
        assert ReduceOp.of(getattr(torch.distributed.ReduceOp, name)) is ReduceOp(expected)


def test_one_that_is_none_of_ours_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="expected one of sum, mean"):
        ReduceOp.of(Mpi.Op("MPI_LAND"))
    with pytest.raises(TypeError, match="the reduce op comes first"):
        ReduceOp.of(Mpi.Op(3))  # type: ignore[arg-type]
