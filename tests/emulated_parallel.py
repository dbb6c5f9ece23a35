"""Rank functions that train with torch's own parallel features on emulated NPUs, each compared with one CPU process.

Every function returns the largest gap in the losses of all steps and in the parameters after the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import tiny
import torch
import torch.distributed as dist
from emulated import here
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


class Branching(tiny.TinyGPT):
    """A second head that every other step uses, so that its parameters have no gradient in between."""

    def __init__(self) -> None:
        super().__init__(layers=2, tied=False)
        self.other, self.step = nn.Linear(tiny.DIM, tiny.VOCAB), 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tok(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return (self.head if self.step % 2 else self.other)(self.norm(hidden))


def build(branches: bool = False) -> tiny.TinyGPT:
    torch.manual_seed(1)
    return Branching() if branches else tiny.TinyGPT(layers=2, tied=False, fused=False)


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4, **options)  # eps: see tiny.optimizer_and_schedule


def plain(model: nn.Module, accumulate: int = 1, clip: float | None = 0.5) -> list[float]:
    """Train in place on the CPU; losses."""
    optimizer, losses = adamw(model.parameters()), []
    for step in range(STEPS):
        model.step, total = step, 0.0
        for micro in range(accumulate):
            x, y = tiny.batch(step * accumulate + micro)
            loss = tiny.token_loss(model(x), y) / accumulate
            loss.backward()
            total += float(loss)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def gap(losses: list[float], params: dict[str, torch.Tensor], plain_losses: list[float], model: nn.Module) -> float:
    reference = dict(model.named_parameters())
    assert params and params.keys() <= reference.keys()
    gaps = [float((whole(p) - reference[n].detach()).abs().max()) for n, p in params.items()]
    return max(*gaps, *(abs(a - b) for a, b in zip(losses, plain_losses, strict=True)))


def shard(model: tiny.TinyGPT, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def shard_both_ways(model: tiny.TinyGPT) -> nn.Module:
    return shard(model, init_device_mesh("npu", (2, 2), mesh_dim_names=("replicate", "shard")))


def fsdp1(model: tiny.TinyGPT, **options: Any) -> nn.Module:
    wrapped = [FullyShardedDataParallel(b, device_id=here(), use_orig_params=True, **options) for b in model.blocks]
    model.blocks = nn.ModuleList(wrapped)
    return FullyShardedDataParallel(model, device_id=here(), use_orig_params=True, **options)


WRAPS: dict[str, Callable[[Any], nn.Module]] = {
    "ddp": lambda m: DistributedDataParallel(m, device_ids=[here().index], gradient_as_bucket_view=True),
    "ddp-no-sync": lambda m: DistributedDataParallel(m, device_ids=[here().index]),
    "ddp-unused": lambda m: DistributedDataParallel(m, device_ids=[here().index], find_unused_parameters=True),
    "ddp-zero1": lambda m: DistributedDataParallel(m, device_ids=[here().index]),
    "fsdp1": lambda m: fsdp1(m),
    "fsdp1-grad-op": lambda m: fsdp1(m, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp2": lambda m: shard(m, reshard_after_forward=True),
    "fsdp2-keep": lambda m: shard(m, reshard_after_forward=False),
    "fsdp2-no-sync": lambda m: shard(m),
    "fsdp2-offload": lambda m: shard(m, offload_policy=CPUOffloadPolicy()),
    "hsdp": shard_both_ways,
}


def data_parallel(kind: str) -> float:
    """DDP, FSDP1, FSDP2 and ZeRO-1, with AdamW and norm clipping; accumulation of two batches where the kind says no-sync."""
    rank, size, accumulate = dist.get_rank(), dist.get_world_size(), 2 if "no-sync" in kind else 1
    reference, ours = build("unused" in kind), build("unused" in kind)
    plain_losses = plain(reference, accumulate)
    offloaded = kind.endswith("offload")
    model = WRAPS[kind](ours if offloaded else ours.to(here()))
    optimizer: Any = adamw(model.parameters())
    if kind.endswith("zero1"):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3, eps=1e-4)
    losses = []
    for step in range(STEPS):
        ours.step, total = step, torch.zeros((), device=here())
        for micro in range(accumulate):
            last = micro == accumulate - 1
            x, y = (t.to(here()) for t in tiny.local_batch(step * accumulate + micro, rank, size))
            if kind.startswith("fsdp2"):
                model.set_requires_gradient_sync(last)
            with model.no_sync() if kind.startswith("ddp") and not last else nullcontext():
                loss = tiny.token_loss(model(x), y) / accumulate
                loss.backward()
            total += loss.detach() / size
        clip = model.clip_grad_norm_ if kind.startswith("fsdp1") else lambda c: nn.utils.clip_grad_norm_(model.parameters(), c)
        clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total))
    if kind.startswith("fsdp1"):
        with FullyShardedDataParallel.summon_full_params(model):
            params = {n.replace("_fsdp_wrapped_module.", ""): p.detach().cpu() for n, p in model.named_parameters()}
    else:
        params = dict(ours.named_parameters())
        where = {p.device.type for p in params.values()}
        assert where == {"cpu" if offloaded else "npu"}, where
    return gap(losses, params, plain_losses, reference)


def fsdp2_bf16() -> float:
    """FSDP2's mixed precision against its definition: bf16 copies compute, fp32 parameters take the mean of the gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, ours = build(), build().to(here())
    model = shard(ours, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizers = [adamw(m.parameters()) for m in (reference, model)]
    losses, plain_losses = [], []
    for step in range(STEPS):
        copies, values = [], []
        for part in range(size):
            low = build().bfloat16()
            low.load_state_dict(reference.state_dict())
            x, y = tiny.local_batch(step, part, size)
            with sdpa_kernel(SDPBackend.MATH):  # what attention is made of on a device without fused kernels
                loss = tiny.token_loss(low(x), y)
            loss.backward()
            copies.append(dict(low.named_parameters()))
            values.append(float(loss))
        for name, p in reference.named_parameters():
            p.grad = torch.stack([c[name].grad.float() for c in copies]).mean(0)
        x, y = (t.to(here()) for t in tiny.local_batch(step, rank, size))
        loss = tiny.token_loss(model(x), y)
        loss.backward()
        assert loss.dtype == torch.bfloat16 and all(p.grad.dtype == torch.float32 for p in model.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
        plain_losses.append(values[rank])
    return gap(losses, dict(ours.named_parameters()), plain_losses, reference)


def tensor_parallel(sequence: bool) -> float:
    """Columns and rows over the ranks; with ``sequence`` also the norms' activations, the embedding and the loss."""
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    reference, ours = build(), build().to(here())
    plain_losses = plain(reference, clip=None)
    plan: dict[str, Any] = {f"attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {"mlp.0": ColwiseParallel()}
    if sequence:
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        rows = RowwiseParallel(output_layouts=Shard(1))
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        plan |= {"attn": PrepareModuleInput(**gathered), "mlp": PrepareModuleInput(**gathered)}
        ends = {"norm": SequenceParallel(), "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}
        parallelize_module(ours, mesh, ends)
        first = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
        parallelize_module(ours.blocks[0], mesh, first)
    else:
        rows = RowwiseParallel()
    plan |= {"attn.proj": rows, "mlp.2": rows}
    for block in ours.blocks:
        parallelize_module(block, mesh, plan)
    optimizer = adamw(ours.parameters(), foreach=False)  # some parameters are DTensors and some are not
    losses = []
    for step in range(STEPS):
        x, y = (t.to(here()) for t in tiny.batch(step))
        with loss_parallel() if sequence else nullcontext():
            loss = tiny.token_loss(ours(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
    return gap(losses, dict(ours.named_parameters()), plain_losses, reference)
