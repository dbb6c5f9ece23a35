"""Rank functions of the parity tests: the same training through ``parallelize``, compared with the plain run."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch import nn

from ascend_core import HybridConfig, build_mesh, parallelize
from ascend_core.parallel import ParallelModel, state


def full_grads(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Gradients by unsplit name, on global rank 0."""
    return state.gather_gradients(model.gradients(), model.names, model.mesh)


@functools.cache
def _plain(options: tuple[tuple[str, Any], ...], steps: int, accumulate: int) -> tiny.History:
    return tiny.plain_run(lambda: tiny.build(**dict(options)), steps, accumulate)


def plain_history(options: dict[str, Any], steps: int = tiny.STEPS, accumulate: int = tiny.ACCUMULATE) -> tiny.History:
    """The plain run, computed on rank 0; gradients and parameters are there only."""
    history = [tiny.History([], [], {}, {})]
    if dist.get_rank() == 0:
        whole = _plain(tuple(sorted(options.items())), steps, accumulate)
        history = [tiny.History(whole.losses, whole.norms, {}, {})]
    dist.broadcast_object_list(history, src=0)
    return whole if dist.get_rank() == 0 else history[0]


def train(
    config: dict[str, Any],
    model_options: dict[str, Any],
    device_type: str = "cpu",
    steps: int = tiny.STEPS,
    accumulate: int = tiny.ACCUMULATE,
) -> tiny.History:
    c = HybridConfig(**config)
    mesh = build_mesh(c, device_type)
    model = parallelize(tiny.build(**model_options), c, mesh, loss_fn=tiny.token_loss)
    optimizer, schedule = tiny.optimizer_and_schedule(model.parameters())
    model.setup_optimizer(optimizer)
    history = tiny.History([], [], {}, {})
    dp, ranks = mesh.rank("dp"), mesh.size("dp")
    for step in range(steps):
        total = torch.zeros((), device=device_type)
        for micro in range(accumulate):
            x, y = (t.to(device_type) for t in tiny.local_batch(step * accumulate + micro, dp, ranks))
            with model.no_sync() if micro < accumulate - 1 else nullcontext():
                total += model.train_step(x, y, scale=1 / accumulate) / accumulate
        if step == 0:
            history.grads = full_grads(model)
        history.norms.append(float(model.clip_grad_norm_(tiny.CLIP)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=mesh.group("dp"))
        history.losses.append(float(total) / ranks)
        if step == steps // 2:  # evaluation in between must not disturb training
            with torch.no_grad():
                model(x)
    history.params = model.state_dict()
    if dist.get_rank():
        history.grads, history.params = {}, {}
    return history


def compare(
    config: dict[str, Any],
    model_options: dict[str, Any] | None = None,
    device_type: str = "cpu",
    steps: int = tiny.STEPS,
    accumulate: int = tiny.ACCUMULATE,
) -> dict[str, float]:
    """Train both ways; return the largest differences (parameters and gradients on rank 0)."""
    options = model_options or {}
    history = train(config, options, device_type, steps, accumulate)
    plain = plain_history(options, steps, accumulate)
    differences = {
        "loss": max(abs(a - b) for a, b in zip(history.losses, plain.losses, strict=True)),
        "norm": max(abs(a - b) for a, b in zip(history.norms, plain.norms, strict=True)),
    }
    if dist.get_rank() == 0:
        assert history.params.keys() == plain.params.keys()
        assert set(history.grads) >= set(plain.grads), set(plain.grads) - set(history.grads)
        differences["grad"] = max(float((history.grads[n] - g).abs().max()) for n, g in plain.grads.items())
        differences["param"] = max(float((history.params[n] - p).abs().max()) for n, p in plain.params.items())
    return differences


def odd_batches(config: dict[str, Any]) -> float:
    """Losses of batches of 1, 3 and 7 samples, which no configured number of microbatches divides, against one process."""
    c = HybridConfig(**config)
    model = parallelize(tiny.build(), c, build_mesh(c, "cpu"), loss_fn=tiny.token_loss)
    plain, worst = tiny.build(), 0.0
    for step, size in enumerate((1, 3, 7, 16)):
        x, y = tiny.batch(step, size)
        worst = max(worst, abs(float(model.train_step(x, y)) - float(tiny.token_loss(plain(x), y))))
    return worst


def replicas_equal(config: dict[str, Any]) -> bool:
    """Tied and replicated parameters are bit-equal on all ranks that hold them."""
    c = HybridConfig(**config)
    mesh = build_mesh(c, "cpu")
    model = parallelize(tiny.build(), c, mesh, loss_fn=tiny.token_loss)
    optimizer, _ = tiny.optimizer_and_schedule(model.parameters())
    same = True
    for step in range(5):
        model.train_step(*tiny.local_batch(step, mesh.rank("dp"), mesh.size("dp")))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        everyone: list[Any] = [None] * dist.get_world_size()
        here = {n: p.detach() for n, p in model.named.items() if not isinstance(p, torch.distributed.tensor.DTensor)}
        dist.all_gather_object(everyone, here)
        for other in everyone:
            same &= all(torch.equal(p, other[n]) for n, p in here.items() if n in other)
    return bool(same)


def nn_parameters(model: nn.Module) -> list[str]:
    return [n for n, _ in model.named_parameters()]
