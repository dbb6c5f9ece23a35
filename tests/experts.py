"""Rank functions of the expert-parallel tests: models, a dense reference, and the same training in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import parity
import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ascend_core import HybridConfig, build_mesh, parallelize
from ascend_core.parallel.moe import MoELayer, load_balance_loss

STEPS, ACCUMULATE, CLIP = 6, 2, 0.5


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


class MoEBlock(nn.Module):
    def __init__(self, layer: type[MoELayer], options: dict[str, Any]) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(tiny.DIM), tiny.Attention(fused=False), nn.LayerNorm(tiny.DIM)
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
    model.check_optimizer(optimizer)
    history = tiny.History([], [], {}, {})
    dp, ranks = mesh.rank("dp"), mesh.size("dp")
    for step in range(STEPS):
        total = torch.zeros((), device=device_type)
        for micro in range(ACCUMULATE):
            batch = tuple(t.to(device_type) for t in tiny.local_batch(step * ACCUMULATE + micro, dp, ranks))
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
    if config.get("pipeline_parallel_size", 1) == 1:
        assert mesh.size("ep") == 1 or any(p.shape[0] != 4 for p in local_experts(model.module)) == (mesh.size("ep") > 1)
    history.params = model.state_dict()
    return history, (model.optimizer_state_dict(optimizer), model, optimizer)


def local_experts(module: nn.Module) -> list[torch.Tensor]:
    return [p.to_local() for n, p in module.named_parameters() if ".experts." in n]


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
    """Train both ways on every rank; return the largest differences (parameters, gradients and moments on rank 0)."""
    history, (moments, _, _) = train(kind, config, options, device_type)
    plain, plain_moments = plain_run(kind, options, *cut)
    differences = {
        "loss": max(abs(a - b) for a, b in zip(history.losses, plain.losses, strict=True)),
        "norm": max(abs(a - b) for a, b in zip(history.norms, plain.norms, strict=True)),
    }
    if dist.get_rank() == 0:
        assert list(history.params) == list(plain.params)
        assert set(history.grads) >= set(plain.grads), set(plain.grads) - set(history.grads)
        differences["grad"] = max(gap(history.grads[n], g) for n, g in plain.grads.items())
        differences["param"] = max(gap(history.params[n], p) for n, p in plain.params.items())
        names = [n for n in history.params if n in moments["state"]]
        first = dict(zip(names, plain_moments["state"].values(), strict=True))
        differences["moment"] = max(gap(moments["state"][n]["exp_avg"], s["exp_avg"]) for n, s in first.items())
    return differences


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).abs().max())


def resume(config: dict[str, Any]) -> dict[str, float]:
    """State out of a spread run, into the unsplit model and into a new spread one, which both train on alike."""
    history, (moments, model, optimizer) = train("plain", config, {}, "cpu")
    message = [history.params, moments]
    dist.broadcast_object_list(message, src=0)
    params, moments = message
    plain = build("plain", MoELayer, {})
    plain.load_state_dict(params)
    plain_optimizer, _ = tiny.optimizer_and_schedule(plain.parameters())
    c = HybridConfig(**config)
    mesh = build_mesh(c, "cpu")
    again = parallelize(build("plain", MoELayer, {}), c, mesh)
    again_optimizer, _ = tiny.optimizer_and_schedule(again.parameters())
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


def attempt(build_name: str, config: dict[str, Any]) -> tuple[str, str]:
    """Type and text of the error that spreading a model gives."""
    model: Callable[[], nn.Module] = globals()[build_name]
    try:
        c = HybridConfig(**config)
        parallelize(model(), c, build_mesh(c, "cpu"))
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def no_experts() -> nn.Module:
    return tiny.build()


def three_experts() -> nn.Module:
    return nn.Sequential(MoELayer(8, 8, 3, top_k=1))


def tied_experts() -> nn.Module:
    model = nn.Sequential(MoELayer(8, 8, 4), MoELayer(8, 8, 4))
    model[1].experts.down_proj = model[0].experts.down_proj
    return model


class MixingExperts(nn.Module):
    """Subtracts the mean over the tokens of a call, so that the result depends on which tokens come together."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        centred = tokens - tokens.mean(0)
        return sum(
            weights[:, k, None] * torch.einsum("td,tde->te", centred, self.weight[index[:, k]]) for k in range(index.shape[1])
        )


def mixing_experts() -> nn.Module:
    return nn.Sequential(MoELayer(8, 8, 4, experts=MixingExperts()))


class OutsideBlocks(MoEGPT):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(tiny.DIM, 8, 4)


def unlike_replicas(batches: list[list[int]], config: dict[str, Any], options: dict[str, Any]) -> Any:
    """Losses against one process when replicas have batches of unlike sizes; or the error."""
    c = HybridConfig(**config)
    mesh = build_mesh(c, "cpu")
    model, plain = parallelize(build("plain", MoELayer, options), c, mesh), build("plain", DenseMoE, {})
    worst = 0.0
    try:
        for step, sizes in enumerate(batches):
            x, y = tiny.batch(step, sizes[mesh.rank("dp")])
            loss, _ = model.forward_backward(lambda b, _: tiny.token_loss(model.module(b[0]), b[1]), (x, y))
            worst = max(worst, abs(float(loss) - float(tiny.token_loss(plain(x), y))))
    except Exception as error:
        return type(error).__name__, str(error)
    return worst
