"""Rank functions of the tests of Hugging Face models: the same training through ``parallelize`` and in one process."""

from __future__ import annotations

from typing import Any

import hf_models
import parity
import torch
import torch.distributed as dist

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


def compare(family: str, config: dict[str, Any], checkpointing: bool = False) -> dict[str, float]:
    """Train three SGD steps both ways; the largest differences (gradients and parameters on rank 0, outputs on all)."""
    reference = plain(family)
    model, inputs = hf_models.FAMILIES[family]()
    if checkpointing:
        model.gradient_checkpointing_enable()
    c = HybridConfig(**config)
    mesh = build_mesh(c, "cpu")
    ours = parallelize(model, c, mesh)
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
    assert type(output) is type(reference["output"]) and set(output) == set(reference["output"]) - {"cache"}, list(output)
    differences = {
        "loss": max(abs(a - b) for a, b in zip(losses, reference["losses"], strict=True)),
        "output": max(float((output[k] - reference["output"][k]).abs().max()) for k in ("loss", "logits")),
    }
    if dist.get_rank() == 0:
        assert params.keys() == reference["params"].keys()
        assert grads.keys() == reference["grads"].keys(), set(grads) ^ set(reference["grads"])
        differences["grad"] = max(float((grads[n] - g).abs().max()) for n, g in reference["grads"].items())
        differences["param"] = max(float((params[n] - p).abs().max()) for n, p in reference["params"].items())
    return differences
