"""The five operators that ``torch.nn.SyncBatchNorm`` is made of; torch has no CPU kernel for them.

They are made of other operators of the device. Statistics are float32, one value per channel, as on CUDA; ``invstd`` is
``1 / sqrt(var + eps)`` of the biased variance.
"""

from __future__ import annotations

import torch


def _over(x: torch.Tensor) -> list[int]:
    """The dimensions that are averaged: all but the channels."""
    return [d for d in range(x.dim()) if d != 1]


def _per_channel(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return value.float().reshape([-1 if d == 1 else 1 for d in range(like.dim())])


def batch_norm_stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and invstd of this rank's batch."""
    x = input.float()
    return x.mean(_over(x)), torch.rsqrt(x.var(_over(x), unbiased=False) + eps)


def batch_norm_gather_stats_with_counts(
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and invstd of all ranks' batches; changes the running statistics in place.

    Args:
        input: Not read.
        mean: ``[ranks, channels]``.
        invstd: ``[ranks, channels]``.
        running_mean: ``[channels]``, or None.
        running_var: ``[channels]``, or None; it takes the unbiased variance.
        momentum: Weight of the new statistics.
        eps: As in the ranks' ``invstd``.
        counts: ``[ranks]``, elements per channel.
    """
    n = counts.float().unsqueeze(1)
    total = n.sum()
    means = mean.float()
    together = (means * n).sum(0) / total
    squares = ((invstd.float().pow(-2) - eps + (means - together).square()) * n).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(together.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_((squares / (total - 1)).to(running_var.dtype), alpha=momentum)
    return together, torch.rsqrt(squares / total + eps)


def batch_norm_elemt(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The normalized input; ``invstd`` holds eps already."""
    y = (input.float() - _per_channel(mean, input)) * _per_channel(invstd, input)
    if weight is not None:
        y = y * _per_channel(weight, input)
    if bias is not None:
        y = y + _per_channel(bias, input)
    return y.to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor | None, ...]:
    """This rank's sums of dy and of dy * (x - mean), and the gradients of weight and bias; None where not asked for."""
    dy = grad_out.float()
    sum_dy = dy.sum(_over(input))
    sum_dy_xmu = (dy * (input.float() - _per_channel(mean, input))).sum(_over(input))
    kind = mean.dtype if weight is None else weight.dtype
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        (sum_dy_xmu * invstd).to(kind) if weight_g else None,
        sum_dy.to(kind) if bias_g else None,
    )


def batch_norm_backward_elemt(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the input, from sums over all ranks."""
    total = count.float().sum()
    scale = _per_channel(invstd, input)
    centred = input.float() - _per_channel(mean, input)
    dx = grad_out.float() - _per_channel(sum_dy / total, input)
    dx = (dx - centred * scale.square() * _per_channel(sum_dy_xmu / total, input)) * scale
    if weight is not None:
        dx = dx * _per_channel(weight, input)
    return dx.to(input.dtype)


OPERATORS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)


def install(library: torch.library.Library) -> None:
    """Put them in the place of torch_npu's, which start NPU kernels."""
    for function in OPERATORS:
        library.impl(function.__name__, function, "PrivateUse1", allow_override=True)
