"""Trains a small network with Lightning, its gradients averaged by collectived:

    collectived launch --clients 2 -- python examples/train_lightning.py

One argument chooses the backend: `DDPStrategy(process_group_backend="collectived")`. The launcher has started the
ranks, so Lightning takes them from the environment of torchrun, which the launcher sets.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.update(OMP_NUM_THREADS="1")  # read when PyTorch is imported: ranks share the cores

try:
    import lightning
    import torch
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError:
    sys.exit("this example needs Lightning, which is not installed here: pip install 'collectived[torch]' lightning")

STEPS = 200


class Line(lightning.LightningModule):  # type: ignore[misc]  # Lightning need not be here
    """Learns y = 2 x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, number: int) -> Any:
        (x,) = batch
        return torch.nn.functional.mse_loss(self.layer(x), 2 * x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="collectived", cluster_environment=TorchElasticEnvironment()),
        max_steps=STEPS,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Line()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    weight = model.layer.weight.item()
    backend, ranks = torch.distributed.get_backend(), trainer.world_size
    print(f"backend {backend}, {ranks} ranks, weight {weight:.3f} (2.000)", flush=True)
    torch.distributed.destroy_process_group()
    if abs(weight - 2) > 0.01:
        sys.exit(1)


if __name__ == "__main__":
    main()
