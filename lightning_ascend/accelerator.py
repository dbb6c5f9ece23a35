"""The NPU as a Lightning accelerator, free of any Lightning namespace."""

from __future__ import annotations

from typing import Any

import torch

from ascend_core import device as core_device
from ascend_core import env
from ascend_core.errors import ConfigError, DeviceError


def auto_accelerator(strategy: object) -> str:
    """Decide what ``accelerator="auto"`` means where Lightning itself found only the CPU.

    Args:
        strategy: The Trainer's strategy flag, a string or an instance.

    Returns:
        ``"npu"`` or ``"cpu"``.

    Raises:
        ConfigError: The mask of visible devices is wrong.
        DeviceError: An Ascend strategy was chosen, and there is no NPU.
    """
    ours = getattr(strategy, "strategy_name", strategy)
    if isinstance(ours, str) and ours.startswith("ascend_"):
        return core_device.pick_device_type()
    if env.read("ASCEND_DEVICE") == "cpu" or not core_device.count_npus():
        return "cpu"
    return "npu"


class NPUAcceleratorMixin:
    """Implements Lightning's Accelerator interface for Ascend NPUs.

    Raises:
        ConfigError: The mask of visible devices is wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        core_device.count_npus()

    def setup_device(self, device: torch.device) -> None:
        """Bind the process to an NPU.

        Raises:
            DeviceError: The device is no NPU.
        """
        if device.type != "npu":
            raise DeviceError(
                f"accelerator='npu' was given the device {device}.",
                "The strategy chose another device than the accelerator.",
                "Use strategy='ascend_hybrid', or another accelerator.",
            )
        core_device.set_device(device)

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Memory statistics of an NPU, in bytes; see ``torch.get_device_module("npu").memory_stats``."""
        return dict(torch.get_device_module("npu").memory_stats(device))

    def teardown(self) -> None:
        """Free cached NPU memory."""
        torch.get_device_module("npu").empty_cache()

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Turn Lightning's ``devices`` into NPU indices.

        Args:
            devices: A count, -1 for all, a list of indices, or either as a string (``"4"``, ``"0,2"``).

        Returns:
            Indices relative to ``ASCEND_RT_VISIBLE_DEVICES``.

        Raises:
            ConfigError: An index is missing, negative or named twice.
        """
        count = NPUAcceleratorMixin.auto_device_count()
        if isinstance(devices, str):
            text = devices.strip()
            devices = [int(d) for d in text.split(",") if d.strip()] if "," in text else int(text)
        indices = list(range(count if devices == -1 else devices)) if isinstance(devices, int) else list(devices)
        wrong = [i for i in indices if not 0 <= i < count]
        if wrong or len(set(indices)) != len(indices) or not indices:
            mask = env.read("ASCEND_RT_VISIBLE_DEVICES")
            raise ConfigError(
                f"devices={devices!r} with {count} visible NPUs.",
                f"Indices go from 0 to {count - 1}, once each; ASCEND_RT_VISIBLE_DEVICES is {mask!r}.",
                "Choose other devices, or change the mask.",
            )
        return indices

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """One ``torch.device("npu", i)`` per index."""
        return [torch.device("npu", i) for i in devices]

    @staticmethod
    def auto_device_count() -> int:
        """Number of visible NPUs."""
        return core_device.count_npus()

    @staticmethod
    def is_available() -> bool:
        """Whether torch_npu works and sees an NPU."""
        return core_device.npu_problem() is None

    @staticmethod
    def name() -> str:
        """``"npu"``."""
        return "npu"
