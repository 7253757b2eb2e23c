"""Trains a small PyTorch network on handwritten digits, its gradients averaged by collectived:

    collectived launch --clients 2 -- python examples/train_torch.py

DistributedDataParallel hands out the first weights over Gloo, as ever; one line gives it our hook for the gradients.
The same training with plain DDP over Gloo follows, and the weights of both are compared.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read when PyTorch is imported: ranks share the cores

import sys
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import collectived as cd

try:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
except ModuleNotFoundError:
    sys.exit("this example needs PyTorch, which is not installed here: pip install 'collectived[torch]'")

from collectived.integrations.torch import allreduce_hook

STEPS, IMAGES_PER_RANK, LEARNING_RATE, HIDDEN = 300, 32, 0.1, 128
OPTIONS = cd.CommunicationOptions(timeout_seconds=60)
AT_MOST = 1e-6  # by how much any weight may differ


def load() -> tuple[Any, Any, Any, Any]:
    """Training images and labels, test images and labels: the same split on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    pictures, digits = torch.tensor(images[order] / 16, dtype=torch.float32), torch.tensor(labels[order])
    return pictures[360:], digits[360:], pictures[:360], digits[:360]


def train(group: cd.Group, images: Any, labels: Any, hook: Any = None) -> Any:
    """A trained network. With `hook`, that one averages the gradients, else Gloo does."""
    torch.manual_seed(group.rank)  # every rank begins with weights of its own; DDP hands out those of rank 0
    network = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    model = DistributedDataParallel(network)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for step in range(1, STEPS + 1):
        chosen = np.random.default_rng([7, step]).integers(0, len(labels), (group.size, IMAGES_PER_RANK))[group.rank]
        loss: Any = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if group.rank == 0 and step % 100 == 0:
            print(f"{'collectived' if hook else 'Gloo'}: step {step} of {STEPS}: loss {loss.item():.4f}")
    return network


def flat(network: Any) -> Any:
    return nn.utils.parameters_to_vector(network.parameters()).detach()


def main() -> None:
    images, labels, test_images, test_labels = load()
    with cd.connect() as session, session.join() as group:
        torch.distributed.init_process_group("gloo", rank=group.rank, world_size=group.size)
        ours = train(group, images, labels, allreduce_hook(group, OPTIONS))
        theirs = train(group, images, labels)
        torch.distributed.destroy_process_group()

        accuracy = (ours(test_images).argmax(dim=1) == test_labels).float().mean().item()
        largest = group.all_reduce("max", (flat(ours) - flat(theirs)).abs().max(), options=OPTIONS).item()
        if group.rank == 0:
            print(f"test accuracy {accuracy:.4f} (at least 0.93)")
            print(f"largest difference of a weight from plain DDP over Gloo: {largest:.1e} (at most {AT_MOST:.0e})")
    if largest > AT_MOST or accuracy < 0.93:
        sys.exit(1)


if __name__ == "__main__":
    main()
