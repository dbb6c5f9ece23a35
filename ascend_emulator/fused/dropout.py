"""Dropout whose mask is kept as bits.

The mask is a function of seed, offset and length, so a backward operator that gets seed and offset makes the same one.
Which elements an NPU drops for a seed is not known; here other ones are dropped.
"""

from __future__ import annotations

import torch

from ascend_emulator.fused.precision import wide
from ascend_emulator.fused.registry import DOCS, SOURCE, formula
from ascend_emulator.fused.sign_bits import pack_bits, unpack_bits
from ascend_emulator.random_state import draw, generator_at

STEPS = 12
"""How far one mask moves the generator: torch_npu asks for 10, which it rounds up to a multiple of 4."""


def keep_bits(seed: int, offset: int, count: int, keep: float) -> torch.Tensor:
    """Which of ``count`` elements are kept, each with probability ``keep``."""
    return torch.rand(count, generator=generator_at(seed, offset)) < keep


def pack_mask(bits: torch.Tensor) -> torch.Tensor:
    """The mask as bytes, filled up to a multiple of 128 bits."""
    return pack_bits(torch.cat([bits, bits.new_zeros(-bits.numel() % 128)]))


def _check(p: float, name: str) -> None:
    if not 0 <= p <= 1:
        raise RuntimeError(f"{name}: dropout probability has to be between 0 and 1, but got {p}")


def _masked(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    bits = unpack_bits(mask)[: x.numel()].view(x.shape)
    return (torch.where(bits, wide(x), 0) / (1 - p if p < 1 else 1)).to(x.dtype)


@formula("_npu_dropout", source=DOCS, checked="its mask times x / (1 - p)", backward="npu_dropout_backward", wants_device=True)
def dropout(input: torch.Tensor, p: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout and its mask in bits."""
    _check(p, "_npu_dropout")
    mask = pack_mask(keep_bits(*draw(None, device, STEPS), input.numel(), 1 - p))
    return _masked(input, mask, p), mask


@formula("npu_dropout_backward", source=SOURCE, checked="its mask times the gradient / (1 - p)")
def dropout_backward(grad_output: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """The gradient where elements were kept."""
    return _masked(grad_output, mask, p)


@formula(
    "npu_dropout_do_mask", source=SOURCE, checked="its mask times x / (1 - p)", backward="npu_dropout_backward", aliases=True
)
def dropout_do_mask(input: torch.Tensor, mask: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout with a mask in bits, and that mask."""
    _check(p, "npu_dropout_do_mask")
    return _masked(input, mask, p), mask


@formula("_npu_dropout_gen_mask.Tensor", source=DOCS, checked="the mask of npu_fusion_attention", ignored="input parallel sync")
def dropout_gen_mask(size: list[int], p: float, seed: int, offset: int) -> torch.Tensor:
    """The mask in bits for a seed and an offset; ``input`` chooses the device."""
    _check(p, "_npu_dropout_gen_mask")
    return pack_mask(keep_bits(seed, offset, torch.Size(size).numel(), 1 - p))
