"""Functional collectives, compiled too, and tensors over a mesh: what PyTorch has no tests of in its wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch.running import run_well

pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytestmark = pytest.mark.timeout(150)

RANKS = 4
FUNCTIONAL = """
import torch.distributed._functional_collectives as functional
init()
world, mine = dist.group.WORLD, torch.full((2,), float(rank))
row = torch.arange(2.0 * size)
everybody = [float(one) for one in range(size) for _ in range(2)]

def gather(x): return functional.all_gather_tensor(x, 0, world)
def scatter(x): return functional.reduce_scatter_tensor(x, "sum", 0, world)
def exchange(x): return functional.all_to_all_single(x, None, None, world)
def spread(x): return functional.broadcast(x, 1, world)
def average(x): return functional.all_reduce(x, "avg", world)
def turn(x): return functional.permute_tensor(x, [(one + 1) % size for one in range(size)], world)

cases = [
    (gather, mine, everybody),
    (scatter, row, [size * 2.0 * rank, size * (2.0 * rank + 1)]),
    (exchange, row, [2.0 * rank, 2.0 * rank + 1] * size),
    (spread, mine, [1.0, 1.0]),
    (average, mine, [(size - 1) / 2] * 2),
    (turn, mine, [float((rank - 1) % size)] * 2),
]
for call, value, expected in cases:
    assert functional.wait_tensor(call(value)).tolist() == expected, call
every = torch.compile(
    lambda mine, row: [call(row if value is row else mine) + 1 for call, value, _ in cases],
    backend="aot_eager",
    fullgraph=True,
)
assert [found.tolist() for found in every(mine, row)] == [[one + 1 for one in expected] for _, _, expected in cases]
for found in functional.all_reduce_coalesced([mine, row], "sum", world):
    assert functional.wait_tensor(found).sum().item() in (sum(everybody), size * row.sum().item())
one, two = functional.all_gather_into_tensor_coalesced([mine, mine + 1], world)
assert one.tolist() == everybody and two.tolist() == [value + 1 for value in everybody]
one, two = functional.reduce_scatter_tensor_coalesced([row, row + 1], "sum", [0, 0], world)
assert one.tolist() == cases[1][2] and two.tolist() == [value + size for value in cases[1][2]]
dist.destroy_process_group()
"""


def test_functional_collectives(cluster: Any, tmp_path: Path) -> None:
    run_well(cluster, tmp_path / "store", RANKS, FUNCTIONAL)


DTENSOR = """
from torch.distributed.device_mesh import init_device_mesh
try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
except ImportError:  # PyTorch 2.4
    from torch.distributed._tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
init()
line = init_device_mesh("cpu", (size,))
grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rows", "columns"))
generator = torch.Generator().manual_seed(3)
left, right = (torch.randn(10, 10, generator=generator) for _ in range(2))  # uneven over four

def is_close(spread, whole):
    return torch.allclose(spread.full_tensor(), whole, atol=1e-5)

ways = [Replicate(), Shard(0), Shard(1)]
for one in ways:
    for other in ways:
        there = distribute_tensor(left, line, [one]).redistribute(line, [other])
        assert torch.equal(there.full_tensor(), left), (one, other)
        assert is_close(distribute_tensor(left, line, [one]) @ distribute_tensor(right, line, [other]), left @ right)
partial = DTensor.from_local(torch.full((8,), float(rank)), line, [Partial()])
total = torch.full((8,), float(sum(range(size))))
assert torch.equal(partial.redistribute(line, [Shard(0)]).full_tensor(), total)
assert torch.equal(partial.redistribute(line, [Replicate()]).to_local(), total)
for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]):
    spread = distribute_tensor(left, grid, placements)
    assert torch.equal(spread.full_tensor(), left)
    assert is_close(spread.softmax(1), left.softmax(1)) and is_close(spread.sum(), left.sum())
weights = distribute_tensor(right, grid, [Replicate(), Shard(1)]).requires_grad_()
(distribute_tensor(left, grid, [Shard(0), Replicate()]) @ weights).square().sum().backward()
alone = right.clone().requires_grad_()
(left @ alone).square().sum().backward()
assert torch.allclose(weights.grad.full_tensor(), alone.grad, rtol=1e-4, atol=1e-4)
dist.destroy_process_group()
"""


def test_tensors_over_a_mesh(cluster: Any, tmp_path: Path) -> None:
    run_well(cluster, tmp_path / "store", RANKS, DTENSOR)
