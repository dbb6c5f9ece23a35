"""The saturating overflow mode: values that do not fit become the largest number, and the device's status flag is raised.

It is the default of SoCs before Ascend910B1; on later ones torch_npu wants ``INF_NAN_MODE_ENABLE=0`` and
``INF_NAN_MODE_FORCE_DISABLE=1``.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ascend_emulator import float_status
from ascend_emulator.load import runtime

_saturate = ctypes.c_int.in_dll(runtime(), "emu_saturate")
_CLAMPED = (torch.float16, torch.bfloat16, torch.float32)


def on() -> bool:
    """Whether this process computes in saturating mode; torch_npu decides when it sets up a device."""
    return bool(_saturate.value)


def clamp(value: Any, device: torch.device) -> None:
    """Clamp computed CPU values in place, NaN to zero, and raise the device's flag if any did not fit.

    Args:
        value: A tensor, or a list or tuple of such, nested.
        device: The NPU that computed them.
    """
    if isinstance(value, (list, tuple)):
        for v in value:
            clamp(v, device)
    elif isinstance(value, torch.Tensor) and value.dtype in _CLAMPED and not torch.isfinite(value).all():
        torch.nan_to_num_(value, 0.0)
        float_status.raise_flag(device.index)
