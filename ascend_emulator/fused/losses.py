"""Losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ascend_emulator.fused.precision import maybe_wide, wide
from ascend_emulator.fused.registry import DOCS, NAME, formula
from ascend_emulator.fused.vjp import vjp

_REDUCTIONS = ("none", "mean", "sum")


def _cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, ignore_index: int, smoothing: float
) -> torch.Tensor:
    if x.dim() != 2 or target.dim() != 1:
        raise RuntimeError("npu_cross_entropy_loss: input must be (N, C) and target (N,)")
    if reduction not in _REDUCTIONS:
        raise RuntimeError(f"npu_cross_entropy_loss: reduction must be mean, sum or none, not {reduction!r}")
    if bool(((target < 0) | (target >= x.size(1))).any()):
        raise RuntimeError(
            f"npu_cross_entropy_loss: a target is not in [0, {x.size(1)})\n"
            "Why: a negative ignore_index (the default -100) means that no target is ignored, unlike in torch."
        )
    loss = F.cross_entropy(x, target, weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=smoothing)
    return loss if reduction == "none" else loss.reshape(1)


@formula(
    "npu_cross_entropy_loss",
    source=DOCS,
    checked="F.cross_entropy",
    backward="npu_cross_entropy_loss_backward",
    refused="lse_square_scale_for_zloss return_zloss",
)
def cross_entropy_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss (shape (1,) unless ``none``), log-probabilities, and two empty tensors for the z-loss, which does not exist yet."""
    x = wide(input)
    loss = _cross_entropy(x, target, maybe_wide(weight), reduction, ignore_index, label_smoothing)
    empty = input.new_empty(0)
    return loss.to(input.dtype), x.log_softmax(-1).to(input.dtype), empty, empty


@formula(
    "npu_cross_entropy_loss_backward",
    source=DOCS,
    checked="autograd of F.cross_entropy",
    ignored="grad_zloss lse_for_zloss",
    refused="lse_square_scale_for_zloss",
)
def cross_entropy_loss_backward(
    grad_loss: torch.Tensor,
    log_prob: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """Gradient by the input, with the documented limits: no label smoothing, and no options at all for the mean."""
    if label_smoothing or (reduction == "mean" and (weight is not None or ignore_index >= 0)):
        raise RuntimeError(
            "npu_cross_entropy_loss: the gradient does not support label_smoothing, nor weight and ignore_index with "
            "reduction='mean' (documented limits)"
        )
    w = maybe_wide(weight)
    return vjp(lambda x: _cross_entropy(x, target, w, reduction, ignore_index, 0.0), [log_prob], grad_loss)[0]


def _soft_cross_entropy(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -(labels * x.log_softmax(-1)).sum(-1)


@formula(
    "npu_softmax_cross_entropy_with_logits",
    source=NAME,
    checked="-(labels * log_softmax).sum(-1)",
    backward="npu_softmax_cross_entropy_with_logits_backward",
)
def softmax_cross_entropy_with_logits(input: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each row against probabilities, as TensorFlow's operator of that name."""
    return _soft_cross_entropy(wide(input), wide(labels)).to(input.dtype)


@formula("npu_softmax_cross_entropy_with_logits_backward", source=NAME, checked="autograd of the same")
def softmax_cross_entropy_with_logits_backward(grad: torch.Tensor, input: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Gradient by the logits: softmax - labels for labels that sum to one."""
    return vjp(lambda x: _soft_cross_entropy(x, wide(labels)), [input], grad)[0]
