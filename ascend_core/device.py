"""Which device this process computes on: an NPU, or the CPU as the stand-in without one.

The choice is made once per process and never falls back in silence: asking for an NPU that is not there is an error
that says why it is not there.
"""

from __future__ import annotations

import functools
import importlib

import torch

from ascend_core import env
from ascend_core.errors import ConfigError, DeviceError

BACKENDS = {"npu": "cpu:gloo,npu:hccl", "cpu": "gloo"}
"""Process-group backend per device type. NPU groups carry gloo too, for objects and checkpoints."""


@functools.cache
def npu_problem() -> str | None:
    """Say why no NPU can be used, or None when one can.

    Returns:
        One sentence, or None.
    """
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        return f"torch_npu cannot be imported ({error})"
    except Exception as error:  # noqa: BLE001 - torch_npu raises many kinds when CANN is missing; the reason is passed on
        return f"torch_npu failed to load ({type(error).__name__}: {error})"
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return "torch_npu is installed but reports no usable NPU"
    return None


def pick_device_type(requested: str | None = None) -> str:
    """Pick ``"npu"`` or ``"cpu"``.

    Args:
        requested: ``"npu"``, ``"cpu"`` or None. None reads ``ASCEND_DEVICE`` and then looks for an NPU.

    Returns:
        The device type.

    Raises:
        ConfigError: The request is neither npu nor cpu.
        DeviceError: An NPU was asked for, or nothing was asked for, and there is none.
    """
    wanted = requested or env.read("ASCEND_DEVICE")
    if wanted not in (None, "npu", "cpu"):
        raise ConfigError(f"device {wanted!r} is not known.", "Only Ascend NPUs and the CPU are supported.", "Use npu or cpu.")
    if wanted == "cpu":
        return "cpu"
    problem = npu_problem()
    if problem is None:
        return "npu"
    raise DeviceError(
        f"No NPU: {problem}.",
        "A run never moves to the CPU in silence.",
        "Source CANN's set_env.sh and install torch_npu for this torch; or choose the CPU on purpose with "
        "accelerator='cpu' (Lightning) or the environment variable ASCEND_DEVICE=cpu.",
    )


def set_device(device: torch.device) -> None:
    """Bind this process to ``device``; a no-op on the CPU."""
    if device.type == "npu":
        torch.get_device_module(device).set_device(device)


def current_device(device_type: str) -> torch.device:
    """The device of a type that this process is bound to."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
