"""Rank functions that give the strategy what it must refuse, and report how it did."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import lit
import tiny
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ascend import AscendHybridStrategy


class Plain(pl.LightningModule):
    """Trains a TinyGPT; subclasses break one thing each."""

    layers = 4

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.TinyGPT(layers=self.layers)
        self.stepped = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return tiny.token_loss(self.model(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.stepped += 1

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*tiny.batch(0, 32)), batch_size=8)


class TwoBlocks(Plain):
    layers = 2


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Plain):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class CallsTwice(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return tiny.token_loss(self.model(x), y) + tiny.token_loss(self.model(x), y)


class NeverCalls(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model.tok.weight.sum()


class ReturnsNone(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model(batch[0])


class RaisesInLoss(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model(batch[0])
        raise ValueError("labels are wrong")


class SkipAround(Plain):
    """Adds the embedding's output behind the blocks, where other stages do not have it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SkipGPT()


class SkipGPT(tiny.TinyGPT):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = skip = self.tok(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + skip))


class Branches(Plain):
    """Blocks that are not run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.model = BackwardsGPT()


class BackwardsGPT(tiny.TinyGPT):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


class LateModule(Plain):
    """Uses a module before the blocks that is registered after them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LateGPT()


class LateGPT(tiny.TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(tiny.DIM, tiny.DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.late(self.tok(ids) + self.pos[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class HeadOnly(Plain):
    """Gives the optimizer parameters that only the last stage has."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.norm.parameters(), lr=0.1)


class LogsObject(Plain):
    def __init__(self) -> None:
        super().__init__()
        import torchmetrics

        self.metric = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss)
        self.log("metric", self.metric)
        return loss


class SplitByGlobalRank(Plain):
    def train_dataloader(self) -> DataLoader:
        rank = self.trainer.global_rank
        return DataLoader(TensorDataset(*tiny.batch(rank, 32)), batch_size=8)


class Unnamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.beta(self.alpha(x).softmax(-1))  # needs all columns


class NoPlan(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Unnamed(), Unnamed())


class HalfPlanned(Plain):
    """Blocks of the second stage have nothing that could be split; the first stage must hear of it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(lit_mlp(), Unnamed())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(torch.ones(8, 8)).sum()


def attempt(name: str, strategy: dict[str, Any], trainer: dict[str, Any] | None = None) -> dict[str, Any]:
    """Fit and report the error: its type, text, whether a step was taken, and how long it took."""
    import os

    start = time.monotonic()
    module: Any = None
    try:
        chosen = AscendHybridStrategy(**strategy)
        options = {
            "accelerator": "cpu",
            "devices": int(os.environ["WORLD_SIZE"]),
            "max_steps": 2,
            "logger": False,
            **(trainer or {}),
        }
        t = pl.Trainer(
            strategy=chosen, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, **options,
        )  # fmt: skip
        module = globals()[name]()
        t.fit(module)
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "stepped": getattr(module, "stepped", 0),
            "s": time.monotonic() - start,
        }
    return {"type": "none", "text": "", "stepped": module.stepped, "s": time.monotonic() - start}


# ---- which samples each rank sees (D27)


class Ids(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(16))


class OwnSampler(torch.utils.data.Sampler):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(reversed(range(self.size)))

    def __len__(self) -> int:
        return self.size


class OwnBatches(torch.utils.data.BatchSampler):
    """A user's own class; torch's plain one loses its batch size in Lightning, whatever the strategy."""


class Reader(pl.LightningModule):
    """A regression on sample ids that remembers which it saw."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.seen = kind, []
        self.model = nn.Sequential(*[lit_mlp() for _ in range(2)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch.float().unsqueeze(-1).expand(-1, 8)).pow(2).mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def train_dataloader(self) -> DataLoader:
        ids = torch.arange(16)
        if self.kind == "iterable":
            return DataLoader(Ids(), batch_size=2)
        if self.kind == "sampler":
            return DataLoader(ids, batch_size=2, sampler=OwnSampler(16))
        if self.kind == "batch_sampler":
            return DataLoader(ids, batch_sampler=OwnBatches(OwnSampler(16), 2, drop_last=False))
        return DataLoader(ids, batch_size=2, shuffle=True)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu())


def lit_mlp() -> nn.Module:
    return Mlp()


def read(kind: str, strategy: dict[str, Any]) -> list[list[int]]:
    import os

    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=AscendHybridStrategy(**strategy), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    reader = Reader(kind)
    trainer.fit(reader)
    return reader.seen


__all__ = ["attempt", "lit", "read"]
