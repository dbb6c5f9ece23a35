"""Rank functions of the expert-parallel tests: models, a dense reference, and the same training in one process."""

from __future__ import annotations

import copy
import math
from typing import Any

import parity
import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ascend_core import HybridConfig, build_mesh, parallelize
from ascend_core.parallel.moe import MoELayer, load_balance_loss

STEPS, ACCUMULATE, CLIP = 5, 2, 0.5


class DenseMoE(MoELayer):
    """The same layer by its definition: every expert on every token, times the weight that the token gives it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        p = torch.softmax(tokens @ self.router.weight.t(), -1)
        value, index = p.topk(self.top_k)
        if self.normalize_weights:
            value = value / value.sum(-1, keepdim=True)
        if self.load_balance_coefficient:
            share = F.one_hot(index, self.num_experts).float().mean((0, 1))
            self.load_balance_loss = self.load_balance_coefficient * self.num_experts * (share * p.mean(0)).sum()
        if self.capacity_factor is not None:
            value = value * self.kept(index.tolist())
        out = torch.zeros_like(tokens)
        for e in range(self.num_experts):
            weight = (value * (index == e)).sum(-1, keepdim=True)
            if isinstance(self.experts, nn.ModuleList):
                at = weight.squeeze(-1).nonzero().squeeze(-1)
                if len(at):
                    out = out.index_add(0, at, weight[at] * self.experts[e](tokens[at]))
                continue
            hidden = tokens @ self.experts.gate_up_proj[e].t()
            if self.experts.activation == "swiglu":
                gate, up = hidden.chunk(2, -1)
                hidden = F.silu(gate) * up
            else:
                hidden = F.gelu(hidden)
            out = out + weight * (hidden @ self.experts.down_proj[e].t())
        return out.view_as(x)

    def kept(self, index: list[list[int]]) -> torch.Tensor:
        capacity = math.ceil(self.capacity_factor * len(index) * self.top_k / self.num_experts)
        used, kept = [0] * self.num_experts, torch.zeros(len(index), self.top_k)
        for choice in range(self.top_k):
            for t, row in enumerate(index):
                kept[t, choice] = used[row[choice]] < capacity
                used[row[choice]] += 1
        return kept


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(tiny.DIM, 24), nn.Linear(24, tiny.DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class MoEBlock(nn.Module):
    def __init__(self, layer: type[MoELayer], options: dict[str, Any]) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(tiny.DIM), tiny.Attention(fused=False), nn.LayerNorm(tiny.DIM)
        if "listed" in options:
            options = {**options, "experts": nn.ModuleList(MLP() for _ in range(4))}
            del options["listed"]
        self.moe = layer(tiny.DIM, 24, 4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.moe(self.norm2(x))


class MoEGPT(tiny.TinyGPT):
    """The small GPT with a MoE layer in each block. ``idle``: experts 2 and 3 are never chosen."""

    def __init__(self, layer: type[MoELayer] = MoELayer, idle: bool = False, layers: int = 2, **options: Any) -> None:
        super().__init__(layers=layers)
        self.blocks = nn.ModuleList(MoEBlock(layer, options) for _ in range(layers))
        for block in self.blocks if idle else ():
            with torch.no_grad():
                block.norm2.bias.fill_(3.0)
                block.moe.router.weight.copy_(torch.tensor([0.1, 0.1, -0.1, -0.1])[:, None].expand(-1, tiny.DIM))
                block.moe.router.weight += 0.01 * torch.randn(4, tiny.DIM)


def build(kind: str, layer: type[MoELayer], options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(1)
    return MoEGPT(layer, **options) if kind == "plain" else hugging_face(kind, **options)


def hugging_face(kind: str, **options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = {
        "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0,
        "initializer_range": 0.2, **options,
    }  # fmt: skip
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=4, num_experts_per_tok=2, head_dim=8, **common))
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**extra, **common))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return tiny.token_loss(output if isinstance(output, torch.Tensor) else output.logits, y) + load_balance_loss(model)


def train(kind: str, config: dict[str, Any], options: dict[str, Any], device_type: str) -> tuple[tiny.History, Any]:
    c = HybridConfig(**config)
    mesh = build_mesh(c, device_type)
    model = parallelize(build(kind, MoELayer, options), c, mesh)
    optimizer, schedule = tiny.optimizer_and_schedule(model.parameters())
    model.setup_optimizer(optimizer)
    history = tiny.History([], [], {}, {})
    dp, ranks = mesh.rank("dp"), mesh.size("dp")
    for step in range(STEPS):
        total = torch.zeros((), device=device_type)
        for micro in range(ACCUMULATE):
            batch = tuple(t.to(device_type) for t in tiny.local_batch(step * ACCUMULATE + micro, dp, ranks))
            if micro == ACCUMULATE - 1:
                model.announce_finish()
            loss, _ = model.forward_backward(lambda b, _: loss_of(model.module, *b), batch, scale=1 / ACCUMULATE)
            model.rng.step += 1
            total += loss / ACCUMULATE
        model.finish_gradients()
        if step == 0:
            history.grads = parity.full_grads(model)
        history.norms.append(float(model.clip_grad_norm_(CLIP)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=mesh.group("dp"))
        history.losses.append(float(total) / ranks)
    history.params = model.state_dict()
    return history, (model.optimizer_state_dict(optimizer), model, optimizer)


def calls(batch: tuple[torch.Tensor, ...], replicas: int, parts: int) -> list[tuple[torch.Tensor, ...]]:
    """Cut a batch as microbatches do: part ``i`` holds part ``i`` of every replica's share."""
    cut = [t.unflatten(0, (replicas, parts, -1)).transpose(0, 1).flatten(1, 2) for t in batch]
    return list(zip(*cut, strict=True))


