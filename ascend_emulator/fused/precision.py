"""16-bit tensors are computed in float32 and rounded once, as NPU kernels do."""

from __future__ import annotations

import torch

_NARROW = (torch.float16, torch.bfloat16)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the type in which it is computed: float32 instead of a 16-bit float."""
    return tensor.float() if tensor.dtype in _NARROW else tensor


def maybe_wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """:func:`wide` for an optional tensor."""
    return None if tensor is None else wide(tensor)
