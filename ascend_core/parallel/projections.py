"""Projections: modules that multiply by one weight matrix, in either memory order.

``nn.Linear`` keeps its weight as ``(out, in)``; GPT-2's ``Conv1D`` keeps it as ``(in, out)``. Everything that splits
matrices works with :class:`Projection` and does not care which one it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ascend_core.parallel.blocks import stand_in


@dataclass(frozen=True)
class Projection:
    """A module that computes ``x @ W + b``.

    Attributes:
        module: The module, with ``weight`` and ``bias`` (which may be None).
        in_features: Columns it takes.
        out_features: Columns it gives.
        out_dim: The dim of ``weight`` that counts output columns: 0 for ``nn.Linear``, 1 for ``Conv1D``.
    """

    module: nn.Module
    in_features: int
    out_features: int
    out_dim: int

    @property
    def in_dim(self) -> int:
        """The dim of ``weight`` that counts input columns."""
        return 1 - self.out_dim


def as_projection(module: nn.Module) -> Projection | None:
    """Describe a module if it is a projection and nothing else.

    A subclass of ``nn.Linear`` with a forward of its own is one if it holds nothing else and computes the same.

    Args:
        module: Any module.

    Returns:
        The description, or None.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return None
    if "forward" in module.__dict__ and stand_in(module) is None:  # pruned away here, it still holds a tied weight
        return None
    if isinstance(module, nn.Linear):
        if type(module).forward is not nn.Linear.forward and not _computes_linear(module):
            return None
        return Projection(module, module.in_features, module.out_features, 0)
    if type(module).__name__ == "Conv1D" and getattr(module, "nf", None) == weight.shape[1]:
        return Projection(module, weight.shape[0], weight.shape[1], 1)
    return None


def _computes_linear(module: nn.Linear) -> bool:
    """Try it with random numbers; adapters and quantised layers hold more than a weight and a bias."""
    held = {n for n, _ in (*module.named_parameters(), *module.named_buffers(), *module.named_children())}
    if not held <= {"weight", "bias"} or module.weight.is_meta:
        return False
    x = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(0)).to(module.weight)
    try:
        with torch.no_grad():
            return torch.allclose(
                type(module).forward(module, x), F.linear(x, module.weight, module.bias), rtol=1e-3, atol=1e-4
            )
    except Exception:  # noqa: BLE001 - it takes something else
        return False


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dim: int) -> torch.Tensor:
    """``x @ W + b`` on plain tensors, ``x (*, in)`` to ``(*, out)``, with the weight in either order."""
    return F.linear(x, weight if out_dim == 0 else weight.t(), bias)
