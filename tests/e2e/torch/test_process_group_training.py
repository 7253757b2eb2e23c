"""DDP and FSDP2 over `init_process_group("collectived")` train as over Gloo: the same bits with two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch.running import VERSION, run_well

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytestmark = pytest.mark.timeout(240)

since_2_6 = pytest.mark.skipif(VERSION < (2, 6), reason="PyTorch has no fully_shard for CPUs before 2.6")
CLOSE = {2: 0.0, 4: 1e-6}  # by how much any weight may differ from Gloo's, by number of ranks

DATA = """
def batches(seed=7):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64 * size, 20, generator=generator)
    targets = torch.randint(0, 5, (64 * size,), generator=generator)
    return inputs[rank::size], targets[rank::size]

def train(model, optimizer, clip=False):
    inputs, targets = batches()
    for _ in range(10):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

def both(weights):
    found = []
    for backend in ("gloo", "collectived"):
        init(backend, store=STORE + backend)
        found.append(weights())
        if backend == "collectived":
            first = found[-1].clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, found[-1]), "the same bits on all ranks"
        dist.destroy_process_group()
    print((found[0] - found[1]).abs().max().item())
"""
DDP = (
    DATA
    + """
def weights():
    torch.manual_seed(rank)  # DDP makes them equal
    layers = [torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 5)]
    model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.002)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

both(weights)
"""
)
FSDP = (
    DATA
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def weights():
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    one, two, three = torch.nn.Linear(20, 64), torch.nn.Linear(64, 33), torch.nn.Linear(33, 5)
    model = torch.nn.Sequential(one, torch.nn.ReLU(), two, torch.nn.ReLU(), three)
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), clip=True)
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])

both(weights)
"""
)


@pytest.mark.parametrize("ranks", CLOSE)
@pytest.mark.parametrize("program", [DDP, pytest.param(FSDP, marks=since_2_6)], ids=["ddp", "fsdp2"])
def test_weights_are_those_of_gloo(cluster: Any, tmp_path: Path, program: str, ranks: int) -> None:
    for output in run_well(cluster, tmp_path / "store", ranks, program):
        assert float(output) <= CLOSE[ranks]


EXTRAS = """
init()
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer

def step(model, count=1):
    for _ in range(count):
        model(torch.randn(4, 8)).sum().backward()

for more in ({"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)), **more)
    step(model, 3)
    with model.no_sync():
        step(model)
model = DDP(torch.nn.Linear(8, 8))
with model.join():
    step(model, 3 + rank)
for state, hook in (
    (None, default_hooks.fp16_compress_hook),
    (None, default_hooks.allreduce_hook),
    (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
):
    model = DDP(torch.nn.Linear(8, 8))
    model.register_comm_hook(state, hook)
    step(model, 4)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
step(model)
optimizer.step()
grads = model.module.weight.grad.clone()
dist.broadcast(grads, 0)
assert torch.equal(grads, model.module.weight.grad)
import tempfile
import torch.distributed.checkpoint as checkpoint
box = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(box)
state = {"weight": torch.arange(4.0)}
checkpoint.save(state, checkpoint_id=box[0])
state["weight"] = torch.zeros(4)
checkpoint.load(state, checkpoint_id=box[0])
assert state["weight"].tolist() == [0, 1, 2, 3]
dist.destroy_process_group()
"""


def test_hooks_join_static_graphs_zero_and_checkpoints_work(cluster: Any, tmp_path: Path) -> None:
    run_well(cluster, tmp_path / "store", 2, EXTRAS)
