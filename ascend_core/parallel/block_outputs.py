"""What a block that runs on another rank seems to return: the same nesting, with NaN for values.

A block may return a tensor, or any nesting of tensors and plain values whose first tensor is the activation. A rank that
steps over it learns the nesting from the rank that runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ascend_core._shim import pytree
from ascend_core.errors import ModelError
from ascend_core.parallel.activations import TensorMeta

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class OutputForm:
    """The nesting of a block's output; picklable.

    Attributes:
        key: The block's index, and whether it trains.
        spec: torch's description of the nesting.
        leaves: For each leaf, ``(shape, dtype)`` of a tensor, or a plain value.
        tensors: Which leaves are tensors.
    """

    key: tuple[int, bool]
    spec: Any
    leaves: tuple[Any, ...]
    tensors: tuple[bool, ...]

    @classmethod
    def of(cls, output: Any, name: str, key: tuple[int, bool]) -> OutputForm:
        """Describe an output.

        Args:
            output: What the block returned.
            name: The block's name, for errors.
            key: The block's index, and whether it trains.

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
        return cls(key, spec, tuple(_describe(leaf) for leaf in leaves), tensors)

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


class BlockOutputs:
    """How the outputs of a model's blocks are nested; in training and evaluation they may differ.

    What is *seen* concerns this rank's blocks; what is *known* is the same on all ranks of the pipeline.

    Args:
        blocks: The blocks.
        names: Their names, for errors.
    """

    def __init__(self, blocks: Sequence[nn.Module], names: Sequence[str]) -> None:
        self._blocks, self._names = blocks, names
        self._seen: dict[tuple[int, bool], OutputForm] = {}
        self._known: dict[tuple[int, bool], OutputForm] = {}

    def _key(self, index: int) -> tuple[int, bool]:
        return index, self._blocks[index].training

    def note(self, index: int, output: Any) -> None:
        """Look at what a block of this rank returned."""
        if self._key(index) not in self._seen:
            self._seen[self._key(index)] = self.describe(index, output)

    def describe(self, index: int, output: Any) -> OutputForm:
        """Describe what a block returned; see :meth:`OutputForm.of`."""
        return OutputForm.of(output, self._names[index], self._key(index))

    def seen(self, first: int, end: int) -> dict[tuple[int, bool], OutputForm]:
        """What was seen of a range of blocks, to be made known to every rank."""
        return {key: form for key, form in self._seen.items() if first <= key[0] < end}

    def make_known(self, forms: Mapping[tuple[int, bool], OutputForm]) -> None:
        """Take over what another rank has seen."""
        self._known.update(forms)

    def known(self, index: int) -> bool:
        """Whether a block's output can be imitated."""
        return self._key(index) in self._known

    def learn(self, form: OutputForm) -> None:
        """Take over one block's form."""
        self._known[form.key] = form

    def imitate(self, index: int, activation: torch.Tensor) -> Any:
        """What a block seems to return: its nesting around an activation, or the activation while nothing is known."""
        form = self._known.get(self._key(index))
        return activation if form is None else form.imitate(activation)
