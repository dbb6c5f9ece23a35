"""Which device this process computes on: an NPU, or the CPU as the stand-in without one.

The choice is made once per process and never falls back in silence: asking for an NPU that is not there is an error
that says why it is not there.
"""

from __future__ import annotations

import functools
import importlib
import sys

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ascend_core import binding, env
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
        mask = env.read(binding.MASK)
        return "torch_npu is installed but reports no usable NPU" + (f" under {binding.MASK}={mask}" if mask else "")
    return None


def count_npus() -> int:
    """Count the NPUs this process may use.

    Returns:
        Their number; 0 where there is no NPU, or no torch_npu.

    Raises:
        ConfigError: The mask of visible devices is malformed, or names devices that are not there.
    """
    if npu_problem() is not None:
        if "torch_npu" in sys.modules:
            binding.check_mask(0)
        return 0
    count = int(torch.get_device_module("npu").device_count())
    binding.check_mask(count)
    return count


def pick_device_type(requested: str | None = None) -> str:
    """Pick ``"npu"`` or ``"cpu"``.

    Args:
        requested: ``"npu"``, ``"cpu"`` or None. None reads ``ASCEND_DEVICE`` and then looks for an NPU.

    Returns:
        The device type.

    Raises:
        ConfigError: The request is neither npu nor cpu, or the mask of visible devices is wrong.
        DeviceError: An NPU was asked for, or nothing was asked for, and there is none.
    """
    wanted = requested or env.read("ASCEND_DEVICE")
    if wanted not in (None, "npu", "cpu"):
        raise ConfigError(f"device {wanted!r} is not known.", "Only Ascend NPUs and the CPU are supported.", "Use npu or cpu.")
    if wanted == "cpu":
        return "cpu"
    if count_npus():
        return "npu"
    problem = npu_problem()
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


def local_device(device_type: str | None = None, num_nodes: int | None = None) -> torch.device:
    """The device of this process, by its rank on its node.

    Args:
        device_type: ``"npu"``, ``"cpu"`` or None; see :func:`pick_device_type`.
        num_nodes: Nodes of the run, where the caller knows.

    Returns:
        ``npu:LOCAL_RANK``, or the CPU.

    Raises:
        ConfigError: ``LOCAL_RANK`` is needed and missing, or larger than the number of devices.
        DeviceError: There is no NPU.
    """
    if pick_device_type(device_type) == "cpu":
        return torch.device("cpu")
    visible = count_npus()
    local = binding.local_rank(num_nodes, visible)
    binding.check_local_rank(local, visible)
    return torch.device("npu", local)


def check_recomputation(device: torch.device) -> None:
    """Check that activation checkpointing draws the same random numbers twice on a device.

    ``torch.utils.checkpoint`` keeps a device's random state only if the device's module looks as it expects; otherwise
    dropout is drawn anew in the backward pass, and gradients are wrong without a sign of it.

    Args:
        device: This process's device; it must be in use already.

    Raises:
        DeviceError: A recomputed dropout differs from the first one.
    """
    module = torch.get_device_module(device)
    before = module.get_rng_state()
    x = torch.ones(64, device=device, requires_grad=True)
    y = checkpoint(F.dropout, x, 0.5, use_reentrant=False)
    module.manual_seed(1)
    y.sum().backward()
    module.set_rng_state(before)
    assert x.grad is not None
    if not torch.equal(y.detach() != 0, x.grad != 0):
        raise DeviceError(
            f"Activation checkpointing does not restore the random numbers of {device}.",
            f"torch.utils.checkpoint finds no random state to keep in torch.{device.type}; models with dropout would get "
            "wrong gradients without an error.",
            "Install the torch_npu that belongs to this torch.",
        )


def saturates(device: torch.device) -> bool:
    """Whether values that do not fit become the largest number of their type on a device, and not infinity.

    Ascend calls the two the saturation and the INF_NAN mode. torch_npu chooses when the device is set up: INF_NAN from
    Ascend910B1 on, unless ``INF_NAN_MODE_ENABLE=0`` and ``INF_NAN_MODE_FORCE_DISABLE=1``.

    Args:
        device: This process's device.
    """
    return device.type == "npu" and not torch.get_device_module(device).utils.is_support_inf_nan()


def current_device(device_type: str) -> torch.device:
    """The device of a type that this process is bound to."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
