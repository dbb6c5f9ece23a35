"""Rank functions of the tensor-parallel tests: fused checkpoints, holes in plans, norms, dropout."""

from __future__ import annotations

from typing import Any

import tensor_models
import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from demands import spread
from torch import nn
from torch.distributed.tensor import DTensor

from ascend_core import AscendError


class Mlp(nn.Module):
    """A block: norm, split MLP, residual."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.inner, self.outer = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.down(self.inner(self.up(self.norm(x)))))


class Blocks(nn.Module):
    def __init__(self, dropout: float = 0.0, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(dropout) for _ in range(count))
        for layer in self.layers:  # norms that start at 1 and 0 would hide mistakes
            nn.init.normal_(layer.norm.weight)
            nn.init.normal_(layer.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def blocks(**options: Any) -> Blocks:
    torch.manual_seed(3)
    return Blocks(**options)


def square_sum(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((y - target) ** 2).sum()


def data(step: int, size: int = 2, seq: int = 6) -> torch.Tensor:
    return torch.randn(size, seq, 4, generator=torch.Generator().manual_seed(step))


def equal_everywhere(model: Any, group: Any = None) -> bool:
    """Whole parameters are bit-equal on all ranks of a group."""
    here = {n: p.detach() for n, p in model.named.items() if not isinstance(p, DTensor)}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, here, group=group)
    return all(torch.equal(p, other[n]) for other in everyone for n, p in here.items())


def clipped_norm() -> tuple[float, float, float]:
    """D06: norm here, norm of one process, and the largest gap of a clipped gradient."""
    plain, ours = blocks(), spread(blocks(), square_sum, tensor_parallel_size=2)
    square_sum(plain(data(0)), data(1)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    ours.train_step(data(0), data(1))
    norm = ours.clip_grad_norm_(1.0)
    reference = dict(plain.named_parameters())
    gap = 0.0
    for name, p in ours.named.items():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        gap = max(gap, float((grad - reference[name].grad).abs().max()))
    return float(norm), float(expected), gap


def sequence_norms() -> tuple[float, bool]:
    """D26: largest relative gap of a norm's or bias's gradient over 10 steps; whole parameters stay bit-equal."""
    plain = blocks()
    ours = spread(blocks(), square_sum, tensor_parallel_size=2, sequence_parallel=True)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (plain, ours)]
    reference, worst, same = dict(plain.named_parameters()), 0.0, True
    for step in range(10):
        square_sum(plain(data(step)), data(step + 1)).backward()
        ours.train_step(data(step), data(step + 1))
        for name, p in ours.named.items():
            if not isinstance(p, DTensor):
                grad = reference[name].grad
                worst = max(worst, float((p.grad - grad).abs().max() / grad.abs().max()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same &= equal_everywhere(ours)
    return worst, same


def accumulated(sequence: bool) -> float:
    """Gradients of two finished steps without zeroing in between, against one process; largest relative gap."""
    config = {"tensor_parallel_size": 2, "sequence_parallel": sequence}
    plain, ours = blocks(), spread(blocks(), square_sum, **config)
    for step in range(2):
        square_sum(plain(data(step)), data(step + 1)).backward()
        ours.train_step(data(step), data(step + 1))
    reference, worst = dict(plain.named_parameters()), 0.0
    for name, p in ours.named.items():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        worst = max(worst, float((grad - reference[name].grad).abs().max() / reference[name].grad.abs().max()))
    return worst


def dropout_masks(sequence: bool) -> dict[str, Any]:
    """D63 on dp 2 x tp 2: masks of dropout inside a region and behind it, and whether the shards are the plain init."""
    model = blocks(dropout=0.5)
    plain = blocks(dropout=0.5)
    ours = spread(model, square_sum, tensor_parallel_size=2, sequence_parallel=sequence)
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in ours.named.items()}
    exact = all(torch.equal(whole[n], p) for n, p in plain.named_parameters())
    masks: dict[str, list[Any]] = {"inner": [], "outer": []}
    for layer in model.layers:
        layer.inner.register_forward_hook(lambda m, args, out: masks["inner"].append((out != 0).int().tolist()))
        layer.outer.register_forward_hook(lambda m, args, out: masks["outer"].append((out != 0).int().tolist()))
    ours.train_step(data(0), data(1))
    return {**masks, "exact": exact}


def replicated() -> tuple[float, bool]:
    """D64 on dp 2 x tp 2 without ZeRO: largest parameter gap to one process after 3 steps; replicas bit-equal."""
    plain, ours = tiny.build(), spread(tiny.build(), tiny.token_loss, tensor_parallel_size=2)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, ours)]
    for step in range(3):
        x, y = tiny.batch(step)
        tiny.token_loss(plain(x), y).backward()
        ours.train_step(*tiny.local_batch(step, ours.mesh.rank("dp"), 2))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    replicas: list[Any] = [None, None]
    locals_ = {n: (p.to_local() if isinstance(p, DTensor) else p).detach() for n, p in ours.named.items()}
    dist.all_gather_object(replicas, locals_, group=ours.mesh.group("dp"))
    same = all(torch.equal(p, replicas[0][n]) for n, p in replicas[1].items())
    whole = ours.state_dict()
    gap = max((float((whole[n] - p).abs().max()) for n, p in plain.state_dict().items() if n in whole), default=0.0)
    return gap, same


def fused_checkpoint(family: str) -> dict[str, float]:
    """Adam states and frozen fused weights of a split model, in the original layout; and loaded again."""
    plain, inputs = tensor_models.FAMILIES[family]()
    built, _ = tensor_models.FAMILIES[family]()
    frozen = next(n for n, _ in plain.named_parameters() if "qkv" in n or "c_attn.weight" in n or "query_key_value" in n)
    for model in (plain, built):
        model.get_parameter(frozen).requires_grad_(False)
    ours = spread(built, None, tensor_parallel_size=2)
    optimizers = [torch.optim.Adam([p for p in m.parameters() if p.requires_grad], 1e-2, eps=1e-4) for m in (plain, ours)]
    ours.setup_optimizer(optimizers[1])

    def train() -> None:
        plain(**inputs).loss.backward()
        ours.forward_backward(lambda b, n: ours.module(**b).loss, inputs)
        ours.finish_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    train()
    state = [ours.state_dict(), ours.optimizer_state_dict(optimizers[1])]
    dist.broadcast_object_list(state, src=0)
    gaps = {"frozen": float((state[0][frozen] - plain.state_dict()[frozen]).abs().max()), "state": 0.0}
    names = {id(p): n for n, p in plain.named_parameters()}
    assert frozen not in state[1]["state"]
    for p, entry in optimizers[0].state.items():
        saved = state[1]["state"][names[id(p)]]["exp_avg"]
        gaps["state"] = max(gaps["state"], float((saved - entry["exp_avg"]).abs().max()))
    again, _ = tensor_models.FAMILIES[family]()
    again.get_parameter(frozen).requires_grad_(False)
    ours = spread(again, None, tensor_parallel_size=2)
    optimizers[1] = torch.optim.Adam([p for p in ours.parameters() if p.requires_grad], 1e-2, eps=1e-4)
    ours.setup_optimizer(optimizers[1])
    ours.load_state_dict(state[0])
    ours.load_optimizer_state_dict(optimizers[1], state[1])
    train()
    whole = ours.state_dict()
    gaps["resumed"] = max((float((whole[n] - p).abs().max()) for n, p in plain.state_dict().items() if n in whole), default=0.0)
    return gaps


def recomputed(sequence: bool) -> dict[str, float]:
    """Qwen3 on dp 2 x tp 2 with ZeRO-3 and recomputation: gradients against one process; largest relative gap by kind."""
    plain, inputs = tensor_models.FAMILIES["qwen3"]()
    built, _ = tensor_models.FAMILIES["qwen3"]()
    for model in (plain, built):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ours = spread(built, None, tensor_parallel_size=2, zero_stage=3, sequence_parallel=sequence)
    plain(**inputs).loss.backward()
    part = {k: v.chunk(2)[ours.mesh.rank("dp")] for k, v in inputs.items()}
    ours.forward_backward(lambda b, n: ours.module(**b).loss, part)
    ours.finish_gradients()
    reference, gaps = dict(plain.named_parameters()), {"norms": 0.0, "rest": 0.0}
    for name, p in ours.named.items():
        grad, expected = p.grad.full_tensor(), reference[name].grad
        kind = "norms" if "norm" in name else "rest"
        gaps[kind] = max(gaps[kind], float((grad - expected).abs().max() / expected.abs().max()))
    return gaps


def in_half_precision() -> float:
    """Relative gap of the loss under bf16 autocast, split and whole."""
    plain, inputs = tensor_models.FAMILIES["llama"]()
    ours = spread(tensor_models.FAMILIES["llama"]()[0], None, tensor_parallel_size=2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = float(plain(**inputs).loss)
        loss, _ = ours.forward_backward(lambda b, n: ours.module(**b).loss, inputs)
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in ours.parameters())
    return abs(float(loss) - expected) / expected


class Normed(nn.Module):
    """Attention-like block with a norm over the columns that a plan may split, and one that works on pieces."""

    def __init__(self, per_piece: bool) -> None:
        super().__init__()
        self.first, self.last, self.per_piece = nn.Linear(4, 8), nn.Linear(8, 4), per_piece
        self.norm = nn.LayerNorm(4 if per_piece else 8)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = self.norm(h.unflatten(-1, (-1, 4))).flatten(-2) if self.per_piece else self.norm(h)
        return x + self.last(h)


class Headed(nn.Module):
    """Blocks and a head outside of them."""

    def __init__(self, per_piece: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed(per_piece) for _ in range(2))
        self.head = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def refusal(plan: dict[str, str], per_piece: bool = True, **config: Any) -> str:
    """The error of a plan for :class:`Headed`, or a gradient gap if it is taken."""
    torch.manual_seed(0)
    plain = Headed(per_piece)
    torch.manual_seed(0)
    try:
        ours = spread(Headed(per_piece), F.mse_loss, tensor_parallel_size=2, tensor_parallel_plan=plan, **config)
    except AscendError as error:
        return f"{type(error).__name__}: {error.what}"
    target = torch.ones(2, 6, 6)
    F.mse_loss(plain(data(0)), target).backward()
    ours.train_step(data(0), target)
    gap = 0.0
    for name, p in plain.named_parameters():
        grad = ours.named[name].grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        gap = max(gap, float((grad - p.grad).abs().max() / p.grad.abs().max()))
    return "exact" if gap < 1e-5 else f"silently wrong by {gap}"
