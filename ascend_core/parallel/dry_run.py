"""Run a block without leaving a trace, and tell blocks of one kind from others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def dry_run(block: nn.Module, seed: int = 0) -> Iterator[None]:
    """Run a block in evaluation mode, without gradients, with the random state as before afterwards."""
    modes = {m: m.training for m in block.modules()}
    devices = {p.device for p in block.parameters() if p.device.type not in ("cpu", "meta")}
    block.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _seeded(devices, seed):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _seeded(devices: set[torch.device], seed: int) -> Iterator[None]:
    states = {d: torch.get_device_module(d).get_rng_state(d) for d in devices}
    torch.manual_seed(seed)
    try:
        yield
    finally:
        for device, state in states.items():
            torch.get_device_module(device).set_rng_state(state, device)


def signature(block: nn.Module) -> Any:
    """What makes two blocks alike to the planner and to the check: types, shapes, and the plain numbers their modules hold."""
    rows: list[Any] = []
    for name, module in block.named_modules():
        numbers = tuple((k, v) for k, v in vars(module).items() if isinstance(v, (int, float)) and not k.startswith("layer"))
        shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False))
        rows.append((name, type(module), shapes, numbers))
    return tuple(rows)
