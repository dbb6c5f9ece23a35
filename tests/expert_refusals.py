"""Rank functions: MoE models that cannot be spread, and steps that cannot run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiny
import torch
from experts import DenseMoE, MoEGPT, build
from torch import nn

from ascend_core import HybridConfig, build_mesh, parallelize
from ascend_core.parallel.moe import MoELayer


def attempt(build_name: str, config: dict[str, Any]) -> tuple[str, str]:
    """Type and text of the error that spreading a model gives."""
    model: Callable[[], nn.Module] = globals()[build_name]
    try:
        c = HybridConfig(**config)
        parallelize(model(), c, build_mesh(c, "cpu"))
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def no_experts() -> nn.Module:
    return tiny.build()


def three_experts() -> nn.Module:
    return nn.Sequential(MoELayer(8, 8, 3, top_k=1))


def tied_experts() -> nn.Module:
    model = nn.Sequential(MoELayer(8, 8, 4), MoELayer(8, 8, 4))
    model[1].experts.down_proj = model[0].experts.down_proj
    return model


class MixingExperts(nn.Module):
    """Subtracts the mean over the tokens of a call, so that the result depends on which tokens come together."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        centred = tokens - tokens.mean(0)
        return sum(
            weights[:, k, None] * torch.einsum("td,tde->te", centred, self.weight[index[:, k]]) for k in range(index.shape[1])
        )


def mixing_experts() -> nn.Module:
    return nn.Sequential(MoELayer(8, 8, 4, experts=MixingExperts()))


def planned_experts() -> nn.Module:
    return MoEGPT(listed=True)


class OutsideBlocks(MoEGPT):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(tiny.DIM, 8, 4)


def unlike_replicas(batches: list[list[int]], config: dict[str, Any], options: dict[str, Any]) -> Any:
    """Losses against one process when replicas have batches of unlike sizes; or the error."""
    c = HybridConfig(**config)
    mesh = build_mesh(c, "cpu")
    model, plain = parallelize(build("plain", MoELayer, options), c, mesh), build("plain", DenseMoE, {})
    worst = 0.0
    try:
        for step, sizes in enumerate(batches):
            x, y = tiny.batch(step, sizes[mesh.rank("dp")])
            loss, _ = model.forward_backward(lambda b, _: tiny.token_loss(model.module(b[0]), b[1]), (x, y))
            worst = max(worst, abs(float(loss) - float(tiny.token_loss(plain(x), y))))
    except Exception as error:
        return type(error).__name__, str(error)
    return worst
