"""Types that operators take as integers."""

from __future__ import annotations

import torch

_SCALAR_TYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip


def type_of(number: int | torch.dtype) -> torch.dtype:
    """The torch type for torch's own number of it; torch_npu's further types (256 and above) do not exist here."""
    if isinstance(number, torch.dtype):
        return number
    if number not in _SCALAR_TYPES:
        raise NotImplementedError(f"the emulator has no tensors of torch_npu's type number {number}")
    return _SCALAR_TYPES[number]
