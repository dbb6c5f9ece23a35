"""What a block that runs on another rank seems to return: the same nesting, with NaN for values.

A block may return a tensor, or any nesting of tensors and plain values whose first tensor is the activation. A rank that
steps over it learns the nesting from the rank that runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ascend_core._shim import pytree
from ascend_core.errors import ModelError
from ascend_core.parallel.activations import TensorMeta

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class OutputForm:
    """The nesting of a block's output; picklable.

    Attributes:
        spec: torch's description of the nesting.
        leaves: For each leaf, ``(shape, dtype)`` of a tensor, or a plain value.
        tensors: Which leaves are tensors.
    """

    spec: Any
    leaves: tuple[Any, ...]
    tensors: tuple[bool, ...]

    @classmethod
    def of(cls, output: Any, name: str) -> OutputForm:
        """Describe an output.

        Args:
            output: What the block returned.
            name: The block's name, for errors.

        Raises:
            ModelError: It holds no tensor.
        """
        leaves, spec = pytree.tree_flatten(output)
        tensors = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if not any(tensors):
            raise ModelError(
                f"Block {name!r} returned {type(output).__name__} without a tensor.",
                "The first tensor that a block returns is its activation.",
                "Return the activation, alone or first in a tuple.",
            )
        return cls(spec, tuple(_describe(leaf) for leaf in leaves), tensors)

    def imitate(self, activation: torch.Tensor) -> Any:
        """Build such an output around an activation; other tensors are NaN, or None if they cannot be."""
        first = self.tensors.index(True)
        leaves = [activation if i == first else _stand_in(leaf, activation.device) for i, leaf in enumerate(self.leaves)]
        return pytree.tree_unflatten(leaves, self.spec)


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorMeta.of(leaf)
    return leaf if isinstance(leaf, _PLAIN) else None


def _stand_in(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, TensorMeta):
        return leaf
    return torch.full(leaf.shape, float("nan"), dtype=leaf.dtype, device=device) if leaf.dtype.is_floating_point else None
