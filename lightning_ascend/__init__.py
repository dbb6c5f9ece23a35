"""Lightning plug-in: ``Trainer(strategy="ascend_hybrid")`` and ``accelerator="npu"``.

Importing it registers the names; a script need not, an entry point does it. The classes here belong to
``lightning.pytorch``; those of the stand-alone package are in :mod:`lightning_ascend.pytorch_lightning`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightning_ascend import _boot

if TYPE_CHECKING:
    from lightning_ascend.pytorch import AscendHybridStrategy as AscendHybridStrategy
    from lightning_ascend.pytorch import NPUAccelerator as NPUAccelerator

_boot.autoload()

_NAMES = ("AscendHybridStrategy", "NPUAccelerator")
__all__ = list(_NAMES)


def __getattr__(name: str) -> object:
    if name in _NAMES:
        return getattr(importlib.import_module("lightning_ascend.pytorch"), name)
    raise AttributeError(f"module 'lightning_ascend' has no attribute {name!r}")
