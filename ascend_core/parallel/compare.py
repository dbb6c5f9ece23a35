"""Compare what two models give: outputs of their modules, and gradients of a loss that sees every element."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ascend_core._shim import pytree

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest difference over the largest value of a tensor. A wrong split is wrong by the size of the values themselves."""

_ABSOLUTE = 1e-6


def probe(output: Any, size: int) -> torch.Tensor:
    """A loss that depends on every element of an output, averaged over samples.

    Args:
        output: The model's output; its floating point tensors with ``size`` rows count, else its scalars.
        size: Samples.

    Returns:
        0-dim tensor. The mean of its values on parts of a batch is its value on the whole.
    """
    tensors = floats(output)
    rows = [t for t in tensors if t.dim() and t.shape[0] == size]
    if not rows:
        return torch.stack([t.mean() for t in tensors]).sum()
    total = rows[0].new_zeros((), dtype=torch.float32)
    for number, t in enumerate(rows):
        generator = torch.Generator().manual_seed(number)
        weights = torch.randn(t.shape[1:], generator=generator).to(t.device)
        total = total + (t.float() * weights).sum() / (size * max(1, weights.numel()) ** 0.5)
    return total


def floats(output: Any) -> list[torch.Tensor]:
    """The floating point tensors of an output, whole where they are DTensors."""
    leaves = [t.full_tensor() if isinstance(t, DTensor) else t for t in pytree.tree_leaves(output)]
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def differs(expected: list[torch.Tensor] | None, got: list[torch.Tensor] | None) -> str | None:
    """How two lists of tensors differ, or None; what one side does not have, or has in another shape, is not compared."""
    for a, b in zip(expected or [], got or [], strict=False):
        if a.shape != b.shape or not a.numel():
            continue
        x, y = a.detach().double().cpu(), b.detach().double().cpu()
        size = max(float(x.abs().max()), _ABSOLUTE)
        difference = float((x - y).abs().max())
        if not difference <= TOLERANCE.get(b.dtype, 1e-3) * size:
            return f"The largest difference is {difference:.3g}, the largest value {size:.3g}"
    return None


@contextmanager
def outputs_of(root: nn.Module, names: tuple[str, ...]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Record the outputs of modules while they are called."""
    seen: dict[str, list[torch.Tensor]] = {}

    def recorder(name: str) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            seen[name] = [t.detach().cpu() for t in floats(output)]

        return record

    hooks = [root.get_submodule(n).register_forward_hook(recorder(n)) for n in names]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
