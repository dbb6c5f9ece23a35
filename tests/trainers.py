"""Rank functions that look at what the Trainer does around a step."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import tiny
import torch
from evaluations import Classifier

from lightning_ascend import AscendHybridStrategy


class Watched(Classifier):
    """Notes whether validation runs in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: set[bool] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return tiny.token_loss(self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.modes.add(torch.is_inference_mode_enabled())
        self.model(batch[0])

    val_dataloader = Classifier.loader


def inference_mode(strategy: dict[str, Any]) -> set[bool]:
    """Validate and train where Lightning believes the backend is not gloo, as on an NPU."""
    from lightning.pytorch.loops import utilities

    class NotGloo:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.distributed, name)

        def get_backend(self) -> str:
            return "hccl"

    real, utilities.dist = utilities.dist, NotGloo()
    try:
        trainer = pl.Trainer(
            accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=AscendHybridStrategy(**strategy), max_epochs=2,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        module = Watched()
        trainer.fit(module)
        return module.modes
    finally:
        utilities.dist = real


def reductions() -> list[Any]:
    """The strategy's reductions on two replicas of two pipeline ranks each."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=4, strategy=AscendHybridStrategy(pipeline_parallel_size=2), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Watched())
    strategy = trainer.strategy
    dp = strategy.mesh.rank("dp")
    number = torch.tensor(3 + 2 * dp + (dp == 1))
    return [
        float(strategy.reduce(number.clone(), reduce_op="mean")), int(strategy.reduce(number.clone(), reduce_op="sum")),
        int(strategy.reduce(number.clone(), reduce_op="max")), strategy.reduce_boolean_decision(dp == 0),
        strategy.reduce_boolean_decision(dp == 0, all=False), strategy.all_gather(number.float()).tolist(), strategy.reduce("text"),
    ]  # fmt: skip


class TokenMean(pl.LightningModule):
    """A loss that is a mean over valid tokens, which microbatches hold in different numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.model = tiny.TinyGPT()

    def microbatch_weight(self, batch: Any) -> float:
        return float((batch[1] != -100).sum())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        x, y = tiny.batch(0, 32)
        for row in range(len(y)):
            y[row, 1 + row % 11 :] = -100
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


def token_mean(strategy: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Parameters after one epoch, whole, on rank 0."""
    chosen: Any = "auto" if strategy is None else AscendHybridStrategy(**strategy)
    devices = int(os.environ["WORLD_SIZE"])
    if strategy is None:
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(key, None)
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=chosen, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    module = TokenMean()
    trainer.fit(module)
    return trainer.strategy.lightning_module_state_dict()
