"""Signs as bits, eight to a byte, as 1-bit optimizers send them.

From the API documentation, which gives an equivalent in numpy: bit 1 stands for zero and above (so also for -0.0 and
NaN), bit 0 for below; the first element is the lowest bit; missing elements at the end are bits 0.
"""

from __future__ import annotations

import torch

from ascend_emulator.fused.registry import DOCS, formula

_WEIGHTS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Booleans as bytes, the first in the lowest bit; zeros fill the last byte."""
    missing = -bits.numel() % 8
    whole = torch.cat([bits.reshape(-1), bits.new_zeros(missing)]) if missing else bits.reshape(-1)
    return (whole.view(-1, 8) * _WEIGHTS).sum(1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bytes as booleans, the lowest bit first."""
    return (packed.reshape(-1, 1) & _WEIGHTS).bool().reshape(-1)


@formula("npu_sign_bits_pack", source=DOCS, checked="numpy.packbits(bitorder='little')")
def sign_bits_pack(input: torch.Tensor, size: int) -> torch.Tensor:
    """Signs of a vector (float16 or float32) as uint8 of shape (size, bytes / size)."""
    if input.dim() != 1 or input.dtype not in (torch.float16, torch.float32):
        raise RuntimeError("npu_sign_bits_pack takes a vector of float16 or float32")
    length = -(-input.numel() // 8)
    if size == 0 or length % size:
        raise RuntimeError(f"npu_sign_bits_pack: {length} bytes cannot be divided by size {size}")
    return pack_bits(~(input < 0)).view(size, -1)


@formula("npu_sign_bits_unpack", source=DOCS, checked="numpy.unpackbits(bitorder='little')")
def sign_bits_unpack(input: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as 1.0 and -1.0 of shape (size, bits / size)."""
    if input.dim() != 1 or input.dtype != torch.uint8:
        raise RuntimeError("npu_sign_bits_unpack takes a vector of uint8")
    if dtype not in (torch.float16, torch.float32):
        raise RuntimeError("npu_sign_bits_unpack gives float16 or float32")
    if size <= 0 or input.numel() * 8 % size:
        raise RuntimeError(f"npu_sign_bits_unpack: {input.numel() * 8} bits cannot be divided by size {size}")
    return (unpack_bits(input).to(dtype) * 2 - 1).view(size, -1)
