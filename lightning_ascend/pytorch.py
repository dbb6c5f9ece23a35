"""The plug-in's classes for ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy

from lightning_ascend.accelerator import NPUAcceleratorMixin
from lightning_ascend.strategy import HybridStrategyMixin

__all__ = ["AscendHybridStrategy", "NPUAccelerator"]


class NPUAccelerator(NPUAcceleratorMixin, Accelerator):
    """Accelerator for Huawei Ascend NPUs."""


class AscendHybridStrategy(HybridStrategyMixin, DDPStrategy):
    """Pipeline x tensor x data parallel training; see :class:`HybridStrategyMixin` for the arguments."""
