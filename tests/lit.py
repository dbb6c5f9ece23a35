"""A plain LightningModule that knows nothing of us, and rank functions that fit it."""

from __future__ import annotations

import importlib
from typing import Any

import tiny
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCHES, EPOCHS, VAL_BATCHES = 10, 2, 2


def lightning(namespace: str) -> Any:
    return importlib.import_module(namespace)


def make_module(namespace: str, build: Any = tiny.TinyGPT, **options: Any) -> Any:
    """Build the LightningModule of a namespace; one function, so that both namespaces test the same code."""
    pl = lightning(namespace)

    class LitGPT(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.model = build(**options)
            self.history: dict[str, list[float]] = {"loss": [], "val": [], "lr": []}
            self.norms: list[float] = []
            self.hooks: dict[str, int] = {"before_backward": 0, "after_backward": 0, "zero_grad": 0}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            self.trained_on = str(x.device)
            loss = tiny.token_loss(self.model(x), y)
            self.log("train_loss", loss, prog_bar=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            logits = self.model(x)
            self.log_dict({"val_loss": tiny.token_loss(logits, y), "val_mean": logits.mean()}, sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.01)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=BATCHES * EPOCHS // tiny.ACCUMULATE)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_before_backward(self, loss: torch.Tensor) -> None:
            self.hooks["before_backward"] += 1

        def on_after_backward(self) -> None:
            self.hooks["after_backward"] += 1

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if not hasattr(self.trainer.strategy, "parallel"):  # one process: the norm before clipping is torch's own
                self.norms.append(
                    float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))
                )

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.hooks["zero_grad"] += 1

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.history["loss"].append(float(self.trainer.callback_metrics["train_loss"]))
            norm = getattr(self.trainer.strategy, "last_grad_norm", None)
            if norm is not None and (not self.norms or float(norm) != self.norms[-1]):
                self.norms.append(float(norm))
            self.history["lr"].append(self.optimizers().param_groups[0]["lr"])

        def on_validation_epoch_end(self) -> None:
            self.history["val"].append(float(self.trainer.callback_metrics["val_loss"]))

    return LitGPT()


def loaders(ranks: int, rank: int, size: int = 16) -> tuple[DataLoader, DataLoader]:
    """Loaders without shuffling; data-parallel ranks interleave to the same global batch as one process sees."""

    def loader(first: int, batches: int) -> DataLoader:
        parts = [tiny.batch(first + i, size) for i in range(batches)]
        data = TensorDataset(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
        sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=False)
        return DataLoader(data, batch_size=size // ranks, sampler=sampler)

    return loader(0, BATCHES), loader(500, VAL_BATCHES)


def fit(
    namespace: str,
    folder: str,
    strategy: dict[str, Any] | None,
    model: dict[str, Any],
    ckpt_path: str | None = None,
    accelerator: str = "cpu",
    **trainer_options: Any,
) -> dict[str, Any]:
    """Fit on this rank: with the hybrid strategy, or plainly in one process when ``strategy`` is None."""
    import os

    pl = lightning(namespace)
    callbacks = importlib.import_module(f"{namespace}.callbacks")
    world = int(os.environ["WORLD_SIZE"])
    if strategy is None:
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(key, None)
        chosen: Any = "auto"
        devices = 1
    else:
        module = "lightning_ascend.pytorch" if namespace == "lightning.pytorch" else "lightning_ascend.pytorch_lightning"
        chosen = importlib.import_module(module).AscendHybridStrategy(**strategy)
        devices = world
    checkpoint = callbacks.ModelCheckpoint(dirpath=folder, monitor="val_loss", filename="best", save_last=True)
    stopping = callbacks.EarlyStopping("val_loss", patience=5)
    options = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": tiny.ACCUMULATE,
        "gradient_clip_val": tiny.CLIP,
        **trainer_options,
    }
    trainer = pl.Trainer(
        accelerator=accelerator, devices=devices, strategy=chosen, callbacks=[checkpoint, stopping], logger=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, use_distributed_sampler=False, **options,
    )  # fmt: skip
    lit = make_module(namespace, **model)
    rank, ranks = 0, 1
    if strategy is not None:
        from ascend_core.mesh import resolve_layout

        layout = resolve_layout(trainer.strategy.config, world)
        ranks = layout.dp
        rank = trainer.global_rank // layout.tp % layout.dp
    trainer.fit(lit, *loaders(ranks, rank), ckpt_path=ckpt_path)
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    history = {k: list(v) for k, v in lit.history.items()}
    hooks = dict(lit.hooks)
    again = trainer.validate(lit, loaders(ranks, rank)[1], ckpt_path="best", verbose=False)[0]["val_loss"]
    return {
        "history": history, "hooks": hooks, "again": again, "trained_on": lit.trained_on, "metrics": metrics, "best": checkpoint.best_model_path,
        "best_score": float(checkpoint.best_model_score), "steps": trainer.global_step,
        "norms": lit.norms,
    }  # fmt: skip


def fit_plain(namespace: str, folder: str, model: dict[str, Any], **options: Any) -> dict[str, Any]:
    return fit(namespace, folder, None, model, **options)


def saved(path: str) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=False)
