"""An Ascend machine without one: the real ``torch_npu`` over an emulated CANN runtime and HCCL.

What it is for: developing and testing code for Ascend on any Linux x86-64 machine. What it says nothing about: speed,
and the numerics and limits of NPU kernels, since operators run torch's CPU kernels over the same memory.

    python -m ascend_emulator --devices 8 train.py
    ASCEND_EMULATOR=1 is set for child processes, so launchers work too.

In a test, before torch is imported: ``import ascend_emulator; ascend_emulator.activate(devices=2)``.
"""

from __future__ import annotations

from ascend_emulator.load import activate
from ascend_emulator.traffic import Traffic, traffic

__all__ = ["Traffic", "activate", "traffic"]
