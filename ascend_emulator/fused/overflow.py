"""The float status of a device: whether an operator has overflowed in saturating mode.

On Ascend 910B and later the status is read as eight int32, of which the first tells; the tensors given only choose the
device. ``_amp_foreach_non_finite_check`` reads the status too and does not look at the gradients, so in the default
inf/nan mode it always says False: that is torch_npu's own code. ``torch_npu.npu.utils.get_npu_overflow_flag`` refuses to
run in that mode.
"""

from __future__ import annotations

import torch

from ascend_emulator import float_status
from ascend_emulator.fused.registry import DOCS, SOURCE, formula


def _check_mode(mode: int) -> None:
    if mode not in (0, 1):
        raise RuntimeError(f"mode only supported for ORIGINAL_MODE(0) DEBUG_MODE(1), but got mode:{mode}")


@formula("npu_alloc_float_status", source=DOCS, checked="eight zeros", ignored="input")
def alloc_float_status() -> torch.Tensor:
    """Eight float zeros."""
    return torch.zeros(8)


@formula("npu_get_float_status", source=SOURCE, checked="the flag of ascend_emulator.float_status", wants_device=True)
def get_float_status(input: torch.Tensor, mode: int, device: torch.device) -> torch.Tensor:
    """Eight int32; the first is 1 if an operator of the device has overflowed."""
    _check_mode(mode)
    status = torch.zeros(8, dtype=torch.int32)
    status[0] = float_status.flag(device.index)
    return status


@formula("npu_clear_float_status", source=SOURCE, checked="the flag of ascend_emulator.float_status", wants_device=True)
def clear_float_status(input: torch.Tensor, mode: int, device: torch.device) -> torch.Tensor:
    """Forgets overflows; returns eight zeros."""
    _check_mode(mode)
    float_status.clear(device.index)
    return input.new_zeros(8)


@formula("_amp_foreach_non_finite_check", source=SOURCE, checked="the flag of ascend_emulator.float_status", wants_device=True)
def non_finite_check(scaled_grads: list[torch.Tensor], device: torch.device) -> bool:
    """Whether an operator of the device has overflowed; forgets it then."""
    raised = float_status.flag(device.index)
    if raised:
        float_status.clear(device.index)
    return raised