def plain_run(kind: str, options: dict[str, Any], replicas: int, parts: int) -> tuple[tiny.History, Any]:
    """One process. The calls of a batch are those of ``parts`` microbatches on ``replicas``, see :func:`calls`."""
    model = build(kind, DenseMoE, options)
    optimizer, schedule = tiny.optimizer_and_schedule(model.parameters())
    history = tiny.History([], [], {}, {})
    for step in range(STEPS):
        total = 0.0
        for micro in range(ACCUMULATE):
            for x, y in calls(tiny.batch(step * ACCUMULATE + micro), replicas, parts):
                loss = loss_of(model, x, y) / ACCUMULATE / parts
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
    return history, optimizer.state_dict()


def compare(
    kind: str,
    config: dict[str, Any],
    options: dict[str, Any],
    cut: tuple[int, int] = (1, 1),
    device_type: str = "cpu",
) -> dict[str, float]:
    """Train both ways; return the largest differences, on rank 0."""
    history, (moments, _, _) = train(kind, config, options, device_type)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (history.losses, history.norms))
    if dist.get_rank():
        return {}
    plain, plain_moments = plain_run(kind, options, *cut)
    names = [n for n, _ in build(kind, DenseMoE, options).named_parameters()]
    first = {names[i]: s for i, s in plain_moments["state"].items()}
    assert list(history.params) == list(plain.params)
    assert history.grads.keys() == plain.grads.keys()
    assert moments["param_groups"][0]["params"] == names and first.keys() == moments["state"].keys()
    return {
        "loss": max(abs(a - b) for losses, _ in everyone for a, b in zip(losses, plain.losses, strict=True)),
        "norm": max(abs(a - b) for _, norms in everyone for a, b in zip(norms, plain.norms, strict=True)),
        "grad": max(gap(history.grads[n], g) for n, g in plain.grads.items()),
        "param": max(gap(history.params[n], p) for n, p in plain.params.items()),
        "moment": max(gap(moments["state"][n]["exp_avg"], s["exp_avg"]) for n, s in first.items()),
    }


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).abs().max())


def resume(config: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    """State out of a spread run, into the unsplit model and into a new spread one, which both train on alike."""
    history, (moments, model, optimizer) = train("plain", config, options, "cpu")
    message = [history.params, moments]
    dist.broadcast_object_list(message, src=0)
    params, moments = message
    plain = build("plain", MoELayer, options)
    plain.load_state_dict(params)
    plain_optimizer, _ = tiny.optimizer_and_schedule(plain.parameters())
    c = HybridConfig(**config)
    mesh = build_mesh(c, "cpu")
    again = parallelize(build("plain", MoELayer, options), c, mesh)
    again_optimizer, _ = tiny.optimizer_and_schedule(again.parameters())
    again.setup_optimizer(again_optimizer)
    again.load_state_dict(params)
    again.load_optimizer_state_dict(again_optimizer, moments)
    by_number = {i: copy.deepcopy(moments["state"][n]) for i, (n, _) in enumerate(plain.named_parameters())}
    plain_optimizer.load_state_dict({**plain_optimizer.state_dict(), "state": by_number})
    for old in (model, again):
        x, y = tiny.local_batch(50, mesh.rank("dp"), mesh.size("dp"))
        old.forward_backward(lambda b, _: loss_of(old.module, *b), (x, y))
        old.finish_gradients()
    loss_of(plain, *tiny.batch(50)).backward()
    for o in (optimizer, again_optimizer, plain_optimizer):
        o.param_groups[0]["lr"] = 3e-3
        o.step()
    whole, anew = model.state_dict(), again.state_dict()
    if dist.get_rank():
        return {}
    reference = plain.state_dict()
    return {"same": max(gap(whole[n], anew[n]) for n in whole), "plain": max(gap(anew[n], p) for n, p in reference.items())}
