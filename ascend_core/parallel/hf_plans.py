"""The plan that a Hugging Face model brings along, in the style names of old and new versions.

It is read by its attributes (``_tp_plan`` of a model, ``base_model_tp_plan`` of its config); nothing of the library is
imported. It says which modules may be split. How they are split is proved by a dry run all the same.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ascend_core.parallel.projections import as_projection

_NAMES = {
    "colwise": "colwise",
    "local_colwise": "colwise",
    "packed_colwise": "colwise",
    "local_packed_colwise": "colwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "rowwise": "rowwise",
    "local_rowwise": "rowwise",
    "packed_rowwise": "rowwise",
    "local_packed_rowwise": "rowwise",
    "rowwise_rep": "rowwise_split",
    "rowwise_split_input": "rowwise_split",
    "embedding_rowwise": "embedding",
}
"""Their names to ours. Not here, and so left whole: replicated modules and norms, gathers and all-reduces between modules
(the dry run finds what needs them), and everything of mixture-of-experts layers."""


def declared_styles(root: nn.Module) -> dict[str, str]:
    """Styles that the model's own plan gives to its projections and embeddings.

    Args:
        root: The model, or a module that holds it.

    Returns:
        Module name to style; empty for a model without a plan.
    """
    styles: dict[str, str] = {}
    for prefix, plan in _plans(root):
        modules = {n: m for n, m in root.named_modules() if n.startswith(prefix)}
        for pattern, style in plan.items():
            ours = _NAMES.get(style) if isinstance(style, str) else None
            if ours is None:
                continue
            wanted = prefix + pattern
            if ours == "rowwise" and wanted in modules and isinstance(modules[wanted], nn.Embedding):
                ours = "embedding"
            for name, module in modules.items():
                if fnmatch.fnmatchcase(name, wanted) and _fits(module, ours):
                    styles.setdefault(name, ours)
    return styles


def _fits(module: nn.Module, style: str) -> bool:
    return isinstance(module, nn.Embedding) if style == "embedding" else as_projection(module) is not None


def _plans(root: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every plan with the prefix its patterns start at, the outermost first."""
    for name, module in root.named_modules():
        prefix = f"{name}." if name else ""
        own = getattr(module, "_tp_plan", None)
        if isinstance(own, Mapping):
            yield prefix, own
        inner = getattr(module, "base_model", None)
        declared = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if inner is module and isinstance(declared, Mapping):
            yield prefix, declared
