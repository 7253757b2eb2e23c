"""Trains a PyTorch network with DistributedDataParallel as an elastic job: ranks may die and others may come.

    collectived launch --clients 3 --max-restarts 9 -- python examples/torch_elastic.py

A group of the service has the ranks that take part, and DDP gets a process group of the same ranks. When a rank is
killed, `backward()` raises an error that names it. The others join both again and go on from the step that they had
reached. The killed rank is started again, and let in. SIGTERM to any rank ends the job: all stop after the same step.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read when PyTorch is imported: ranks share the cores

import signal
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import collectived as cd

try:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
except ModuleNotFoundError:
    sys.exit("this example needs PyTorch, which is not installed here: pip install 'collectived[torch]'")

FEWEST, MOST, SETTLE = 1, 4, 0.5  # ranks; seconds to wait for more of them
STEPS = int(sys.argv[1]) if sys.argv[1:] else 500
ROWS, COLUMNS, LEARNING_RATE = 1024, 16, 0.05
TIMEOUT = timedelta(seconds=30)  # a rank that is stuck for longer is left behind


@dataclass
class Model:
    """The state of the training. A rank that starts makes a new one, and gets that of the rank that is furthest."""

    network: Any
    step: int = 0


def load() -> tuple[Any, Any]:
    """Inputs and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, COLUMNS, generator=generator)
    return inputs, inputs @ torch.randn(COLUMNS, 1, generator=generator)


def line_up(group: cd.Group, model: Model) -> None:
    """Give every rank the step and the weights of the rank that is furthest."""
    steps = group.all_gather(torch.tensor([model.step]))
    furthest = int(steps.argmax())
    weights = torch.nn.utils.parameters_to_vector(model.network.parameters())
    torch.nn.utils.vector_to_parameters(group.broadcast(weights, root=furthest), model.network.parameters())
    model.step = int(steps[furthest])


def open_process_group(group: cd.Group) -> None:
    """Open a process group of the same ranks, which meet in a store that rank 0 opens."""
    store = dist.TCPStore("localhost", 0, None, True, TIMEOUT, False) if group.rank == 0 else None
    port = int(group.broadcast(torch.tensor(store.port if store else 0)))
    store = store or dist.TCPStore(group.members[0].host, port, None, False, TIMEOUT, False)
    dist.init_process_group("collectived", store=store, rank=group.rank, world_size=group.size, timeout=TIMEOUT)


def train(group: cd.Group, model: Model, ending: threading.Event) -> bool:
    """Train to the end, or until a waiting rank can be let in. Return whether it was to the end."""
    network = DistributedDataParallel(model.network)
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    inputs, targets = (part[group.rank :: group.size] for part in load())
    over = model.step >= STEPS
    while not over and not (group.waiting and group.size < MOST):  # the same on all ranks
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(network(inputs), targets).backward()
        ending_ranks = group.all_reduce("sum", int(ending.is_set()))
        optimizer.step()
        model.step += 1
        over = model.step >= STEPS or ending_ranks > 0
    return over


def main() -> None:
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    torch.manual_seed(0)
    model, over = Model(torch.nn.Linear(COLUMNS, 1)), False
    with cd.connect(timeout=60) as session:
        group = session.join("/torch-elastic", (FEWEST, MOST), settle=SETTLE)
        while not over:
            try:
                line_up(group, model)
                print(f"rank {group.rank} of {group.size} from step {model.step}", flush=True)
                open_process_group(group)
                over = train(group, model, ending)
            except (dist.DistError, cd.errors.CollectiveError) as error:
                print(f"after step {model.step}: {error}", flush=True)
            if dist.is_initialized():
                dist.destroy_process_group()
            if not over:
                group.rejoin()
    weights = torch.nn.utils.parameters_to_vector(model.network.parameters())
    print(f"ended after step {model.step}: weights {weights.sum().item():.6f}", flush=True)


if __name__ == "__main__":
    main()
