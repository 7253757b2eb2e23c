"""Trains a small network with Accelerate, its gradients averaged by collectived:

    collectived launch --clients 2 -- python examples/train_accelerate.py

The process group is made before the Accelerator, which takes one that is there as it is.
"""

from __future__ import annotations

import os
import sys

os.environ.update(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")  # read when they are imported

try:
    import torch
    from accelerate import Accelerator
except ModuleNotFoundError:
    sys.exit("this example needs Accelerate, which is not installed here: pip install 'collectived[torch]' accelerate")

STEPS = 200


def main() -> None:
    torch.distributed.init_process_group("collectived")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    layer = torch.nn.Linear(1, 1)
    data = torch.utils.data.TensorDataset(torch.randn(8 * STEPS * accelerator.num_processes, 1))
    model, optimizer, loader = accelerator.prepare(
        layer, torch.optim.SGD(layer.parameters(), lr=0.1), torch.utils.data.DataLoader(data, batch_size=8)
    )
    for (x,) in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), 2 * x))
        optimizer.step()
    weight = accelerator.unwrap_model(model).weight.item()
    backend, ranks = torch.distributed.get_backend(), accelerator.num_processes
    print(f"backend {backend}, {ranks} ranks, weight {weight:.3f} (2.000)", flush=True)
    torch.distributed.destroy_process_group()
    if abs(weight - 2) > 0.01:
        sys.exit(1)


if __name__ == "__main__":
    main()
