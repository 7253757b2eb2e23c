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


class Reduction(NamedTuple):
    """One reduction for tensors of one dtype.

    Attributes:
        op: what the service does.
        as_bytes: elements are given as bytes: of bool.
        factor: what values are multiplied by before; None: nothing.
        divisor: what results are divided by after, rounding down; 0: nothing.
    """

    op: ReduceOp
    as_bytes: bool = False
    factor: Any = None
    divisor: int = 0


def plan_reduction(reduce_op: Any, dtype: Any, size: int) -> Reduction:
    """The reduction of `size` ranks that c10d's `reduce_op` means for tensors of `dtype`.

    Raises:
        TypeError: elements of `dtype` are not reduced. NotImplementedError: there is no such op.
    """
    kind = getattr(reduce_op, "op", reduce_op)
    op = _OPS.get(kind)
    if op is None:
        raise NotImplementedError(f"collectived does not reduce by {kind}: expected one of {', '.join(map(str, _OPS))}")
    if dtype not in CARRIED:
        raise TypeError(f"collectived does not reduce {dtype}: convert it, or gather the tensors and reduce them here")
    if dtype is torch.bool:
        if op not in _OF_BOOL:
            raise TypeError(f"torch.bool has no {kind}: convert it, or take SUM, PRODUCT, MIN, MAX or a bitwise op")
        return Reduction(_OF_BOOL[op], as_bytes=True)
    if kind == _KIND.PREMUL_SUM:
        return Reduction(op, factor=reduce_op.__getstate__()[1])
    if op is ReduceOp.MEAN and not (dtype.is_floating_point or dtype.is_complex):
        return Reduction(ReduceOp.SUM, divisor=size)
    return Reduction(op)


def scale(flat: Tensor, reduction: Reduction) -> Tensor:
    """Values as they are given to the service."""
    return flat if reduction.factor is None else (flat * reduction.factor).to(flat.dtype)


def divide(tensor: Tensor, reduction: Reduction) -> None:
    """Results as c10d wants them, of what the service has made."""
    if reduction.divisor:
        tensor.detach().floor_divide_(reduction.divisor)
