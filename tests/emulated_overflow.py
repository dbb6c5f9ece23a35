"""Rank functions for user report D53: overflow that becomes infinity, and overflow that saturates."""

from __future__ import annotations

import warnings
from typing import Any

import emulated_launch
import torch
import torch.distributed as dist
from emulated import here
from emulated_training import make_scaler
from refusals import Plain
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ascend_core.device import local_device, saturates


class Scaled(nn.Module):
    """Three layers; by the second, values (``"forward"``) or gradients (``"backward"``) are made a factor larger, then smaller."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.where, self.layers, self.factor = where, nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        self.middle = x * self.factor if self.where == "forward" else x / self.factor
        return self.layers[2](self.middle / self.factor if self.where == "forward" else self.middle * self.factor)


FACTORS = {"forward": 240000.0, "backward": 20000.0}
"""Values of the second layer are near 0.5, and gradients there near 20 at a scale of 1024; fp16 ends at 65504."""


def backs_off(kind: str, where: str) -> dict[str, Any]:
    """Overflow in fp16 in the second step of three, on the last rank; what each step did to scale and weights."""
    torch.npu.set_device(local_device("npu"))
    dist.init_process_group("cpu:gloo,npu:hccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Scaled(where).to(here())
    trained = DistributedDataParallel(model, device_ids=[here().index]) if size > 1 else model
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), make_scaler(kind, init_scale=1024.0)
    seen: dict[str, Any] = {"saturates": saturates(here()), "scale": [], "moved": [], "largest": []}
    for step in range(3):
        model.factor = FACTORS[where] if step == 1 and rank == size - 1 else 1.0
        before = [p.detach().clone() for p in model.parameters()]
        with torch.autocast("npu", torch.float16):
            loss = trained(torch.ones(2, 4, device=here())).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen["largest"].append(float(model.middle.abs().max()))
        seen["scale"].append(scaler.get_scale())
        seen["moved"].append(not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    seen["weights"] = [p.detach().cpu().sum().item() for p in model.parameters()]
    return seen


def told() -> tuple[str, list[str]]:
    """What the strategy says about the overflow mode when it starts: its line in the log, and warnings."""
    lines: list[str] = []
    ours = emulated_launch.trainer(1)
    type(ours.strategy)._info = lambda self, text: lines.append(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.fit(Plain())
    return lines[0], [str(w.message) for w in caught if "overflow" in str(w.message)]
