"""Which reduction of the service carries out which of c10d."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

from collectived.integrations.c10d.reductions import Reduction, divide, plan_reduction, scale  # noqa: E402  # torch
from collectived_proto.types import ReduceOp  # noqa: E402

OPS = torch.distributed.ReduceOp


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        (OPS.SUM, torch.float32, Reduction(ReduceOp.SUM)),
        (OPS.AVG, torch.bfloat16, Reduction(ReduceOp.MEAN)),
        (OPS.AVG, torch.complex64, Reduction(ReduceOp.MEAN)),
        (OPS.AVG, torch.int32, Reduction(ReduceOp.SUM, divisor=3)),
        (OPS.SUM, torch.bool, Reduction(ReduceOp.MAX, as_bytes=True)),
        (OPS.PRODUCT, torch.bool, Reduction(ReduceOp.MIN, as_bytes=True)),
        (OPS.BXOR, torch.bool, Reduction(ReduceOp.BXOR, as_bytes=True)),
        (OPS.BAND, torch.int64, Reduction(ReduceOp.BAND)),
    ],
)
def test_every_op_has_one(op: Any, dtype: Any, expected: Reduction) -> None:
    assert plan_reduction(op, dtype, 3) == plan_reduction(OPS(op), dtype, 3) == expected


def test_a_mean_of_integers_rounds_down() -> None:
    tensor = torch.tensor([-7, 7])
    divide(tensor, Reduction(ReduceOp.SUM, divisor=2))
    assert tensor.tolist() == [-4, 3]


def test_values_are_multiplied_before_they_are_summed() -> None:
    halves = torch.ones(2, dtype=torch.float16)
    scaled = scale(halves, Reduction(ReduceOp.SUM, factor=0.5))
    assert scaled.tolist() == [0.5, 0.5] and scaled.dtype is torch.float16
    assert scale(halves, Reduction(ReduceOp.SUM)) is halves


def test_what_is_not_reduced_is_refused() -> None:
    with pytest.raises(TypeError, match="does not reduce torch.float8_e4m3fn: convert it"):
        plan_reduction(OPS.SUM, torch.float8_e4m3fn, 2)
    with pytest.raises(TypeError, match="torch.bool has no"):
        plan_reduction(OPS.AVG, torch.bool, 2)
