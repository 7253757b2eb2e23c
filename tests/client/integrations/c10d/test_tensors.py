"""Tensors as the service takes them: flat, and in the tensor's own memory where that can be."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

from collectived.integrations.c10d.tensors import TensorTarget, copy_into, flatten, join, to_leaf  # noqa: E402  # torch


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bool", "complex64", "uint16", "float8_e4m3fn"])
def test_a_row_major_tensor_is_written_where_it_lies(kind: str) -> None:
    tensor = torch.zeros(2, 3).to(getattr(torch, kind)).requires_grad_(kind == "float32")
    target = TensorTarget.of(tensor)
    assert target.is_in_place and target.leaf.ndim == 1
    target.leaf[...] = 1
    assert bool((tensor.detach().view(torch.uint8) != 0).any())
    assert target.leaf.dtype.itemsize == (1 if kind == "float8_e4m3fn" else tensor.element_size())


def test_any_other_tensor_gets_its_result_by_a_copy() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    target = TensorTarget.of(tensor)
    assert not target.is_in_place and target.leaf.tolist() == [0, 3, 1, 4, 2, 5]
    target.leaf += 10
    target.settle()
    assert tensor.tolist() == [[10, 13], [11, 14], [12, 15]]


def test_what_is_pending_on_a_tensor_is_carried_out() -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    assert to_leaf(flatten(tensor)).tolist() == [1 - 2j]
    target = TensorTarget.of(tensor)
    target.leaf[...] = 3 + 4j
    target.settle()
    assert tensor.tolist() == [3 + 4j]


def test_several_tensors_get_their_parts_of_one_result() -> None:
    tensors = [torch.empty(1), torch.empty(0), torch.empty(2, 2).t()]
    target = TensorTarget.joined(tensors)
    target.leaf[...] = range(5)
    target.settle()
    assert [tensor.tolist() for tensor in tensors] == [[0], [], [[1, 2], [3, 4]]]


def test_joined_tensors_lie_one_behind_the_other() -> None:
    flat, sizes = join([torch.ones(2, 2), torch.zeros(3)])
    assert flat.tolist() == [1, 1, 1, 1, 0, 0, 0] and sizes == [4, 3]


def test_elements_that_are_others_or_not_as_many_are_refused() -> None:
    for flat in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="came for a tensor of 2 of torch.float32"):
            copy_into(torch.empty(2), flat)
    with pytest.raises(ValueError, match="expected a dense tensor, got one of layout torch.sparse_coo"):
        flatten(torch.eye(2).to_sparse())
