"""`cpu:collectived,cuda:…`: a process group of PyTorch's own, of whose devices this backend carries some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch.running import VERSION, run_ranks, run_well

pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(VERSION < (2, 14), reason="PyTorch lets Python write backends since 2.14"),
]

INIT = """
init("cpu:collectived,cuda:gloo")
world, cpu = dist.group.WORLD, torch.device("cpu")
assert type(world) is dist.ProcessGroup
assert type(world._get_backend(cpu)).__name__ == "BackendCollectived"
assert world._get_backend(torch.device("cuda")).name() == "gloo"
"""
OPERATIONS = f"""
{INIT}
t = torch.full((3,), float(rank + 1))
dist.all_reduce(t)
assert t.tolist() == [3.0] * 3
dist.all_reduce(t, dist.ReduceOp.AVG)
assert t.tolist() == [3.0] * 3
dist.broadcast(t, 1)
dist.reduce(t, 0)
assert t.tolist() == [6.0 if rank == 0 else 3.0] * 3
sparse = torch.sparse_coo_tensor([[rank]], [1.0], (2,), check_invariants=True)
dist.all_reduce(sparse)
assert sparse.to_dense().tolist() == [1.0, 1.0]
mine = torch.full((2,), float(rank))
rows = [torch.empty(2), torch.empty(2)]
dist.all_gather(rows, mine)
whole = torch.empty(4)
dist.all_gather_single(whole, mine)
assert torch.cat(rows).tolist() == whole.tolist() == [0.0, 0.0, 1.0, 1.0]
dist.gather(mine, rows if rank == 0 else None)
dist.scatter(mine, [torch.zeros(2), torch.ones(2)] if rank == 0 else None)
assert mine.tolist() == [float(rank)] * 2
dist.reduce_scatter_single(mine, torch.arange(4.0))
assert mine.tolist() == [4.0 * rank, 4.0 * rank + 2]
dist.reduce_scatter(mine, [torch.zeros(2), torch.ones(2)])
assert mine.tolist() == [2.0 * rank] * 2
dist.all_to_all_single(mine, torch.arange(2.0) + rank)
dist.all_to_all(rows, [torch.full((2,), float(rank))] * 2)
assert torch.cat(rows).tolist() == whole.tolist()
if rank == 0:
    dist.send(mine, 1)
else:
    assert dist.recv(mine, 0) == 0
found = [None] * size
dist.all_gather_object(found, rank)
assert found == [0, 1]
work = dist.all_reduce(t, async_op=True)
future = work.get_future()
assert work.wait() and future.wait()[0].tolist() == t.tolist() == [9.0] * 3
dist.barrier()
pair = dist.new_group([0, 1])
dist.all_reduce(t, group=pair)
assert t.tolist() == [18.0] * 3
half = world.split_group([rank], group_name=f"half-{{rank}}")
dist.all_reduce(t, group=half)
assert half.size() == 1 and t.tolist() == [18.0] * 3
import torch.distributed._functional_collectives as functional
assert functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", world)).item() == 2
model = DDP(torch.nn.Linear(3, 3))
model(torch.full((2, 3), float(rank + 1))).sum().backward()
assert model.module.weight.grad.tolist() == [[3.0] * 3] * 3
dist.destroy_process_group()
init("cpu:gloo,cuda:collectived")
assert type(dist.group.WORLD._get_backend(torch.device("cuda"))).__name__ == "BackendCollectived"
t = torch.ones(1)
dist.all_reduce(t)
assert t.item() == 2
dist.destroy_process_group()
"""


def test_operations_of_its_devices_are_carried_here(cluster: Any, tmp_path: Path) -> None:
    run_well(cluster, tmp_path / "store", 2, OPERATIONS)


FAILURES = f"""
{INIT}
model = DDP(torch.nn.Linear(8, 8))
for _ in range(3):  # in the second one DDP arranges its buckets anew
    model(torch.ones(4, 8)).sum().backward()
try:
    if rank == 1:
        dist.barrier()
    model(torch.ones(4, 8)).sum().backward()
except dist.DistBackendError as error:
    print(error)
model.zero_grad()
model(torch.ones(4, 8)).sum().backward()
print("the next step went well")
try:
    world.split_group([1], group_name="part")
except dist.DistBackendError as error:
    print(error)
dist.barrier()
if rank == 1:
    os._exit(9)
try:
    model(torch.ones(4, 8)).sum().backward()
except dist.DistBackendError as error:
    print(error)
"""


def test_errors_name_the_rank_and_end_no_process(cluster: Any, tmp_path: Path) -> None:
    survivor, dead = run_ranks(cluster, tmp_path / "store", 2, FAILURES)
    assert (survivor.status, dead.status) == (0, 9), survivor.errors
    lines = survivor.output.splitlines()
    assert lines[0].startswith("rank 1 differs: the operation is barrier() there, all_reduce(sum) on rank 0")
    assert "the next step went well" in lines
    assert any(line.startswith("rank 0 is in no part of split_group") for line in lines)
    assert lines[-1].startswith("rank 1 (host ") and "is lost" in lines[-1]


def test_a_group_that_is_ours_altogether_stays_so(cluster: Any, tmp_path: Path) -> None:
    """With the recorder that PyTorch attaches to every process group since 2.15."""
    program = """
for name in ("collectived", "cpu:collectived"):
    init(name)
    world = dist.group.WORLD
    assert type(world).__name__ == "ProcessGroupCollectived"
    t = torch.ones(1)
    work = dist.all_reduce(t, async_op=True)
    assert work.wait() and work.is_completed() and t.item() == 2
    dist.destroy_process_group()
"""
    run_well(cluster, tmp_path / "store", 2, program)
