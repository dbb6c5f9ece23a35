"""Cross-entropy of logits that are spread over the vocabulary, without gathering them.

A head with the style ``colwise_vocab`` gives logits as a DTensor, sharded on the last dim. Each rank computes with its
columns; what travels is three numbers per token instead of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Shard

from ascend_core.errors import ModelError
from ascend_core.parallel.tensor_collectives import chunk_sizes


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy that takes whole logits and logits spread over the vocabulary alike.

    Args:
        logits: ``(*, vocabulary)``. A DTensor sharded on the last dim stays sharded; anything else goes to
            ``torch.nn.functional.cross_entropy``.
        target: ``(*)`` class numbers, whole and equal on all ranks of the tensor-parallel group.
        ignore_index: Targets that count for nothing.
        reduction: ``"mean"`` over the targets that count, ``"sum"`` or ``"none"``.
        label_smoothing: Share of the target that is spread over all classes.

    Returns:
        A plain tensor: a scalar, or ``target``'s shape without a reduction. float32 for spread logits.

    Raises:
        ModelError: The logits are sharded in another way.
        ValueError: ``reduction`` is not known.

    Communication:
        For spread logits two all-reduces in forward, of one and of three float32 numbers per token; none in backward.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: use 'mean', 'sum' or 'none'")
    if not isinstance(logits, DTensor):
        flat = F.cross_entropy(
            logits.flatten(0, -2),
            target.flatten(),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        return flat.view(target.shape) if reduction == "none" else flat
    mesh, placements = logits.device_mesh, logits.placements
    if mesh.ndim != 1 or placements[0] != Shard(logits.dim() - 1):
        raise ModelError(
            f"vocab_parallel_cross_entropy: logits are placed as {placements}.",
            "Only logits sharded on their last dim, over one mesh axis, can be used without gathering them.",
            "Give the head the style 'colwise_vocab', and use its output as it is (flatten and shift are fine).",
        )
    local = logits.to_local().flatten(0, -2)
    labels = target.flatten()
    losses = _VocabParallelLoss.apply(local, labels, logits.shape[-1], ignore_index, label_smoothing, mesh.get_group())
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / (labels != ignore_index).sum() if reduction == "mean" else losses.sum()


class _VocabParallelLoss(Function):
    """Loss per token ``(tokens,)`` of this rank's logits ``(tokens, columns)``."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        total: int,
        ignore: int,
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        x = logits.float()
        first = sum(chunk_sizes(total, dist.get_world_size(group))[: dist.get_rank(group)])
        valid = target != ignore
        here = (target - first).masked_fill(~valid, -1)
        outside = (here < 0) | (here >= x.shape[1])
        here = here.masked_fill(outside, 0)
        largest = x.amax(dim=1) if x.shape[1] else x.new_full((len(x),), float("-inf"))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        x = x - largest.unsqueeze(1)
        exp = x.exp()
        wanted = x.gather(1, here.unsqueeze(1)).squeeze(1) if x.shape[1] else torch.zeros_like(largest)
        sums = torch.stack([exp.sum(dim=1), wanted.masked_fill(outside, 0.0), x.sum(dim=1)])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        losses = log_sum - (1 - smoothing) * sums[1] - smoothing / total * sums[2]
        ctx.save_for_backward(exp.div_(sums[0].unsqueeze(1)), here, outside, valid)
        ctx.smoothing, ctx.total, ctx.dtype = smoothing, total, logits.dtype
        return losses.masked_fill(~valid, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        probabilities, here, outside, valid = ctx.saved_tensors
        result = probabilities - ctx.smoothing / ctx.total
        if result.shape[1]:
            hit = (~outside).to(result.dtype) * (1 - ctx.smoothing)
            result.scatter_add_(1, here.unsqueeze(1), -hit.unsqueeze(1))
        result = result * (grad * valid).unsqueeze(1)
        return result.to(ctx.dtype), None, None, None, None, None
