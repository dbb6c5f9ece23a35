"""Softmax of scaled and masked scores."""

from __future__ import annotations

import torch

from ascend_emulator.fused.precision import wide
from ascend_emulator.fused.registry import OP_TEST, SOURCE, formula

_MASKED = -10000.0
"""Score of a masked position in torch_npu's own test, so a wholly masked row is uniform."""


@formula(
    "npu_scaled_masked_softmax",
    source=OP_TEST,
    checked="softmax of masked_fill",
    backward="npu_scaled_masked_softmax_backward",
    refused="fixed_triu_mask",
)
def scaled_masked_softmax(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax over the last dimension of ``x * scale``; True in the mask hides a position."""
    if mask.dtype != torch.bool:
        raise RuntimeError(f"npu_scaled_masked_softmax: the mask must be bool, not {mask.dtype}")
    return (wide(x) * scale).masked_fill(mask, _MASKED).softmax(-1).to(x.dtype)


@formula("npu_scaled_masked_softmax_backward", source=SOURCE, checked="autograd of the same", refused="fixed_triu_mask")
def scaled_masked_softmax_backward(y_grad: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Gradient by the scores; none at hidden positions."""
    p, g = wide(y), wide(y_grad)
    dx = scale * p * (g - (g * p).sum(-1, keepdim=True))
    return dx.masked_fill(mask, 0).to(y_grad.dtype)
