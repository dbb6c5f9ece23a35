"""The plug-in's classes for the stand-alone ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.strategies import DDPStrategy

from lightning_ascend.accelerator import NPUAcceleratorMixin
from lightning_ascend.strategy import HybridStrategyMixin

__all__ = ["AscendHybridStrategy", "NPUAccelerator"]


class NPUAccelerator(NPUAcceleratorMixin, Accelerator):
    """Accelerator for Huawei Ascend NPUs."""


class AscendHybridStrategy(HybridStrategyMixin, DDPStrategy):
    """Pipeline x tensor x data parallel training; see :class:`HybridStrategyMixin` for the arguments."""
