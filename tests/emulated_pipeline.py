"""torch's own pipeline schedules on emulated NPUs, compared with one CPU process."""

from __future__ import annotations

import emulated_parallel as parallel
import tiny
import torch
import torch.distributed as dist
from emulated import here
from torch import nn
from torch.distributed import pipelining

MICROBATCHES = 4


class Part(nn.Module):
    """One stage of the small GPT: a run of its blocks, with the embedding at the front or the head at the end."""

    def __init__(self, whole: tiny.TinyGPT, number: int, stages: int) -> None:
        super().__init__()
        run = len(whole.blocks) // stages
        self.first, self.last = number == 0, number == stages - 1
        if self.first:
            self.tok, self.pos = whole.tok, whole.pos
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in range(number * run, (number + 1) * run)})
        if self.last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.tok(x) + self.pos[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def build() -> tiny.TinyGPT:
    torch.manual_seed(1)
    return tiny.TinyGPT(layers=4, tied=False)


def schedule(name: str) -> float:
    """Four AdamW steps through a schedule; largest gap in losses and in this rank's parameters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, ours = build(), build()
    plain_losses = parallel.plain(reference, clip=None)
    kind = pipelining.schedules.get_schedule_class(name)
    looped = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    stages = 2 * size if looped else size
    numbers = [rank, rank + size] if looped else [rank]
    if name in ("ZBVZeroBubble", "DualPipeV"):  # stages go down the ranks and up again
        numbers = [rank, stages - 1 - rank]
    parts = [Part(ours, n, stages).to(here()) for n in numbers]
    built = [pipelining.PipelineStage(p, n, stages, here()) for n, p in zip(numbers, parts, strict=True)]
    runner = kind(built if looped else built[0], MICROBATCHES, loss_fn=tiny.token_loss)
    optimizer = parallel.adamw([p for part in parts for p in part.parameters()])
    losses = []
    for step in range(parallel.STEPS):
        x, y = (t.to(here()) for t in tiny.batch(step))
        seen: list[torch.Tensor] = []
        last = stages - 1 in numbers
        runner.step(*([x] if 0 in numbers else []), target=y if last else None, losses=seen if last else None)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(seen).mean()) if last else plain_losses[step])
    params = {n: p for part in parts for n, p in part.named_parameters()}
    return parallel.gap(losses, params, plain_losses, reference)
