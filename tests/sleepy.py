"""A model whose blocks sleep instead of computing: forward, gradients of activations and of parameters, each by itself."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from ascend_core import HybridConfig, ParallelModel, build_mesh, parallelize


class _Sleep(torch.autograd.Function):
    """The identity; takes its time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return grad.clone(), None, None


class Sleepy(nn.Module):
    """Multiplies by a weight near one.

    Args:
        forward_s: Seconds of a forward.
        input_s: Of the gradient of its input.
        weight_s: Of the gradient of its weight.
    """

    def __init__(self, forward_s: float = 0.0, input_s: float = 0.0, weight_s: float = 0.0) -> None:
        super().__init__()
        self.times = forward_s, input_s, weight_s
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward_s, input_s, weight_s = self.times
        return _Sleep.apply(x, forward_s, input_s) * _Sleep.apply(self.weight, 0.0, weight_s)


def spread(
    blocks: int = 8, times: tuple[float, float, float] = (0.0, 0.0, 0.0), device_type: str = "cpu", **config: Any
) -> ParallelModel:
    """Spread a model of sleeping blocks."""
    c = HybridConfig(**config)
    model = nn.Sequential(*[Sleepy(*times) for _ in range(blocks)])
    return parallelize(model, c, build_mesh(c, device_type), loss_fn=lambda y, t: (y - t).pow(2).mean())
