"""What travels between stages: the activation among a block's arguments, and whole outputs in an evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ascend_core._shim import pytree
from ascend_core.errors import ModelError


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this shape with any values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def broadcast_nest(
    output: Any, owner: int, group: dist.ProcessGroup, device: torch.device, error: Exception | None = None
) -> tuple[Any, Exception | None]:
    """Give every rank of a group one rank's output, any nesting of tensors and plain values.

    Args:
        output: The output; looked at on the owner only.
        owner: Rank in the group that has it.
        group: The group.
        device: Where the others receive tensors.
        error: The owner's error, sent in place of an output.

    Returns:
        The output (None with an error), and the error.

    Communication:
        One object broadcast, and one broadcast per tensor.
    """
    mine = owner == dist.get_rank(group)
    source = dist.get_global_rank(group, owner)
    leaves, spec = pytree.tree_flatten(output)
    plain = [TensorMeta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    message = [(plain, spec, error) if mine else None]
    dist.broadcast_object_list(message, src=source, group=group)
    plain, spec, failure = message[0]  # type: ignore[misc]
    if failure is not None:
        return None, failure
    received = []
    for i, leaf in enumerate(plain):
        if isinstance(leaf, TensorMeta):
            tensor = leaves[i].contiguous() if mine else leaf.empty(device)
            dist.broadcast(tensor, src=source, group=group)
            received.append(tensor)
        else:
            received.append(leaf)
    return pytree.tree_unflatten(received, spec), None


def argument_order(block: torch.nn.Module) -> dict[str, int]:
    """Position of each argument of a block's ``forward``; empty if Python cannot tell (a compiled ``forward``)."""
    try:
        return {name: i for i, name in enumerate(inspect.signature(block.forward).parameters)}
    except (TypeError, ValueError):
        return {}


def in_order(kwargs: dict[str, Any], order: Mapping[str, int]) -> dict[str, Any]:
    """Keyword arguments in the order of the signature, so that the activation is first wherever the call names it."""
    return dict(sorted(kwargs.items(), key=lambda item: order.get(item[0], len(order)))) if len(kwargs) > 1 else kwargs


def activation(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> torch.Tensor:
    """The first tensor argument of a block: what one stage sends to the next."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise ModelError(
        f"Block {name!r} was called without a tensor argument.",
        "Its first tensor argument is what a stage sends to the next one.",
        "Pass the activation to the block as a tensor.",
    )


def replace(args: tuple[Any, ...], kwargs: dict[str, Any], tensor: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put another tensor in the place of the activation."""
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:i], tensor, *args[i + 1 :]), kwargs
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            return args, {**kwargs, key: tensor}
    raise AssertionError("checked by activation")


def poison(activation: torch.Tensor, fresh: bool) -> torch.Tensor:
    """What a block of an earlier stage seems to return: NaN, so that nothing can use it unnoticed."""
    if fresh and activation.is_floating_point():
        return torch.full_like(activation.detach(), float("nan"))
    return activation
