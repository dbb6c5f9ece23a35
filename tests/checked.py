"""Rank functions for the self-check before the first step."""

from __future__ import annotations

from typing import Any

import tiny
from torch import nn

from ascend_core import HybridConfig, build_mesh, parallelize
from ascend_core.parallel import ParallelModel

HOLE = {"*.qkv": "colwise", "*.proj": "rowwise"}  # rows of q, k and v land on the wrong ranks


def spread(config: dict[str, Any], device_type: str = "cpu", net: nn.Module | None = None) -> ParallelModel:
    c = HybridConfig(**config)
    return parallelize(net or tiny.build(), c, build_mesh(c, device_type), loss_fn=tiny.token_loss)


def losses(config: dict[str, Any], device_type: str = "cpu") -> list[float]:
    """Three steps; each model-parallel group sees its part of the batch."""
    model = spread(config, device_type)
    optimizer, _ = tiny.optimizer_and_schedule(model.parameters())
    model.setup_optimizer(optimizer)
    found = []
    for step in range(3):
        x, y = (t.to(device_type) for t in tiny.local_batch(step, model.mesh.rank("dp"), model.mesh.size("dp")))
        found.append(float(model.train_step(x, y)))
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return found


def leaves_no_trace(config: dict[str, Any], device_type: str = "cpu") -> bool:
    """Training with the check is bit-equal to training without."""
    return losses({**config, "self_check": "first_batch"}, device_type) == losses({**config, "self_check": "off"}, device_type)


def with_plan(config: dict[str, Any]) -> None:
    model = spread({"tensor_parallel_size": 2, **config})
    model.train_step(*tiny.batch(0))


def wrong_gradient(config: dict[str, Any], name: str) -> None:
    """A parameter's gradient is doubled in the spread model."""
    model = spread({**config, "self_check": "first_batch"}, net=tiny.build(tied=False))
    if name in model.named:
        model.named[name].register_hook(lambda g: 2 * g)
    model.train_step(*tiny.local_batch(0, model.mesh.rank("dp"), model.mesh.size("dp")))


def wrong_output(config: dict[str, Any], name: str) -> None:
    """A module's output is shifted in the spread model."""
    model = spread({**config, "self_check": "first_batch"}, net=tiny.build(tied=False))
    module = model.module.get_submodule(name)
    module.register_forward_hook(lambda m, args, output: output + 0.1)
    model.train_step(*tiny.local_batch(0, model.mesh.rank("dp"), model.mesh.size("dp")))
