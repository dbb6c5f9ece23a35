"""Rank functions of D82: what a stage receives gets no gradient in some microbatches, or can have none."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ascend_core import HybridConfig, build_mesh, parallelize


class Layer(nn.Module):
    """A layer that may leave its input alone: then its output depends on its own weights only.

    Args:
        ignores: ``"odd"`` samples' microbatches, ``"all"``, or ``"none"``.
    """

    def __init__(self, ignores: str = "none") -> None:
        super().__init__()
        self.linear, self.gate, self.ignores = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), ignores

    def forward(self, x: torch.Tensor, mask: torch.Tensor, odd: bool) -> torch.Tensor:
        if self.ignores == "all" or (self.ignores == "odd" and odd):
            return torch.tanh(self.linear(torch.ones_like(x.detach()))) * self.gate * mask
        return torch.tanh(self.linear(x)) * self.gate * mask


class Ignoring(nn.Module):
    """Passes activation, an integer mask and a plain value to every layer."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer(kind) for kind in kinds)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x, mask = self.first(batch), (batch > 0).long()
        for layer in self.layers:
            x = layer(x, mask, bool(batch[0, 0] < 0))
        return x


class Step(nn.Module):
    """A layer on integers: what a stage sends has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.ones((), dtype=torch.long))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids + self.by) % 7


class Counting(nn.Module):
    """Two layers on integers, an embedding among the layers, and two layers on what it gives."""

    def __init__(self) -> None:
        super().__init__()
        layers = [Step(), Step(), nn.Embedding(7, 4), nn.Linear(4, 4)]
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            ids = layer(ids)
        return ids


def gradients(schedules: tuple[str, ...], kinds: tuple[str, ...] | None) -> dict[str, float]:
    """By schedule, the largest gap to one process in loss and gradients, no gradient counting as zeros; kinds None: integers."""
    gaps = {}
    for schedule in schedules:
        torch.manual_seed(5)
        plain: Any = Counting() if kinds is None else Ignoring(kinds)
        x = torch.arange(8) % 7 if kinds is None else torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        if kinds is not None:
            x[:, 0] = torch.tensor([1.0, -1.0]).repeat(4)
        target = torch.zeros(8, 4)
        c = HybridConfig(pipeline_parallel_size=2, num_microbatches=8, schedule=schedule)
        model = parallelize(copy.deepcopy(plain), c, build_mesh(c, "cpu"), loss_fn=F.mse_loss, stage_cuts=cuts(c))
        losses = [F.mse_loss(plain(part), goal) / 8 for part, goal in zip(x.split(1), target.split(1), strict=True)]
        torch.stack(losses).sum().backward()
        loss = model.train_step(x, target)
        reference = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
        mine = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named.items()}
        found = [float((g - reference[n]).abs().max()) for n, g in mine.items()]
        gaps[schedule] = max([abs(float(loss) - sum(map(float, losses))), *found])
    return gaps


def cuts(c: HybridConfig) -> list[int]:
    """One layer per stage, or two."""
    return [1, 2, 3] if c.num_stages_per_rank == 2 else [2]
