"""PyTorch through real daemons: tensors as leaves, and DistributedDataParallel with our hook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.docs.blocks import claimed

import collectived as cd

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

ROOT = Path(__file__).parents[3]


def test_nests_with_tensors_are_reduced_and_broadcast_with_the_same_bits_on_all_ranks(cluster: Any) -> None:
    def weights(rank: int) -> Any:
        return torch.randn(300, 70, generator=torch.Generator().manual_seed(rank))

    def body(group: cd.Group) -> Any:
        small = [torch.full((3,), group.rank).bfloat16(), torch.tensor(group.rank), None, np.ones(2), 1.5]
        value = {"w": weights(group.rank), "b": small}
        reduced = group.all_reduce("mean", value)
        sent = group.broadcast(value, root=1)
        later = group.all_reduce("sum", value["w"].T, async_op=True).result()
        for leaf in (reduced["w"], *reduced["b"][:2], sent["w"], *sent["b"][:2], later):
            assert type(leaf) is torch.Tensor
        assert sent["b"][0].tolist() == [1, 1, 1] and type(sent["b"][4]) is float
        assert reduced["b"][0].dtype is torch.bfloat16 and reduced["b"][1] == 1.5
        return reduced["w"], sent["w"], later.T

    everybody = torch.stack([weights(rank) for rank in range(4)])
    results = cluster.run(4, body)
    assert torch.allclose(results[0][0], everybody.mean(dim=0), atol=1e-6)
    assert torch.equal(results[0][1], everybody[1])
    assert torch.allclose(results[0][2], everybody.sum(dim=0), atol=1e-6)
    for result in results:
        assert all(torch.equal(one, first) for one, first in zip(result, results[0], strict=True))


def test_tensors_over_worker_memory_are_reduced_in_place(cluster: Any) -> None:
    def body(session: cd.Session, group: cd.Group) -> Any:
        tensor = session.empty((1000,), torch.bfloat16, like=torch)
        tensor.fill_(group.rank)
        result = group.all_reduce("sum", tensor)
        tensor.fill_(-1)
        result += 1
        return result

    for result in cluster.run_sessions(4, body):
        assert result.dtype is torch.bfloat16 and torch.all(result == 7)


WRITE = """
import jax, torch
import collectived as cd

with cd.connect() as session, session.join() as group:
    memory = session.empty((1000,), like=torch).fill_(1)
    for result in (group.all_reduce("sum", memory), group.all_reduce("sum", torch.ones(5)), group.broadcast(memory)):
        result[0] = 7
        result.add_(1)
        result.numpy()[1] = 5
        print(result[:3].tolist())
    of_jax = group.all_reduce("sum", jax.device_put(memory.numpy()))
    torch.from_dlpack(of_jax)[0] = 7  # it takes any JAX array for writable
    print("alive", group.all_reduce("sum", memory)[0].item(), flush=True)
"""


def test_writing_to_a_tensor_never_ends_the_process(one_worker: Any) -> None:
    client = one_worker.client(0, 1, "written", WRITE)
    output, errors = client.communicate(timeout=50)
    assert (client.returncode, errors) == (0, "")
    assert output.splitlines() == ["[8.0, 5.0, 2.0]"] * 3 + ["alive 1.0"]


BEGIN = """
import sys, time
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel
import collectived as cd
from collectived.integrations.torch import allreduce_hook

torch.set_num_threads(1)

def network(kind, seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 700), torch.nn.Tanh(), torch.nn.Linear(700, 500)).to(kind)

def step(model, seed):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(8, 40, generator=generator).to(next(model.parameters()).dtype)
    model.zero_grad()
    model(data).square().mean().backward()

with cd.connect() as session, session.join(options=cd.CommunicationOptions(timeout_seconds=20)) as group:
    torch.distributed.init_process_group("gloo", init_method="file://" + sys.stdin.readline().strip(),
                                         rank=group.rank, world_size=group.size)
