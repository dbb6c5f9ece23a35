"""The float status of each device: a flag that an overflow in saturating mode raises and that stays until it is cleared.

On a real NPU it is a register; ``npu_get_float_status`` reads it and ``npu_clear_float_status`` clears it. In the
default inf/nan mode nothing raises it: results are infinite instead.
"""

from __future__ import annotations

from ascend_emulator.load import runtime


def raise_flag(device_index: int) -> None:
    """An operator on this device has overflowed."""
    runtime().emu_raise_float_status(device_index)


def flag(device_index: int) -> bool:
    """Whether an operator on this device has overflowed since the flag was cleared."""
    return bool(runtime().emu_float_status(device_index))


def clear(device_index: int) -> None:
    """Forget the overflows of this device."""
    runtime().emu_clear_float_status(device_index)
