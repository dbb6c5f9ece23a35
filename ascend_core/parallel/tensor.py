"""Apply a tensor-parallel plan with DTensor.

A plan maps module names to styles. Where the style strings come from (automatic or the user's) is the business of
:mod:`ascend_core.parallel.tp_plans`; this file only checks and applies them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ascend_core.errors import ConfigError, nearest
from ascend_core.parallel.fused import FusedColumnLinear, ParallelMultiheadAttention

STYLES = {
    "colwise": "nn.Linear split by output columns; the output stays split",
    "rowwise": "nn.Linear split by input columns; takes a split input, sums the output",
    "colwise_gather": "nn.Linear split by output columns; the output is gathered",
    "rowwise_split": "nn.Linear split by input columns; takes a whole input and uses its own part",
    "fused_colwise": "nn.Linear that holds q, k and v; each third is split by columns",
    "attention": "nn.MultiheadAttention split by heads",
    "embedding": "nn.Embedding split by vocabulary",
}


def expand_plan(root: nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Turn globs into module names.

    Args:
        root: The model.
        plan: Module glob to style.

    Returns:
        Module name to style.

    Raises:
        ConfigError: A glob that matches nothing, a style that does not exist, or a module named twice with two styles.
    """
    names = [n for n, _ in root.named_modules() if n]
    expanded: dict[str, Any] = {}
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle) and style not in STYLES:
            raise ConfigError(
                f"tensor_parallel_plan: unknown style {style!r} for {pattern!r}.", "", nearest(str(style), STYLES)
            )
        matched = [n for n in names if fnmatch.fnmatchcase(n, pattern)]
        if not matched:
            raise ConfigError(
                f"tensor_parallel_plan: {pattern!r} matches no module.",
                "A plan entry without effect is a mistake.",
                nearest(pattern, names),
            )
        for name in matched:
            if expanded.setdefault(name, style) != style:
                raise ConfigError(
                    f"tensor_parallel_plan: {name!r} gets both {expanded[name]!r} and {style!r}.", "", "Keep one."
                )
    return expanded


def apply_tensor_parallel(root: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Shard the modules of a plan in place.

    Args:
        root: The model, materialised on the mesh's device.
        plan: Module name to style, from :func:`expand_plan`.
        mesh: The one-axis ``tp`` mesh.

    Raises:
        ConfigError: A style does not fit its module, or sizes do not divide.

    Communication:
        Rank 0 of each tensor-parallel group scatters the parameters it holds.
    """
    for name, style in plan.items():
        module = root.get_submodule(name)
        if isinstance(style, str) and not any(True for _ in module.parameters()):
            continue  # hollowed out: it lives on another stage
        for target, torch_style in _torch_styles(root, name, module, style, mesh).items():
            parallelize_module(root.get_submodule(target), mesh, torch_style)


def _torch_styles(root: nn.Module, name: str, module: nn.Module, style: Any, mesh: DeviceMesh) -> dict[str, ParallelStyle]:
    if isinstance(style, ParallelStyle):
        return {name: style}
    size = mesh.size()
    if style == "attention":
        _expect(name, module, nn.MultiheadAttention, style)
        assert isinstance(module, nn.MultiheadAttention)
        _replace(root, name, ParallelMultiheadAttention(module, size, mesh.get_local_rank()))
        return {**{f"{name}.{p}": ColwiseParallel() for p in "qkv"}, f"{name}.out_proj": RowwiseParallel()}
    if style == "embedding":
        _expect(name, module, nn.Embedding, style)
        return {name: RowwiseParallel(input_layouts=Replicate())}
    _expect(name, module, nn.Linear, style)
    assert isinstance(module, nn.Linear)
    if style == "fused_colwise":
        if module.out_features % (3 * size):
            raise _indivisible(name, "out_features", module.out_features, 3 * size)
        fused = FusedColumnLinear(module, [module.out_features // 3] * 3)
        _replace(root, name, fused)
        return {f"{name}.{p}": ColwiseParallel() for p in fused.parts}
    if style == "colwise" and module.out_features % size:
        raise _indivisible(name, "out_features", module.out_features, size)
    if style == "rowwise" and module.in_features % size:
        raise _indivisible(name, "in_features", module.in_features, size)
    return {
        name: {
            "colwise": ColwiseParallel(),
            "rowwise": RowwiseParallel(),
            "colwise_gather": ColwiseParallel(output_layouts=Replicate()),
            "rowwise_split": RowwiseParallel(input_layouts=Replicate()),
        }[style]
    }


def _expect(name: str, module: nn.Module, kind: type[nn.Module], style: str) -> None:
    if not isinstance(module, kind):
        raise ConfigError(
            f"tensor_parallel_plan: {name!r} is a {type(module).__name__}, and style {style!r} is for {kind.__name__}.",
            STYLES[style],
            "Choose another style or another module.",
        )


def _indivisible(name: str, what: str, value: int, size: int) -> ConfigError:
    return ConfigError(
        f"{name!r}: {what}={value} does not divide by {size}.",
        "A split layer gives every tensor-parallel rank the same number of columns.",
        "Choose a tensor_parallel_size that divides it, or the styles colwise_gather and rowwise_split.",
    )


def _replace(root: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    root.get_submodule(parent).register_module(leaf, new)
