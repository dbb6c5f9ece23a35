"""Apply a tensor-parallel plan.

A plan maps module names to styles. Where the style strings come from (automatic or the user's) is the business of
:mod:`ascend_core.parallel.tp_plans`; this file only checks and applies them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ascend_core.errors import ConfigError, nearest
from ascend_core.parallel.blocks import stand_in
from ascend_core.parallel.fused import FusedColumnLinear, ParallelMultiheadAttention
from ascend_core.parallel.projections import Projection, as_projection
from ascend_core.parallel.regions import ColumnForward, EmbeddingForward, Region, RowForward, share_gradient
from ascend_core.parallel.tp_styles import STYLES, TensorPlan, parse_style, part_sizes, styled_regions


def expand_plan(root: nn.Module, plan: Mapping[str, Any]) -> TensorPlan:
    """Turn a user's globs into module names.

    Args:
        root: The model.
        plan: Module glob to style.

    Returns:
        The plan.

    Raises:
        ConfigError: A glob that matches nothing, a style that does not exist, or a module named twice with two styles.
    """
    names = [n for n, _ in root.named_modules() if n]
    expanded: dict[str, Any] = {}
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            try:
                parse_style(str(style))
            except ConfigError as error:
                raise ConfigError(f"{error.what} It is given for {pattern!r}.", error.why, error.do) from None
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
    return TensorPlan(expanded, styled_regions(expanded, names))


def apply_tensor_parallel(root: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> dict[str, Region]:
    """Shard the modules of a plan in place. Every rank must hold the same values; nothing is sent.

    Args:
        root: The model, materialised on the mesh's device.
        plan: The plan.
        mesh: The one-axis ``tp`` mesh.

    Returns:
        Module name to its region, for what is split here.

    Raises:
        ConfigError: A style does not fit its module, or sizes do not divide.
    """
    regions = [Region(mesh, row=r.row is not None) for r in plan.regions]
    by_name = {n: region for r, region in zip(plan.regions, regions, strict=True) for n in (*r.columns, r.row) if n}
    used: dict[str, Region] = {}
    for name, style in plan.styles.items():
        module = root.get_submodule(name)
        if isinstance(style, ParallelStyle):
            parallelize_module(module, mesh, style)
        elif any(True for _ in module.parameters()):  # a hollow one lives on another stage
            used[name] = by_name.get(name) or Region(mesh, row=style == "attention")
            pruned = stand_in(module)
            if pruned is not None:  # only its tied weight is here
                del module.forward
            _split(root, name, module, style, used[name])
            if pruned is not None:
                module.forward = pruned  # type: ignore[assignment]
    for name in plan.summed:
        module = root.get_submodule(name)
        if any(True for _ in module.parameters(recurse=False)):
            share_gradient(module, mesh.size())
    return used


def _split(root: nn.Module, name: str, module: nn.Module, style: str, region: Region) -> None:
    kind, numbers = parse_style(style)
    if kind == "attention":
        if not isinstance(module, nn.MultiheadAttention):
            raise _misfit(name, module, kind, "nn.MultiheadAttention")
        _split_attention(root, name, module, region)
        return
    if kind == "embedding":
        plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
        if not plain or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:  # type: ignore[union-attr]
            raise _misfit(name, module, kind, "a plain nn.Embedding")
        module.forward = EmbeddingForward(module, region)  # type: ignore[arg-type,assignment]
        return
    projection = as_projection(module)
    if projection is None:
        raise _misfit(name, module, kind, "Linear")
    _check_sizes(name, projection, style, region.size)
    if kind in ("rowwise", "rowwise_split"):
        module.forward = RowForward(projection, region, cuts=kind == "rowwise_split")  # type: ignore[assignment]
    elif kind in ("fused_colwise", "packed_colwise"):
        fused = FusedColumnLinear(projection, part_sizes(style, projection.out_features))
        _replace(root, name, fused)
        for part in fused.parts:
            _split_part(fused, part, region)
    else:
        groups = numbers[0] if kind == "shared_colwise" else 0
        gathers, keeps = kind == "colwise_gather", kind == "colwise_vocab"
        module.forward = ColumnForward(projection, region, gathers=gathers, groups=groups, keeps=keeps)  # type: ignore[assignment]


def _split_part(owner: nn.Module, name: str, region: Region) -> None:
    part: Any = owner.get_submodule(name)
    part.forward = ColumnForward(part.projection, region)


def _split_attention(root: nn.Module, name: str, module: nn.MultiheadAttention, region: Region) -> None:
    attention = ParallelMultiheadAttention(module, region.size, region.rank)
    _replace(root, name, attention)
    for part in "qkv":
        _split_part(attention, part, region)
    out: Any = as_projection(attention.out_proj)
    attention.out_proj.forward = RowForward(out, region)  # type: ignore[assignment]


def _check_sizes(name: str, projection: Projection, style: str, size: int) -> None:
    kind, numbers = parse_style(style)
    if kind == "shared_colwise":
        heads = numbers[0] if numbers else 0
        if not heads or projection.out_features % heads or size % heads:
            raise ConfigError(
                f"{name!r}: {style!r} over {size} ranks with {projection.out_features} columns.",
                "Each of its heads is used by the same number of ranks.",
                "Give the number of heads, which must divide the ranks, as in 'shared_colwise:2'.",
            )
    elif kind in ("colwise", "fused_colwise", "packed_colwise"):
        for part in part_sizes(style, projection.out_features):
            if part % size:
                raise _indivisible(name, "out_features", part, size)
    elif kind == "rowwise" and projection.in_features % size:
        raise _indivisible(name, "in_features", projection.in_features, size)


def _misfit(name: str, module: nn.Module, style: str, kind: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_plan: {name!r} is a {type(module).__name__}, and style {style!r} is for {kind}.",
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
