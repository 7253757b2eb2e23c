"""Which reduction of the service carries out which of c10d."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

from torch._C import _distributed_c10d as c10d  # noqa: E402  # where it is there

from collectived.integrations.c10d.reductions import (  # noqa: E402  # imports torch
    Reduction,
    divide,
    plan_reduction,
    plan_sparse_reduction,
    scale,
)
from collectived.integrations.c10d.tensors import TensorTarget  # noqa: E402  # imports torch
from collectived_proto.types import ReduceOp  # noqa: E402

OPS = torch.distributed.ReduceOp


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        (OPS.SUM, torch.float32, Reduction(ReduceOp.SUM)),
        (OPS.AVG, torch.bfloat16, Reduction(ReduceOp.MEAN)),
        (OPS.AVG, torch.complex64, Reduction(ReduceOp.MEAN)),
        (OPS.AVG, torch.int64, Reduction(ReduceOp.SUM, divisor=3)),
        (OPS.AVG, torch.int32, Reduction(ReduceOp.SUM, divisor=3, is_wide=True)),
        (OPS.AVG, torch.uint8, Reduction(ReduceOp.SUM, divisor=3, is_wide=True)),
        (OPS.SUM, torch.bool, Reduction(ReduceOp.MAX, as_bytes=True)),
        (OPS.PRODUCT, torch.bool, Reduction(ReduceOp.MIN, as_bytes=True)),
        (OPS.BXOR, torch.bool, Reduction(ReduceOp.BXOR, as_bytes=True)),
        (OPS.BAND, torch.int64, Reduction(ReduceOp.BAND)),
    ],
)
def test_every_op_has_one(op: Any, dtype: Any, expected: Reduction) -> None:
    assert plan_reduction(op, dtype, 3) == plan_reduction(OPS(op), dtype, 3) == expected


def test_a_mean_of_integers_rounds_towards_zero_as_that_of_nccl() -> None:
    tensor = torch.tensor([-7, 7])
    divide(tensor, Reduction(ReduceOp.SUM, divisor=2))
    assert tensor.tolist() == [-3, 3]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32])
def test_a_mean_of_narrow_integers_fits_where_their_sum_does_not(dtype: Any) -> None:
    largest = torch.tensor([torch.iinfo(dtype).max], dtype=dtype)
    reduction = plan_reduction(OPS.AVG, dtype, 2)
    target = TensorTarget.wide(largest)
    target.flat.copy_(scale(largest, reduction) * 2)
    divide(target.flat, reduction)
    target.settle()
    assert largest.item() == torch.iinfo(dtype).max


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
    with pytest.raises(TypeError, match=r"torch\.uint64 has no AVG: convert it"):
        plan_reduction(OPS.AVG, torch.uint64, 2)


PREMUL_SUM: Any = getattr(c10d, "_make_nccl_premul_sum", None)


@pytest.mark.skipif(PREMUL_SUM is None, reason="this PyTorch is built without PREMUL_SUM")
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_what_is_no_fraction_is_not_multiplied(dtype: Any) -> None:
    with pytest.raises(TypeError, match=f"{dtype} has no PREMUL_SUM"):
        plan_reduction(PREMUL_SUM(0.5), dtype, 2)


def test_sparse_tensors_are_added_then_divided() -> None:
    assert plan_sparse_reduction(OPS.SUM, torch.float32, 3) == Reduction(ReduceOp.SUM)
    assert plan_sparse_reduction(OPS.AVG, torch.float32, 3) == Reduction(ReduceOp.SUM, divisor=3)
    assert plan_sparse_reduction(OPS.AVG, torch.int64, 3) == Reduction(ReduceOp.SUM, divisor=3)
    if PREMUL_SUM is not None:
        assert plan_sparse_reduction(PREMUL_SUM(0.5), torch.float32, 3) == Reduction(ReduceOp.SUM, factor=0.5)
    with pytest.raises(ValueError, match="SUM, AVG and PREMUL_SUM, got .*MAX: make them dense"):
        plan_sparse_reduction(OPS(OPS.MAX), torch.float32, 3)
    with pytest.raises(TypeError, match=r"sparse tensors of torch\.bool are not reduced"):
        plan_sparse_reduction(OPS(OPS.SUM), torch.bool, 3)
