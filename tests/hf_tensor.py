"""Rank functions: Hugging Face models split by tensors, against the unsplit model."""

from __future__ import annotations

from typing import Any

import tensor_models
import torch
import torch.distributed as dist
from parity import full_grads

from ascend_core import HybridConfig, build_mesh, parallelize

STEPS, LR = 3, 0.2


def compare(family: str, config: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, float]:
    """Three SGD steps both ways; the largest differences in logits, loss, gradients and parameters."""
    plain, inputs = tensor_models.FAMILIES[family](**(options or {}))
    ours, _ = tensor_models.FAMILIES[family](**(options or {}))
    c = HybridConfig(**config)
    model = parallelize(ours, c, build_mesh(c, "cpu"))
    optimizers = [torch.optim.SGD(plain.parameters(), LR), torch.optim.SGD(model.parameters(), LR)]
    gaps = {"logits": 0.0, "loss": 0.0, "grad": 0.0, "param": 0.0}
    for _ in range(STEPS):
        reference = plain(**inputs)
        reference.loss.backward()
        seen: list[torch.Tensor] = []

        def step(batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            output = model.module(**batch)
            seen.append(output.logits.detach())
            return output.loss

        loss, _ = model.forward_backward(step, inputs)
        model.finish_gradients()
        gaps["logits"] = max(gaps["logits"], float((seen[0] - reference.logits).detach().abs().max()))
        gaps["loss"] = max(gaps["loss"], abs(float(loss) - float(reference.loss)))
        grads = full_grads(model)
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        if dist.get_rank() == 0:
            assert expected.keys() == grads.keys(), expected.keys() ^ grads.keys()
            gaps["grad"] = max(gaps["grad"], *(float((grads[n] - g).abs().max()) for n, g in expected.items()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = model.state_dict()
    if dist.get_rank() == 0:
        assert whole.keys() == plain.state_dict().keys()
        gaps["param"] = max(float((whole[n] - p).abs().max()) for n, p in plain.state_dict().items())
    return gaps


def styles(family: str, size: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The plan of a family, in this one process."""
    from ascend_core.parallel.block_inputs import record_block_inputs
    from ascend_core.parallel.blocks import find_blocks
    from ascend_core.parallel.tp_plans import auto_plan

    model, _ = tensor_models.FAMILIES[family](**(options or {}))
    blocks = find_blocks(model, root_is_boundary=True)
    return auto_plan(model, list(blocks.names), size, inputs=record_block_inputs(model, blocks.names)).styles
