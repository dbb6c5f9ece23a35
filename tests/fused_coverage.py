"""Rank function: runs the areas of the operator tests and sees which formulas they reach."""

from __future__ import annotations

import importlib
import traceback
from typing import Any

AREAS = [
    "fused_ops:activations", "fused_ops:norms", "fused_ops:rotary", "fused_ops:products", "fused_ops:shapes_and_casts",
    "fused_ops:sign_bits", "fused_training:losses", "fused_training:optimizers", "fused_training:dropout",
    "fused_training:overflow", "fused_moe:tokens", "fused_moe:routing_map", "fused_moe:routing", "fused_attention:layouts",
    "fused_attention:masks", "fused_attention:sequences", "fused_attention:biases", "fused_attention:statistics",
    "fused_attention:dropout",
]  # fmt: skip


def run() -> dict[str, list[str]]:
    """What is wrong in each area; and under ``unreached``, the formulas that none of them ran."""
    from ascend_emulator.fused.kernel import FusedKernel
    from ascend_emulator.fused.registry import FORMULAS

    reached = set()
    original = FusedKernel.__call__

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        reached.add(self.formula.name)
        return original(self, *args, **kwargs)

    found = {}
    FusedKernel.__call__ = recording  # type: ignore[method-assign]
    try:
        for area in AREAS:
            module, _, name = area.partition(":")
            try:
                found[area] = getattr(importlib.import_module(module), name)()
            except Exception:
                found[area] = [traceback.format_exc()]
    finally:
        FusedKernel.__call__ = original  # type: ignore[method-assign]
    return {**found, "unreached": sorted(set(FORMULAS) - reached)}
