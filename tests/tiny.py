"""A small GPT, data, and the plain one-process run that every parallel path is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, HEADS, SEQ = 37, 32, 4, 12


class Attention(nn.Module):
    def __init__(self, fused: bool = True, heads: int = HEADS) -> None:
        super().__init__()
        self.head_dim, self.fused = DIM // heads, fused
        if fused:
            self.qkv = nn.Linear(DIM, 3 * DIM)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM) for _ in range(3))
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in parts)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(DIM), Attention(fused), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    def __init__(
        self, layers: int = 4, tied: bool = True, fused: bool = True, frozen_blocks: int = 0, views: bool = False
    ) -> None:
        super().__init__()
        self.views = views
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(SEQ, DIM) * 0.02)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tok.weight
        if frozen_blocks:  # and what comes before them
            for part in (self.tok, *self.blocks[:frozen_blocks]):
                part.requires_grad_(False)
            self.pos.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
            x = x.view(x.shape) if self.views else x
        return self.head(self.norm(x))


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def build(**options: Any) -> TinyGPT:
    torch.manual_seed(1)
    return TinyGPT(**options)


def batch(step: int, size: int = 16, seq: int = SEQ) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCAB, (size, seq + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def local_batch(step: int, rank: int, ranks: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of the global batch that data-parallel rank ``rank`` sees."""
    x, y = batch(step, size)
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


@dataclass
class History:
    """What a run leaves behind: per optimizer step the loss and norm, the first gradients, the last parameters."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]


STEPS, ACCUMULATE, CLIP = 10, 2, 0.5


def optimizer_and_schedule(parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
    # eps=1e-4: with Adam's default, a bias whose true gradient is zero turns rounding noise into full steps
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4, weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def plain_run(build_model: Callable[[], nn.Module] = build, steps: int = STEPS, accumulate: int = ACCUMULATE) -> History:
    model = build_model()
    optimizer, schedule = optimizer_and_schedule(model.parameters())
    history = History([], [], {}, {})
    for step in range(steps):
        total = 0.0
        for micro in range(accumulate):
            x, y = batch(step * accumulate + micro)
            loss = token_loss(model(x), y) / accumulate
            loss.backward()
            total += loss.item()
        if step == 0:
            history.grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        history.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        history.losses.append(total)
    history.params = {n: p.detach().clone() for n, p in model.state_dict().items()}
    return history
