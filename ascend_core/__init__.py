"""Framework-free core: configuration, mesh, and the hybrid-parallel engine. Everything is imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascend_core.config import HybridConfig as HybridConfig
    from ascend_core.errors import AscendError as AscendError
    from ascend_core.mesh import build_mesh as build_mesh
    from ascend_core.parallel import ParallelModel as ParallelModel
    from ascend_core.parallel import parallelize as parallelize

_WHERE = {
    "AscendError": "ascend_core.errors",
    "HybridConfig": "ascend_core.config",
    "ParallelModel": "ascend_core.parallel",
    "build_mesh": "ascend_core.mesh",
    "parallelize": "ascend_core.parallel",
}
__all__ = ["AscendError", "HybridConfig", "ParallelModel", "build_mesh", "parallelize"]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'ascend_core' has no attribute {name!r}")
