"""Normalizations: RMSNorm with its fused additions, and LayerNorm after an addition.

The statistics are float32 tensors of the input's shape with ones in place of the normalized dimensions.
"""

from __future__ import annotations

import torch

from ascend_emulator.fused.precision import wide
from ascend_emulator.fused.registry import DOCS, NAME, SOURCE, formula


def _normalized_dims(x: torch.Tensor, gamma: torch.Tensor, name: str) -> list[int]:
    if gamma.dim() > x.dim() or tuple(x.shape[x.dim() - gamma.dim() :]) != tuple(gamma.shape):
        raise RuntimeError(f"{name}: the shape of gamma {tuple(gamma.shape)} must be the end of the input's {tuple(x.shape)}")
    return list(range(-gamma.dim(), 0))


def _rstd(x: torch.Tensor, dims: list[int], epsilon: float) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(dims, keepdim=True) + epsilon)


def _rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    dims = _normalized_dims(x, gamma, name)
    rstd = _rstd(wide(x), dims, epsilon)
    return (wide(x) * rstd * wide(gamma)).to(x.dtype), rstd.float()


@formula("npu_rms_norm", source=DOCS, checked="F.rms_norm", backward="npu_rms_norm_backward")
def rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm and the reciprocal root mean square."""
    return _rms_norm(input, gamma, epsilon, "npu_rms_norm")


@formula("npu_rms_norm_backward", source=SOURCE, checked="autograd of F.rms_norm")
def rms_norm_backward(
    dy: torch.Tensor, input: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by the input and by gamma, the latter in float32.

    It uses the saved ``rstd``, so it needs no epsilon: with n = x * rstd and g = dy * gamma,
    dx = rstd * (g - n * mean(g * n)).
    """
    dims = _normalized_dims(input, gamma, "npu_rms_norm_backward")
    kept = list(range(input.dim() - gamma.dim()))
    normalized = wide(input) * rstd
    g = wide(dy) * wide(gamma)
    dx = rstd * (g - normalized * (g * normalized).mean(dims, keepdim=True))
    weighted = wide(dy) * normalized
    return dx.to(input.dtype), (weighted.sum(kept) if kept else weighted).float()


@formula("npu_add_rms_norm", source=DOCS, checked="F.rms_norm of the sum")
def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of a sum, its statistic, and the sum. torch_npu has no derivative for it."""
    total = (wide(x1) + wide(x2)).to(x1.dtype)
    y, rstd = _rms_norm(total, gamma, epsilon, "npu_add_rms_norm")
    return y, rstd, total


@formula("npu_gemma_rms_norm", source=NAME, checked="F.rms_norm with weight 1 + gamma")
def gemma_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm whose weight is 1 + gamma, as in Gemma. torch_npu has no derivative for it."""
    dims = _normalized_dims(input, gamma, "npu_gemma_rms_norm")
    rstd = _rstd(wide(input), dims, epsilon)
    return (wide(input) * rstd * (1 + wide(gamma))).to(input.dtype), rstd.float()


@formula("npu_add_layer_norm", source=SOURCE, checked="F.layer_norm of the sum", backward="npu_add_layer_norm_backward")
def add_layer_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, epsilon: float, additional_output: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """LayerNorm of a sum, its mean and reciprocal deviation, and the sum.

    Without ``additional_output`` an NPU does not write the sum; here it is zeros then, so that nobody relies on it.
    """
    dims = _normalized_dims(x1, gamma, "npu_add_layer_norm")
    dtype = x1.dtype if x1.dtype == x2.dtype else torch.float32
    total = (wide(x1) + wide(x2)).to(dtype)
    mean = wide(total).mean(dims, keepdim=True)
    rstd = torch.rsqrt((wide(total) - mean).square().mean(dims, keepdim=True) + epsilon)
    y = ((wide(total) - mean) * rstd * wide(gamma) + wide(beta)).to(dtype)
    return y, mean.float(), rstd.float(), total if additional_output else torch.zeros_like(total)


@formula("npu_add_layer_norm_backward", source=SOURCE, checked="autograd of F.layer_norm")
def add_layer_norm_backward(
    dy_opt: torch.Tensor | None,
    x1: torch.Tensor,
    x2: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor,
    gamma: torch.Tensor,
    dsum_opt: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by both summands (the same), gamma and beta; the latter two in float32."""
    dims = _normalized_dims(x1, gamma, "npu_add_layer_norm_backward")
    total = wide(x1) + wide(x2)
    dy = torch.zeros_like(total) if dy_opt is None else wide(dy_opt)
    normalized = (total - mean) * rstd
    g = dy * wide(gamma)
    dx = rstd * (g - g.mean(dims, keepdim=True) - normalized * (g * normalized).mean(dims, keepdim=True))
    if dsum_opt is not None:
        dx = dx + wide(dsum_opt)
    kept = list(range(x1.dim() - gamma.dim()))
    dgamma, dbeta = (t.sum(kept) if kept else t for t in (dy * normalized, dy))
    return dx.to(x1.dtype), dx.to(x2.dtype), dgamma.float(), dbeta.float()