"""

AVERAGES = (
    BEGIN
    + """
    for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for view, wrap in ((False, lambda hook: hook), (True, lambda hook: hook), (False, fp16_compress_wrapper)):
            model = DistributedDataParallel(network(kind, group.rank), bucket_cap_mb=1, gradient_as_bucket_view=view)
            model.register_comm_hook(None, wrap(allreduce_hook(group)))
            for number in range(3):
                step(model, 10 * number + group.rank)
            got = [parameter.grad for parameter in model.parameters()]
            alone = network(kind, 0)  # DDP has handed out the weights of rank 0
            grads = []
            for rank in range(group.size):
                step(alone, 20 + rank)
                grads.append([parameter.grad.double() for parameter in alone.parameters()])
            for index, found in enumerate(got):
                expected = torch.stack([each[index] for each in grads]).mean(dim=0)
                assert found.dtype is kind
                assert torch.allclose(found.double(), expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
                assert torch.equal(found, group.broadcast(found)), "the same bits on all ranks"
    print("averaged", flush=True)
"""
)


def run(cluster: Any, tmp_path: Path, group: str, program: str) -> list[tuple[int, str, str]]:
    """Runs a program as two ranks, on a worker each: exit status, output and errors by rank."""
    clients = [cluster.client(rank, 2, group, program) for rank in range(2)]
    for client in clients:
        client.stdin.write(f"{tmp_path}/gloo\n")
        client.stdin.flush()
    ends = [client.communicate(timeout=100) for client in clients]
    return [(client.returncode, *end) for client, end in zip(clients, ends, strict=True)]


@pytest.mark.timeout(120)
def test_the_hook_averages_buckets_of_every_floating_type(cluster: Any, tmp_path: Path) -> None:
    for status, output, errors in run(cluster, tmp_path, "averages", AVERAGES):
        assert (status, output) == (0, "averaged\n"), errors


def test_the_hook_of_the_page_averages(cluster: Any, tmp_path: Path) -> None:
    (block,) = claimed(__file__)
    program = f"{BEGIN}    model = network(torch.float32, group.rank)\n{textwrap.indent(block.text, '    ')}"
    program += "    step(model, group.rank)\n"
    program += (
        "    print([torch.equal(one.grad, group.broadcast(one.grad)) for one in model.parameters()], flush=True)\n"
    )
    for status, output, errors in run(cluster, tmp_path, "page", program):
        assert (status, output) == (0, f"{[True] * 4}\n"), errors


FAILS = (
    BEGIN
    + """
    def outcome(change):
        try:
            if group.rank == 1:
                change()
            step(model, group.rank)
        except cd.errors.CollectiveError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return "went well"

    model = DistributedDataParallel(network(torch.float32, 0), bucket_cap_mb=1)
    model.register_comm_hook(None, allreduce_hook(group, cd.CommunicationOptions(timeout_seconds=1)))
    for _ in range(2):  # DDP makes its buckets anew after the first, over Gloo
        step(model, group.rank)
    print(outcome(lambda: group.all_reduce("sum", [1.0])))
    print(outcome(lambda: None))
    began = time.monotonic()
    print(outcome(lambda: torch.distributed.barrier() if group.rank else None))
    print(outcome(lambda: None))
    if group.rank == 0:
        assert time.monotonic() - began < 5
        torch.distributed.barrier()
"""
)


@pytest.mark.timeout(120)
def test_backward_raises_what_became_of_a_collective_and_nothing_hangs(cluster: Any, tmp_path: Path) -> None:
    outputs = []
    for _, output, errors in run(cluster, tmp_path, "fails", FAILS):
        outputs.append(output.splitlines())
        assert len(outputs[-1]) == 4, errors
    for lines in outputs:
        assert re.match(r"InvalidArgumentError: rank \d differs: .*all_reduce\(sum\)", lines[0])
        assert lines[1] == "went well"
        assert re.match("DeadlineExceededError: .*did not complete within 1.0 s: rank 1 ", lines[2])
        assert lines[3] == lines[2]


@pytest.mark.timeout(120)
def test_the_example_trains_the_same_weights_as_plain_ddp(tmp_path: Path) -> None:
    source = (ROOT / "examples/train_torch.py").read_text()
    (line,) = re.findall(r"^ +(collectived launch .*train_torch\.py)$", source, re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": folder}
        done = subprocess.run(
            line.split(), cwd=ROOT, env=environment, text=True, capture_output=True, timeout=110, check=False
        )
    assert done.returncode == 0, done.stderr + done.stdout
    assert re.search(r"test accuracy 0\.9[3-9]", done.stdout)
    (difference,) = re.findall(r"largest difference of a weight from plain DDP over Gloo: (\S+) ", done.stdout)
    assert float(difference) <= 1e-6
    assert done.stderr == ""
