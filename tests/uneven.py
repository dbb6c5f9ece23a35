"""Rank functions for loaders of different length on different ranks (user report D14)."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ascend import AscendHybridStrategy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class Uneven(pl.LightningModule):
    """Logs the mean sample id; rank ``r`` has ``counts[r]`` batches of 4 in training and validation."""

    def __init__(self, train: list[int], val: list[int]) -> None:
        super().__init__()
        self.model, self.train_counts, self.val_counts = Net(), train, val

    def _loader(self, counts: list[int]) -> DataLoader:
        rank = int(os.environ["RANK"])
        first = 4 * sum(counts[:rank])
        ids = torch.arange(first, first + 4 * counts[rank]).float()
        return DataLoader(TensorDataset(ids[:, None].expand(-1, 4).contiguous()), batch_size=4)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train_counts)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val_counts)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0]).square().mean() * 1e-3

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        self.model(x)
        self.log("id", x[:, 0].mean(), batch_size=len(x), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(config: dict[str, Any], train: list[int], val: list[int]) -> dict[str, Any]:
    """Train two epochs; returns the logged mean, the seconds, and the weights."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=AscendHybridStrategy(**config), max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    module = Uneven(train, val)
    started = time.monotonic()
    trainer.fit(module)
    weights = trainer.strategy.parallel.state_dict()
    return {
        "id": float(trainer.callback_metrics["id"]),
        "seconds": time.monotonic() - started,
        "weights": {n: w.tolist() for n, w in weights.items()},
    }
