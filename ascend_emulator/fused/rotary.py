"""Rotary position embedding.

``half`` pairs element i with i + D/2, ``interleave`` pairs neighbours; both are written out in the API documentation.
"""

from __future__ import annotations

import torch

from ascend_emulator.fused.precision import wide
from ascend_emulator.fused.registry import DOCS, SOURCE, formula
from ascend_emulator.fused.vjp import vjp


def _rotate(x: torch.Tensor, mode: str) -> torch.Tensor:
    if x.size(-1) % 2:
        raise RuntimeError(f"rotary embedding needs an even last dimension, not {x.size(-1)}")
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    if mode == "interleave":
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    raise NotImplementedError(f"rotary_mode must be 'half' or 'interleave' in the emulator, not {mode!r}")


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    return x * cos + _rotate(x, mode) * sin


@formula("npu_rotary_mul", source=DOCS, checked="x cos + rotate(x) sin", backward="npu_rotary_mul_backward")
def rotary_mul(
    input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str, rotate: torch.Tensor | None
) -> torch.Tensor:
    """``input * r1 + rotate(input) * r2``; cosine and sine are broadcast and rounded to the input's type first.

    A tensor ``rotate`` replaces the rotation by ``input @ rotate``; torch_npu's derivative does not know it.
    """
    x, cos, sin = wide(input), wide(r1.to(input.dtype)), wide(r2.to(input.dtype))
    turned = _rotate(x, rotary_mode) if rotate is None else x @ wide(rotate)
    return (x * cos + turned * sin).to(input.dtype)


@formula("npu_rotary_mul_backward", source=SOURCE, checked="autograd of x cos + rotate(x) sin")
def rotary_mul_backward(
    grad: torch.Tensor, input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str
) -> tuple[torch.Tensor, ...]:
    """Gradients by the input, the cosine and the sine, all in the input's type."""
    inputs = [input, r1.to(input.dtype), r2.to(input.dtype)]
    return tuple(vjp(lambda x, cos, sin: _rotary(x, cos, sin, rotary_mode), inputs, grad.to(input.dtype)))


@formula("npu_apply_rotary_pos_emb", source=DOCS, checked="x cos + rotate(x) sin, in place", aliases=True)
def apply_rotary_pos_emb(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, rotary_mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates query and key in place and returns them; torch_npu has no derivative for it.

    Not emulated, because it is not documented which elements are rotated: the mode ``quarter``, and a cosine that is
    shorter than a head.
    """
    if layout not in ("BSND", "SBND", "BNSD", "TND"):
        raise RuntimeError(f"npu_apply_rotary_pos_emb: layout must be BSND, SBND, BNSD or TND, not {layout!r}")
    if query.dim() != (3 if layout == "TND" else 4) or key.dim() != query.dim():
        raise RuntimeError(f"npu_apply_rotary_pos_emb: layout {layout} with a query of {query.dim()} dimensions")
    if cos.size(-1) != query.size(-1):
        raise NotImplementedError("npu_apply_rotary_pos_emb: the emulator needs a cosine of a whole head")
    for tensor in (query, key):
        tensor.copy_(_rotary(wide(tensor), wide(cos), wide(sin), rotary_mode))
    return query, key


@formula("npu_interleave_rope", source=DOCS, checked="de-interleave, then x cos + rotate(x) sin")
def interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Moves even elements before odd ones, then rotates in the mode ``half``; torch_npu has no derivative for it."""
    ordered = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    return _rotary(wide(ordered), wide(cos), wide(sin), "half").to(x.dtype)
