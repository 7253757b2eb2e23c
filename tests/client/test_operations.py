"""The operation that a call asks for."""

from __future__ import annotations

import numpy as np
import pytest

from collectived import operations
from collectived_proto.types import Broadcast, ReduceOp


class Tensor:
    """One number in memory that can be written, as a tensor of PyTorch's is: equal to itself alone."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number

    def __array__(self) -> np.ndarray:
        return np.array(self.number)


def test_equal_arguments_give_the_same_operation() -> None:
    assert operations.broadcast(1, 4) is operations.broadcast(1, 4)
    assert operations.broadcast(np.int64(1), 4) is operations.broadcast(np.int64(1), 4)
    assert operations.all_reduce("sum") is operations.all_reduce("sum")
    assert operations.all_reduce(ReduceOp.SUM) is operations.all_reduce(ReduceOp.SUM)
    assert operations.all_reduce("Mean").reduce_op is ReduceOp.MEAN
    assert operations.broadcast(1, 4) == operations.broadcast(np.int64(1), 4)


def test_a_root_in_a_tensor_is_read_at_every_call() -> None:
    root = Tensor(1)
    assert operations.broadcast(root, 4) == Broadcast(1)
    root.number = 2
    assert operations.broadcast(root, 4) == Broadcast(2)


def test_what_is_refused_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="a rank of this group, 0 to 3"):
            operations.broadcast(4, 4)
        with pytest.raises(TypeError):
            operations.broadcast("1", 4)  # type: ignore[arg-type]
