"""Rank function of the tests that every schedule must pass."""

from __future__ import annotations

import tiny
import torch

from ascend_core import HybridConfig, build_mesh, parallelize


def accumulate(schedules: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """By schedule, gaps to one process: batches of several sizes, accumulated, with an evaluation after each."""
    found = {}
    for schedule in schedules:
        c = HybridConfig(pipeline_parallel_size=2, schedule=schedule)
        model = parallelize(tiny.build(), c, build_mesh(c, "cpu"), loss_fn=tiny.token_loss)
        plain = tiny.build()
        gaps = {"loss": 0.0, "grad": 0.0, "eval": 0.0}
        for step, size in enumerate(sizes):
            x, y = tiny.batch(step, size=size)
            loss = tiny.token_loss(plain(x), y)
            (loss / len(sizes)).backward()
            with model.no_sync() if step < len(sizes) - 1 else torch.enable_grad():
                ours = model.train_step(x, y, scale=1 / len(sizes))
            gaps["loss"] = max(gaps["loss"], abs(float(ours) - float(loss)))
            model.module.eval()
            with torch.no_grad():
                gaps["eval"] = max(gaps["eval"], float((model(x) - plain(x)).abs().max()))
            model.module.train()
        reference = dict(plain.named_parameters())
        missing = [n for n, p in model.named.items() if p.grad is None]
        assert not missing, missing
        gaps["grad"] = max(float((p.grad - reference[n].grad).abs().max()) for n, p in model.named.items())
        found[schedule] = gaps
    return found
