"""Rank functions for user report D42: activation checkpointing with dropout in the hybrid engine and the Trainer."""

from __future__ import annotations

from typing import Any

import emulated_launch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from emulated import here
from refusals import Plain
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ascend_core import HybridConfig, build_mesh, parallelize
from ascend_core.device import check_recomputation
from ascend_core.parallel import state


class Block(nn.Module):
    """A residual block with dropout in the part that tensor parallel splits, and after it; recomputed in backward or not."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute, self.up, self.down = recompute, nn.Linear(16, 32), nn.Linear(32, 16)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(F.dropout(F.gelu(self.up(x)), 0.5)), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self.change, x, use_reentrant=False) if self.recompute else self.change(x))


class Net(nn.Module):
    """Four blocks."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2, "tensor_parallel_plan": {"*.up": "colwise", "*.down": "rowwise"}},
    "zero3": {"zero_stage": 3},
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
}


class OldBackend:
    """``torch.npu`` as an older torch_npu had it: without the private flag that torch.utils.checkpoint looks for."""

    def __init__(self, module: Any) -> None:
        self.__dict__["module"] = module

    def __getattr__(self, name: str) -> Any:
        if name == "_initialized":
            raise AttributeError(name)
        return getattr(self.module, name)


def gradients(recompute: bool, layout: str) -> dict[str, torch.Tensor]:
    c = HybridConfig(**LAYOUTS[layout])
    mesh = build_mesh(c, "npu")
    model = parallelize(Net(recompute), c, mesh, loss_fn=F.mse_loss)
    torch.manual_seed(7)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(here())
    for step in range(2):
        model.rng.step = step
        model.train_step(x, x)
    grads = {n: state.full_tensor(p.grad).cpu() for n, p in model.named.items()}
    assert all(float(g.abs().max()) > 0 for g in grads.values())
    return grads


def engine(layout: str) -> bool:
    """Whether the engine's gradients are bit-equal with recomputation on and off."""
    plain, again = gradients(False, layout), gradients(True, layout)
    assert plain.keys() == again.keys()
    return all(torch.equal(again[n], g) for n, g in plain.items())


class Module(Plain):
    """Trains the blocks in a Trainer, and keeps their first gradients."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.model, self.grads = Net(recompute), {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.model(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grads = {n: state.full_tensor(p.grad).cpu() for n, p in self.named_parameters()}

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(x, x), batch_size=8)


def trained(layout: str) -> bool:
    """Whether the first gradients in a Trainer are bit-equal with recomputation on and off."""
    seen = []
    for recompute in (False, True):
        torch.manual_seed(5)
        module = Module(recompute)
        emulated_launch.trainer(dist.get_world_size(), **LAYOUTS[layout]).fit(module)
        seen.append(module.grads)
    assert seen[0]
    return all(torch.equal(seen[1][n], g) for n, g in seen[0].items())


def on_an_old_backend() -> dict[str, Any]:
    """Without the flag: whether torch's own recomputation is right, what the strategy says, and that the check is silent else."""
    torch.manual_seed(9)
    before = torch.npu.get_rng_state()
    check_recomputation(here())
    seen: dict[str, Any] = {"leaves no trace": torch.equal(before, torch.npu.get_rng_state())}
    real, torch.npu = torch.npu, OldBackend(torch.npu)
    try:
        grads = []
        for recompute in (False, True):
            net = Net(recompute).to(here())
            torch.manual_seed(4)
            net(torch.ones(8, 16, device=here())).sum().backward()
            grads.append(net.blocks[0].up.weight.grad.cpu())
        seen["torch is right"] = torch.equal(*grads)
        seen["strategy"] = emulated_launch.said(lambda: emulated_launch.trainer(dist.get_world_size()).fit(Module(True)))
    finally:
        torch.npu = real
    return seen
