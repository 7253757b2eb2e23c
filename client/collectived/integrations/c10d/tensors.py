"""Tensors as collectives see them: flat, dense, without a gradient, in the memory of the tensor where that can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectived.values.libraries import from_torch, to_torch

Tensor = Any  # torch.Tensor
Leaf = Any  # a NumPy array of one axis, or a tensor on a GPU

CARRIED = frozenset(
    {
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)
_OF_NUMPY = CARRIED - {torch.bfloat16}


def flatten(tensor: Tensor, as_bytes: bool = False) -> Tensor:
    """A tensor in one dimension, row-major; in its own memory where it is row-major itself, else in a copy.

    Args:
        as_bytes: see the elements as uint8; elements that the service does not carry always are.

    Raises:
        ValueError: it is sparse.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"expected a dense tensor, got one of layout {tensor.layout}")
    flat = tensor.detach()
    if not flat.is_contiguous():
        flat = flat.contiguous()
    flat = flat.resolve_conj().resolve_neg().view(-1)
    return flat.view(torch.uint8) if as_bytes or flat.dtype not in CARRIED else flat


def to_leaf(flat: Tensor) -> Leaf:
    """A flat tensor as the service takes it: what is on the host as an array that looks into it."""
    if not flat.is_cpu:
        return flat
    return flat.numpy() if flat.dtype in _OF_NUMPY else from_torch(flat)


def as_tensor(leaf: Leaf) -> Tensor:
    """The flat tensor of a result."""
    return leaf if isinstance(leaf, torch.Tensor) else to_torch(leaf)


class TensorTarget:
    """Where a result goes. The service writes into `leaf`; `settle` brings it to the tensors if it does not lie there.

    Attributes:
        leaf: one axis; of the tensor's elements at first, so that it serves as the value too.
        flat: the same as a tensor.
    """

    __slots__ = ("_is_wide", "_tensors", "flat", "leaf")

    def __init__(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """`tensors` are to be filled from `flat`, one behind the other."""
        self.flat = flat
        self._tensors = tensors
        self._is_wide = False
        self.leaf = to_leaf(flat)

    @classmethod
    def of(cls, tensor: Tensor, as_bytes: bool = False) -> TensorTarget:
        """One tensor, in place where it is row-major."""
        flat = flatten(tensor, as_bytes)
        return cls(flat, () if flat.data_ptr() == tensor.data_ptr() else (tensor,))

    @classmethod
    def wide(cls, tensor: Tensor) -> TensorTarget:
        """One tensor of integers, for a result of int64; `leaf` has no elements at first."""
        target = cls(torch.empty(tensor.numel(), dtype=torch.int64, device=tensor.device), (tensor,))
        target._is_wide = True
        return target

    @classmethod
    def joined(cls, tensors: Sequence[Tensor]) -> TensorTarget:
        """Several tensors, which get their parts of one result in order."""
        if len(tensors) == 1:
            return cls.of(tensors[0])
        first = flatten(tensors[0])
        length = sum(map(carried_length, tensors))
        return cls(torch.empty(length, dtype=first.dtype, device=first.device), tensors)

    @property
    def is_in_place(self) -> bool:
        return not self._tensors

    def settle(self) -> None:
        """The result is in `leaf`."""
        if self._tensors and self.flat.is_cuda:  # its memory was that of another stream, which may get it back
            self.flat.record_stream(torch.cuda.current_stream(self.flat.device))
        start = 0
        for tensor in self._tensors:
            end = start + carried_length(tensor)
            part = self.flat[start:end]
            copy_into(tensor, part.to(tensor.dtype) if self._is_wide else part)
            start = end


def carried_length(tensor: Tensor) -> int:
    """How many elements a tensor has as `flatten` gives them."""
    count: int = tensor.numel()
    return count if tensor.dtype in CARRIED else count * tensor.element_size()


def copy_into(tensor: Tensor, flat: Tensor) -> None:
    """Give a tensor the elements of a flat one, of its dtype or of bytes.

    Raises:
        ValueError: they are others, or not as many.
    """
    if flat.dtype is torch.uint8 and flat.dtype is not tensor.dtype and flat.numel() % tensor.element_size() == 0:
        flat = flat.view(tensor.dtype)
    if flat.dtype is not tensor.dtype or flat.numel() != tensor.numel():
        raise ValueError(
            f"{flat.numel()} elements of {flat.dtype} came for a tensor of {tensor.numel()} of {tensor.dtype}"
        )
    tensor.detach().copy_(flat.view(tensor.shape))


def join(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Several tensors one behind the other, and how many elements each has."""
    flats = [flatten(tensor) for tensor in tensors]
    return (torch.cat(flats) if len(flats) > 1 else flats[0]), [flat.numel() for flat in flats]
