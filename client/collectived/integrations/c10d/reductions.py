"""How reductions of c10d are carried out by those of the service. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from collectived.integrations.c10d.tensors import CARRIED, Tensor
from collectived_proto.types import ReduceOp

_KIND = dist.ReduceOp.RedOpType
_OPS = {
    _KIND.SUM: ReduceOp.SUM,
    _KIND.AVG: ReduceOp.MEAN,
    _KIND.PRODUCT: ReduceOp.PRODUCT,
    _KIND.MIN: ReduceOp.MIN,
    _KIND.MAX: ReduceOp.MAX,
    _KIND.BAND: ReduceOp.BAND,
    _KIND.BOR: ReduceOp.BOR,
    _KIND.BXOR: ReduceOp.BXOR,
    _KIND.PREMUL_SUM: ReduceOp.SUM,
}
_OF_BOOL = {  # of bytes that are 0 or 1
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.BXOR: ReduceOp.BXOR,
}


_NARROW = frozenset({torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32})
_OF_SPARSE = (_KIND.SUM, _KIND.AVG, _KIND.PREMUL_SUM)


class Reduction(NamedTuple):
    """One reduction for tensors of one dtype.

    Attributes:
        op: what the service does.
        as_bytes: elements are given as bytes: of bool.
        factor: what values are multiplied by before; None: nothing.
        divisor: what results are divided by after, integers towards zero; 0: nothing.
        is_wide: elements are given as int64, for their sum may not fit where their mean does.
    """

    op: ReduceOp
    as_bytes: bool = False
    factor: Any = None
    divisor: int = 0
    is_wide: bool = False

    @property
    def changes_values(self) -> bool:
        """Whether other values are given than the tensors hold."""
        return self.factor is not None or self.is_wide


def plan_reduction(reduce_op: Any, dtype: Any, size: int) -> Reduction:
    """The reduction of `size` ranks that c10d's `reduce_op` means for tensors of `dtype`.

    Raises:
        TypeError: elements of `dtype` are not reduced so. NotImplementedError: there is no such op.
    """
    kind = getattr(reduce_op, "op", reduce_op)
    op = _OPS.get(kind)
    if op is None:
        raise NotImplementedError(f"collectived does not reduce by {kind}: expected one of {', '.join(map(str, _OPS))}")
    if dtype not in CARRIED:
        raise TypeError(f"collectived does not reduce {dtype}: convert it, or gather the tensors and reduce them here")
    is_fraction = dtype.is_floating_point or dtype.is_complex
    if kind == _KIND.PREMUL_SUM:
        if not is_fraction:
            raise TypeError(f"{dtype} has no PREMUL_SUM, for products need not fit: convert it to a floating type")
        return Reduction(op, factor=reduce_op.__getstate__()[1])
    if dtype is torch.bool:
        if op not in _OF_BOOL:
            raise TypeError(f"torch.bool has no {kind}: convert it, or take SUM, PRODUCT, MIN, MAX or a bitwise op")
        return Reduction(_OF_BOOL[op], as_bytes=True)
    if kind == _KIND.AVG and not is_fraction:
        if dtype is torch.uint64:  # PyTorch does not divide it
            raise TypeError("torch.uint64 has no AVG: convert it to torch.int64 or a floating type")
        return Reduction(ReduceOp.SUM, divisor=size, is_wide=dtype in _NARROW)
    return Reduction(op)


def plan_sparse_reduction(reduce_op: Any, dtype: Any, size: int) -> Reduction:
    """The same of sparse tensors, whose values are gathered, and added where they are to be.

    Raises:
        ValueError: they are not reduced by that op. TypeError, NotImplementedError: as for dense ones.
    """
    kind = getattr(reduce_op, "op", reduce_op)
    if kind not in _OF_SPARSE:
        raise ValueError(f"sparse tensors are reduced by SUM, AVG and PREMUL_SUM, got {kind}: make them dense")
    if dtype is torch.bool:
        raise TypeError("sparse tensors of torch.bool are not reduced: convert them to torch.uint8, or make them dense")
    planned = plan_reduction(reduce_op, dtype, size)
    return planned._replace(op=ReduceOp.SUM, divisor=size if kind == _KIND.AVG else 0)


def scale(values: Tensor, reduction: Reduction) -> Tensor:
    """Values as they are given to the service."""
    if reduction.is_wide:
        return values.to(torch.int64)
    return values if reduction.factor is None else (values * reduction.factor).to(values.dtype)


def divide(values: Tensor, reduction: Reduction) -> None:
    """Results as c10d wants them, of what the service has made."""
    if reduction.divisor:
        is_fraction = values.is_floating_point() or values.is_complex()
        values.div_(reduction.divisor, rounding_mode=None if is_fraction else "trunc")
