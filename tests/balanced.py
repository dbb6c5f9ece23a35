"""Rank functions of the tests of stage balancing."""

from __future__ import annotations

from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch import nn

from ascend_core import HybridConfig, build_mesh, parallelize


class WideHead(nn.Module):
    """Six blocks and a head that costs more than three of them; part of it is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tok = nn.Embedding(tiny.VOCAB, tiny.DIM)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(tiny.DIM, tiny.DIM), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(tiny.DIM, 2 * tiny.DIM)
        self.out = nn.Linear(2 * tiny.DIM, tiny.VOCAB, bias=False)
        self.out.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(self.head(x))


def compare(cut: Any) -> tuple[list[tuple[int, int]], float]:
    """Stages, and the largest gap in losses and in this rank's parameters after three steps."""
    c = HybridConfig(pipeline_parallel_size=2, num_microbatches=4)
    wish = cut if dist.get_rank() == 0 or cut is None else [5]
    model = parallelize(WideHead(), c, build_mesh(c, "cpu"), loss_fn=tiny.token_loss, stage_cuts=wish)
    plain = WideHead()
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5) for m in (model, plain)]
    worst = 0.0
    for step in range(3):
        x, y = tiny.batch(step)
        loss = tiny.token_loss(plain(x), y)
        loss.backward()
        worst = max(worst, abs(float(model.train_step(x, y)) - float(loss)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    reference = dict(plain.named_parameters())
    worst = max(worst, *(float((p - reference[n]).abs().max()) for n, p in model.named.items()))
    assert model.gates is not None
    return model.gates.stages, worst


def refusal(config: dict[str, Any], cut: Any) -> str:
    c = HybridConfig(**config)
    try:
        parallelize(WideHead(), c, build_mesh(c, "cpu"), stage_cuts=cut)
    except ValueError as error:
        return str(error)
    return ""
