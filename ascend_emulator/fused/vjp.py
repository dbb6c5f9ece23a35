"""Vector-Jacobian product of a formula, by autograd on the CPU, inside a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ascend_emulator._torch import autograd_inside_kernel
from ascend_emulator.fused.precision import wide


def vjp(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None] | torch.Tensor
) -> list[torch.Tensor]:
    """Gradients of a formula.

    Args:
        function: Takes the inputs, 16-bit ones as float32, and returns a tensor or a tuple of tensors.
        inputs: Floating tensors to differentiate by.
        grads: Gradient of each output, None for one that has no influence.

    Returns:
        The gradient of each input, in its type; zeros if it has no influence.
    """
    given = [grads] if isinstance(grads, torch.Tensor) else list(grads)
    with autograd_inside_kernel():
        leaves = [wide(t).detach().requires_grad_() for t in inputs]
        outputs = function(*leaves)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        pairs = [(y, g.to(y.dtype)) for y, g in zip(outputs, given, strict=True) if g is not None]
        found = torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.detach().to(t.dtype) for g, t in zip(found, inputs, strict=True)]
