"""Rank functions of the tests of Hugging Face models: the same training through ``parallelize`` and in one process."""

from __future__ import annotations

from typing import Any

import hf_models
import parity
import torch
import torch.distributed as dist
from torch import nn

from ascend_core import HybridConfig, build_mesh, parallelize

STEPS, LR = 3, 0.05


def plain(family: str) -> dict[str, Any]:
    """Losses, first gradients, last parameters and the last evaluation of the unsplit model."""
    model, inputs = hf_models.FAMILIES[family]()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    run: dict[str, Any] = {"losses": []}
    for step in range(STEPS):
        loss = model(**inputs).loss
        loss.backward()
        run["losses"].append(loss.item())
        if step == 0:
            run["grads"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    run["params"] = model.state_dict()
    with torch.no_grad():
        run["output"] = model(**inputs)
    return run


def compare(family: str, config: dict[str, Any]) -> dict[str, float]:
    """Train three SGD steps both ways; the largest differences.

    Args:
        family: Key of ``hf_models.FAMILIES``.
        config: Fields of ``HybridConfig``; no data parallel (a mean over valid tokens is not the mean over replicas).

    Returns:
        ``loss`` and ``output`` (loss and logits of an evaluation, relative where above 1) on every rank; ``grad`` and
        ``param`` on rank 0.
    """
    reference = plain(family)
    model, inputs = hf_models.FAMILIES[family]()
    c = HybridConfig(**config)
    ours = parallelize(model, c, build_mesh(c, "cpu"))
    optimizer = torch.optim.SGD(ours.parameters(), lr=LR)
    losses, grads = [], {}
    for step in range(STEPS):
        loss, _ = ours.forward_backward(lambda batch, i: model(**batch).loss, inputs)
        ours.finish_gradients()
        losses.append(float(loss))
        if step == 0:
            grads = parity.full_grads(ours)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        output = model(**inputs)
    params = ours.state_dict()
    assert type(output) is type(reference["output"])
    dropped = {"cache"} if c.pipeline_parallel_size != 1 else set()
    assert set(output) == set(reference["output"]) - dropped, list(output)
    differences = {
        "loss": max(abs(a - b) for a, b in zip(losses, reference["losses"], strict=True)),
        "output": max(_relative(output[k], reference["output"][k]) for k in ("loss", "logits")),
    }
    if dist.get_rank() == 0:
        assert params.keys() == reference["params"].keys()
        assert grads.keys() == reference["grads"].keys(), set(grads) ^ set(reference["grads"])
        differences["grad"] = max(float((grads[n] - g).abs().max()) for n, g in reference["grads"].items())
        differences["param"] = max(float((params[n] - p).abs().max()) for n, p in reference["params"].items())
    return differences


def _relative(ours: torch.Tensor, plain: torch.Tensor) -> float:
    return float((ours - plain).abs().max() / plain.abs().max().clamp(min=1.0))


def checkpointed(family: str, config: dict[str, Any], dropout: str) -> tuple[float, list[int]]:
    """Gradients with ``gradient_checkpointing_enable()`` against those without, both split and with dropout.

    Returns:
        The largest difference on this rank, and by run how often its first MLP was called in one step.
    """
    grads: list[dict[str, torch.Tensor]] = []
    counts: list[int] = []
    for checkpointing in (False, True):
        model, inputs = hf_models.FAMILIES[family]()
        for module in model.modules():
            if isinstance(getattr(module, dropout, None), float):
                setattr(module, dropout, 0.5)
            if isinstance(module, nn.Dropout):
                module.p = 0.5
        if checkpointing:
            model.gradient_checkpointing_enable()
        c = HybridConfig(**config)
        ours = parallelize(model, c, build_mesh(c, "cpu"))
        calls: list[int] = []
        mlp = next(m for n, m in model.named_modules() if n.endswith(".mlp") and any(True for _ in m.parameters()))
        mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))  # a recomputation stops before it ends
        ours.rng.base_seed = 5
        ours.forward_backward(lambda batch, i, model=model: model(**batch).loss, inputs)
        grads.append({n: p.grad for n, p in ours.named.items() if p.grad is not None})
        counts.append(len(calls))
    return max(float((grads[1][n] - g).abs().max()) for n, g in grads[0].items()), counts
