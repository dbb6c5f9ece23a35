"""Rank functions for activation checkpointing in groups of blocks."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ascend_core import HybridConfig, build_mesh, parallelize
from ascend_core.parallel import state

WIDTH, BLOCKS = 16, 6


class Block(nn.Module):
    """A residual block with dropout where tensor parallel splits it, and after it, and a statistic that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, factor: torch.Tensor, pair: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        change = self.drop(self.down(F.dropout(F.gelu(self.up(x)), 0.5, self.training)))
        y = self.norm(x + change) * factor
        return (y, factor) if pair else y


class Net(nn.Module):
    """Blocks that share an argument, return a tensor or a pair, and are called one after the other or with code between."""

    def __init__(self, between: bool = False, blocks: int = BLOCKS, pair: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.between, self.pair = between, pair
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.full((WIDTH,), 0.9).to(x.device)
        for block in self.blocks:
            x = block(x, factor, self.pair)
            x = x[0] if self.pair else x
            x = x + 0 if self.between else x
        return self.head(x)


TP = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"*.up": "colwise", "*.down": "rowwise"}}
PP = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "dp2-zero2": (2, {"zero_stage": 2}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "tp2": (2, TP),
    "pp2": (2, PP),
    "pp2-zbv": (2, {**PP, "schedule": "ZBVZeroBubble"}),
    "pp2-zero-bubble": (2, {**PP, "schedule": "InterleavedZeroBubble"}),
    "pp2-dualpipev": (2, {**PP, "schedule": "DualPipeV", "num_microbatches": 4}),
    "tp2-dp2-zero3": (4, {**TP, "zero_stage": 3}),
    "pp2-dp2-zero2": (4, {**PP, "zero_stage": 2}),
}


def spread(config: dict[str, Any], size: int, device_type: str = "cpu", net: nn.Module | None = None) -> Any:
    c = HybridConfig(**config, activation_checkpoint_blocks=size, self_check="off")
    mesh = build_mesh(c, device_type)
    return parallelize(net or Net(), c, mesh, loss_fn=F.mse_loss)


def train(
    config: dict[str, Any], size: int, device_type: str = "cpu", precision: torch.dtype | None = None, between: bool = False
) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """Three steps of SGD; returns parameters and buffers, losses, and how often groups were recomputed."""
    model = spread(config, size, device_type, Net(between, pair="pipeline_parallel_size" not in config))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.setup_optimizer(optimizer)
    torch.manual_seed(7 + model.mesh.rank("dp"))
    generator = torch.Generator().manual_seed(1 + model.mesh.rank("dp"))
    losses = []
    for step in range(3):
        model.rng.step = step
        x = torch.randn(8, WIDTH, generator=generator).to(model.device)
        with torch.autocast(device_type, dtype=precision or torch.bfloat16, enabled=precision is not None):
            losses.append(float(model.train_step(x, x)))
        optimizer.step()
        optimizer.zero_grad()
    again = model.recompute.recomputations if model.recompute is not None else 0
    local = {n: state.full_tensor(t) for n, t in model.module.state_dict().items()}
    return local, losses, again


def same_as_without(name: str, size: int, device_type: str = "cpu", precision: torch.dtype | None = None) -> dict[str, Any]:
    """Whether training with groups of ``size`` blocks is bit-equal to training without; and recomputations per microbatch."""
    config = LAYOUTS[name][1]
    plain, losses, _ = train(config, 0, device_type, precision)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Block")
        again, losses_again, count = train(config, size, device_type, precision)
    differing = [n for n, t in plain.items() if not torch.equal(t, again[n])]
    return {"differing": differing, "losses": losses == losses_again, "count": count}


def broken_chain(size: int) -> tuple[bool, int, list[str]]:
    """Code between the blocks: right, but each block is a group, and a warning says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again, losses, count = train({}, size, between=True)
    plain, losses_plain, _ = train({}, 0, between=True)
    same = losses == losses_plain and all(torch.equal(t, again[n]) for n, t in plain.items())
    return same, count, [str(w.message) for w in caught if "Block" in str(w.message)]


def kept_bytes(size: int) -> tuple[int, int]:
    """Bytes of tensors alive between forward and backward, beyond those before; and of one block's input."""
    model = spread({}, size, net=Net(blocks=8))
    x = torch.randn(512, WIDTH)

    def alive() -> int:
        gc.collect()
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    seen: list[torch.Tensor] = []
    before = alive()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        loss = model(x).square().mean()
    del seen[:]
    held = alive() - before
    loss.backward()
    return held, x.numel() * x.element_size()


def peak_bytes(size: int, blocks: int = 8, rows: int = 4096) -> tuple[int, float]:
    """Peak device memory of a step beyond what was allocated before it, and the loss; on an NPU."""
    model = spread({}, size, "npu", Net(blocks=blocks))
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to(model.device)
    module = torch.get_device_module(model.device)
    for _ in range(2):
        for p in model.parameters():
            p.grad = None
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        loss = model.train_step(x, x)
    return module.max_memory_allocated() - before, float(loss)


class Moody(nn.Module):
    """A block that does something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(self.linear(x)) if self.calls % 2 else torch.tanh(self.linear(x[:4]))


def moody() -> None:
    model = spread({}, 2, net=nn.Sequential(*(Moody() for _ in range(2))))
    model.train_step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))


def two_passes() -> bool:
    """A graph that is used twice (retain_graph) gives both times the gradients of a plain run."""
    grads = []
    for size in (0, 3):
        model = spread({}, size)
        torch.manual_seed(5)
        x = torch.randn(8, WIDTH, requires_grad=True)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
    return all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def no_blocks() -> None:
    spread({}, 2, net=nn.Linear(4, 4))


def gathers(size: int) -> int:
    """All-gathers of parameters in one ZeRO-3 step."""
    from torch.distributed.tensor.debug import CommDebugMode

    model = spread({"zero_stage": 3}, size)
    x = torch.randn(8, WIDTH)
    model.train_step(x, x)
    with CommDebugMode() as mode:
        model.train_step(x, x)
    dist.barrier()
    return int(sum(n for op, n in mode.get_comm_counts().items() if "gather" in str(op)))
