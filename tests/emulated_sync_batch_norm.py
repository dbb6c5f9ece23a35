"""Rank function on emulated NPUs: torch's SyncBatchNorm over ranks, against BatchNorm of the whole batch on the CPU."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from emulated import here
from torch import nn

CHANNELS = 3
ROWS = (2, 5)
"""Rows of each rank: shares of different size, so that means must be weighted."""


def against_batch_norm(dtype: str, affine: bool) -> dict[str, float]:
    """Largest gaps of output, gradients and running statistics after two steps in training, and one output in evaluation."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(CHANNELS, affine=affine, momentum=0.3)
    if affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).to(here())
    gaps: dict[str, float] = {}

    def gap(name: str, value: torch.Tensor, wanted: torch.Tensor) -> None:
        gaps[name] = max(gaps.get(name, 0.0), (value.detach().cpu().float() - wanted.detach().float()).abs().max().item())

    mine = slice(0, ROWS[0]) if dist.get_rank() == 0 else slice(ROWS[0], sum(ROWS))
    for _ in range(2):
        x = (torch.randn(sum(ROWS), CHANNELS, 4, 4) * 3 + 1).to(getattr(torch, dtype)).float().requires_grad_()
        weights = torch.randn(sum(ROWS), CHANNELS, 4, 4)
        y = plain(x)
        (y * weights).sum().backward()
        local = x.detach()[mine].to(here(), getattr(torch, dtype)).requires_grad_()
        out = model(local)
        assert out.dtype == local.dtype
        (out.float() * weights[mine].to(here())).sum().backward()
        gap("output", out, y[mine])
        assert local.grad is not None and x.grad is not None
        gap("input's gradient", local.grad, x.grad[mine])
    for name, parameter in model.named_parameters():
        wanted = plain.get_parameter(name).grad
        assert parameter.grad is not None and wanted is not None
        dist.all_reduce(parameter.grad)
        gap(f"{name}'s gradient", parameter.grad, wanted)
    for name in ("running_mean", "running_var"):
        gap(name, model.get_buffer(name), plain.get_buffer(name))
    gap("evaluation", model.eval()(x[mine].to(here())), plain.eval()(x)[mine])
    return gaps
