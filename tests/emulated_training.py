"""Rank functions on emulated NPUs: mixed precision, loss scaling and activation checkpointing, against the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import emulated_parallel as parallel
import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from emulated import here
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

STEPS = 4


class ByHand(TorchFunctionMode):
    """The casts that torch_npu's autocast makes in the small GPT, made by hand.

    torch's CPU autocast is no reference for it: its list leaves layer_norm in the low type, where the NPU's list, like
    CUDA's, computes it in fp32. In cross_entropy only nll_loss is in fp32: it asks log_softmax for its input's type, and
    autocast respects that.
    """

    LOW = (F.linear, F.scaled_dot_product_attention)
    FULL = (F.layer_norm, F.nll_loss)

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low = low

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            with self:
                return F.nll_loss(F.log_softmax(args[0], -1), *args[1:])
        dtype = self.low if func in self.LOW else torch.float32 if func in self.FULL else None

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() and dtype else value

        with sdpa_kernel(SDPBackend.MATH):  # what attention is made of on a device without fused kernels
            return func(*map(cast, args), **{k: cast(v) for k, v in (kwargs or {}).items()})


def autocast(name: str) -> dict[str, Any]:
    """Losses and parameters of four steps under autocast on the NPU, against casts by hand on the CPU; types on the way."""
    dtype = getattr(torch, name)
    types: dict[str, Any] = {}

    def watch(model: nn.Module) -> None:
        for kind in ("norm", "head", "blocks.0.mlp.1"):
            model.get_submodule(kind).register_forward_hook(lambda m, a, out, k=kind: types.update({k: str(out.dtype)}))

    def train(device: torch.device, context: Callable[[], AbstractContextManager[Any]]) -> tuple[list[float], nn.Module]:
        model = parallel.build().to(device)
        watch(model)
        optimizer, losses = parallel.adamw(model.parameters()), []
        for step in range(STEPS):
            x, y = (t.to(device) for t in tiny.batch(step))
            with context():
                loss = tiny.token_loss(model(x), y)
            loss.backward()
            types["loss"], types["grad"] = str(loss.dtype), str(model.head.weight.grad.dtype)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses, model

    plain_losses, reference = train(torch.device("cpu"), lambda: ByHand(dtype))
    full, _ = train(here(), lambda: torch.autocast("npu", dtype, enabled=False))
    losses, ours = train(here(), lambda: torch.autocast("npu", dtype))
    with torch.autocast("npu", dtype):
        types["inside"] = (
            torch.is_autocast_enabled("npu"),
            str(torch.get_autocast_dtype("npu")),
            torch.is_autocast_enabled("cpu"),
        )
    types["gap"] = parallel.gap(losses, dict(ours.named_parameters()), plain_losses, reference)
    types["differs from fp32 by"] = max(abs(a - b) for a, b in zip(losses, full, strict=True))
    return types


def cpu_autocast(name: str) -> float:
    """Where both lists agree (linear low, mse_loss in fp32), autocast on the NPU equals autocast on the CPU; gradient gap."""
    dtype, seen = getattr(torch, name), []
    for device in (torch.device("cpu"), here()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(device)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device)
        with torch.autocast(device.type, dtype):
            loss = F.mse_loss(model(x), x)
        loss.backward()
        seen.append([loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())])
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*seen, strict=True))


def make_scaler(kind: str, **options: Any) -> Any:
    if kind == "torch_npu":
        return torch.npu.amp.GradScaler(**options)
    return torch.amp.GradScaler(kind, **options)


def loss_scale(kind: str) -> dict[str, Any]:
    """fp16, unscale and clip, with an infinite gradient at step 2; scales per step, steps that changed something, gap to the CPU."""
    options = {"init_scale": 1024.0, "growth_interval": 2}

    def train(
        device: torch.device, context: Callable[[], Any], scaler: Any
    ) -> tuple[list[float], list[bool], list[float], nn.Module]:
        model = parallel.build().to(device)
        optimizer = parallel.adamw(model.parameters())
        scales, moved, losses = [], [], []
        for step in range(STEPS + 1):
            x, y = (t.to(device) for t in tiny.batch(step))
            with context():
                loss = tiny.token_loss(model(x), y)
            scaler.scale(loss).backward()
            if step == 1:
                model.pos.grad[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            before = model.pos.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved.append(not torch.equal(before, model.pos.detach()))
            scales.append(scaler.get_scale())
            losses.append(float(loss))
        return scales, moved, losses, model

    cpu = train(torch.device("cpu"), lambda: ByHand(torch.float16), make_scaler("cpu", **options))
    npu = train(here(), lambda: torch.autocast("npu", torch.float16), make_scaler(kind, **options))
    assert cpu[:2] == npu[:2], (cpu[:2], npu[:2])
    return {"scales": npu[0], "moved": npu[1], "gap": parallel.gap(npu[2], dict(npu[3].named_parameters()), cpu[2], cpu[3])}


def loss_scale_over_ranks(kind: str, scaler_kind: str) -> tuple[float, bool]:
    """One rank's gradient is infinite; scale after the step and whether this rank's parameters moved."""
    model = nn.Linear(4, 4).to(here())
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[here().index])
    else:
        fully_shard(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make_scaler(scaler_kind, init_scale=1024.0)
    x = torch.ones(2, 4, device=here())
    if kind == "ddp" and dist.get_rank() == 1:
        x[0, 0] = float("inf")
    scaler.scale(model(x).sum()).backward()
    weight = next(iter(model.parameters()))
    if kind == "fsdp2" and dist.get_rank() == 1:
        weight.grad.to_local()[0, 0] = float("inf")  # in this rank's shard only
    before = parallel.whole(weight)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), not torch.equal(before, parallel.whole(weight))


class Dropping(nn.Module):
    """Four blocks with dropout, each of which may be recomputed in the backward pass."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        blocks: list[nn.Module] = [
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 16), nn.Dropout(0.5)) for _ in range(4)
        ]
        self.recompute = recompute
        self.blocks = nn.ModuleList(checkpoint_wrapper(b) if recompute == "wrapper" else b for b in blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.recompute in ("reentrant", "recompute", "forgetful"):
                keep = self.recompute != "forgetful"
                x = x + checkpoint(block, x, use_reentrant=self.recompute == "reentrant", preserve_rng_state=keep)
            else:
                x = x + block(x)
        return x


def recomputed(recompute: str, low: bool, sharded: bool) -> dict[str, torch.Tensor]:
    """Gradients of a model with dropout, with or without recomputation, under autocast or FSDP2 too."""
    model = Dropping(recompute).to(here())
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    torch.manual_seed(11 + dist.get_rank())
    x = torch.randn(8, 16, device=here(), requires_grad=True)
    with torch.autocast("npu", torch.bfloat16, enabled=low):
        loss = model(x).square().mean()
    between = torch.rand(3, device=here())  # what is drawn after the forward pass must not disturb the recomputation
    loss.backward()
    grads = {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}
    whole = {n: (g.full_tensor() if isinstance(g, DTensor) else g).cpu() for n, g in grads.items()}
    return {**whole, "x": x.grad.cpu(), "between": between.cpu(), "after": torch.rand(3, device=here()).cpu()}


def recomputation(low: bool, sharded: bool) -> dict[str, bool]:
    """Whether each kind of recomputation gives the same bits as none; "forgetful" is told not to restore random numbers."""
    plain = recomputed("no", low, sharded)
    same = {}
    for kind in ("reentrant", "recompute", "wrapper", "forgetful"):
        again = recomputed(kind, low, sharded)
        assert again.keys() == plain.keys()
        same[kind] = all(torch.equal(again[n], g) for n, g in plain.items())
    return same
