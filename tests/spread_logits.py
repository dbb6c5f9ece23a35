"""Rank functions: cross-entropy of logits that stay spread over the vocabulary."""

from __future__ import annotations

from typing import Any

import tiny
import torch
import torch.nn.functional as F
from demands import spread
from torch.distributed.tensor import DTensor, Shard

from ascend_core import HybridConfig, build_mesh
from ascend_core.parallel import vocab_parallel_cross_entropy

VOCAB_PLAN = {
    "tok": "embedding",
    "head": "colwise_vocab",
    "blocks.*.attn.qkv": "fused_colwise",
    "blocks.*.attn.proj": "rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
}


def vocabulary_loss(options: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """A tied embedding and head (37 rows over 2 ranks), the loss from spread logits, against one process."""

    def targets(y: torch.Tensor) -> torch.Tensor:
        return y.masked_fill(torch.arange(y.shape[1]) > 8, -100)

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(logits.to_local().shape) if isinstance(logits, DTensor) else None)
        result = vocab_parallel_cross_entropy(logits, targets(y), **options)
        return result if options.get("reduction") != "none" else result.sum() / 50

    def plain_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = F.cross_entropy(logits.flatten(0, 1), targets(y).flatten(), **options)
        return result if options.get("reduction") != "none" else result.sum() / 50

    shapes: list[Any] = []
    plain = tiny.build()
    ours = spread(tiny.build(), loss, tensor_parallel_size=2, tensor_parallel_plan=VOCAB_PLAN, **config)
    x, y = tiny.batch(0, size=4)
    expected = plain_loss(plain(x), y)
    expected.backward()
    got = ours.train_step(x, y)
    gaps = {"loss": abs(float(got) - float(expected))}
    reference = dict(plain.named_parameters())
    for name in ("tok.weight", "norm.weight", "pos"):
        p = ours.named.get(name)
        if p is not None and p.grad is not None:
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            gaps[name] = float((grad - reference[name].grad).abs().max() / reference[name].grad.abs().max())
    with torch.no_grad():
        gaps["logits"] = float((ours(x) - plain(x)).abs().max())
    return {"gaps": gaps, "shapes": shapes}


def large_logits() -> float:
    """Loss and gradient of logits in the hundreds, the largest on one rank only; largest gap to torch's."""
    mesh = build_mesh(HybridConfig(tensor_parallel_size=2), "cpu").device_mesh["tp"]
    whole = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)) * 200
    whole[:, 9] += 500
    whole.requires_grad_()
    target = torch.tensor([0, 10, 9, -100, 5])
    expected = F.cross_entropy(whole, target)
    expected.backward()
    part = whole.detach().chunk(2, dim=1)[mesh.get_local_rank()].clone().requires_grad_()
    spread_logits = DTensor.from_local(part, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride())
    got = vocab_parallel_cross_entropy(spread_logits, target)
    got.backward()
    gap = (part.grad - whole.grad.chunk(2, dim=1)[mesh.get_local_rank()]).abs().max()
    return max(float(gap), abs(float(got) - float(expected)) / float(expected))
