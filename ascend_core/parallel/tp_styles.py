"""The styles of a tensor-parallel plan: their names, what they take, and which columns each rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ascend_core.errors import ConfigError, nearest

STYLES = {
    "colwise": "projection split by output columns; the output stays split",
    "rowwise": "projection split by input columns; takes a split input, sums the output",
    "colwise_gather": "projection split by output columns; the output is gathered",
    "rowwise_split": "projection split by input columns; takes a whole input and uses its own part",
    "fused_colwise": "projection that holds q, k and v in this order; each is split by columns ('fused_colwise:32,8,8': sizes)",
    "packed_colwise": "projection that holds gate and up in this order; each is split by columns",
    "shared_colwise": "key or value projection with fewer heads than ranks ('shared_colwise:2' has 2 heads)",
    "colwise_vocab": "head split by output columns, for vocab_parallel_cross_entropy; the output is a DTensor",
    "attention": "nn.MultiheadAttention split by heads",
    "embedding": "nn.Embedding split by vocabulary",
}
COLUMN_STYLES = ("colwise", "fused_colwise", "packed_colwise", "shared_colwise")
"""Styles whose output stays on its rank, until a row projection takes it."""


@dataclass(frozen=True)
class SplitRegion:
    """Projections between which activations are split.

    Attributes:
        columns: Names of the projections into it.
        row: Name of the projection out of it, or None in a user's plan that ends it elsewhere.
        scope: Name of the module that holds the columns.
    """

    columns: tuple[str, ...]
    row: str | None
    scope: str


@dataclass
class TensorPlan:
    """What is done to a model.

    Attributes:
        styles: Module name to style, or to one of torch's ``ParallelStyle`` objects.
        regions: Regions in which activations are split.
        summed: Names of whole modules inside regions, whose parameters get part of their gradient on every rank.
    """

    styles: dict[str, Any] = field(default_factory=dict)
    regions: list[SplitRegion] = field(default_factory=list)
    summed: list[str] = field(default_factory=list)

    def add(self, other: TensorPlan, prefix: str) -> None:
        """Take over another plan, whose names start at ``prefix``."""
        dot = f"{prefix}." if prefix else ""

        def full(name: str) -> str:
            return dot + name if name else prefix

        self.styles.update({full(k): v for k, v in other.styles.items()})
        for r in other.regions:
            row = None if r.row is None else full(r.row)
            self.regions.append(SplitRegion(tuple(full(c) for c in r.columns), row, full(r.scope)))
        self.summed += [full(n) for n in other.summed]

    def leave_out(self, modules: list[str]) -> None:
        """Forget everything inside some modules."""

        def inside(name: str) -> bool:
            return any(name == m or name.startswith(f"{m}.") for m in modules)

        self.styles = {n: style for n, style in self.styles.items() if not inside(n)}
        self.regions = [r for r in self.regions if not any(inside(c) for c in r.columns)]
        self.summed = [n for n in self.summed if not inside(n)]


def parse_style(style: str) -> tuple[str, tuple[int, ...]]:
    """Cut ``"name:1,2"`` into its name and numbers.

    Raises:
        ConfigError: There is no such style, or the numbers are none.
    """
    name, _, numbers = style.partition(":")
    if name not in STYLES:
        raise ConfigError(f"tensor_parallel_plan: unknown style {style!r}.", "", nearest(name, STYLES))
    try:
        values = tuple(int(n) for n in numbers.split(",")) if numbers else ()
    except ValueError:
        values = (-1,)
    if any(v < 1 for v in values) or (values and name not in ("fused_colwise", "shared_colwise")):
        raise ConfigError(f"tensor_parallel_plan: {style!r} is no style.", STYLES[name], "See docs/tensor_parallel.md.")
    return name, values


def part_sizes(style: str, out_features: int) -> list[int]:
    """Output columns of each part of a projection; one part if it is not fused.

    Raises:
        ConfigError: The parts do not add up to the projection.
    """
    name, sizes = parse_style(style)
    if name == "shared_colwise" or name not in COLUMN_STYLES or name == "colwise":
        return [out_features]
    count = 2 if name == "packed_colwise" else 3
    parts = list(sizes) or [out_features // count] * count
    if sum(parts) != out_features:
        raise ConfigError(
            f"tensor_parallel_plan: {style!r} for a projection with {out_features} columns.",
            f"Its parts have {parts} columns.",
            "Give the sizes of the parts, as in 'fused_colwise:32,8,8'.",
        )
    return parts


def local_columns(output: torch.Tensor, style: str, rank: int, size: int) -> torch.Tensor:
    """The columns of a projection's whole output ``(*, out)`` that a rank has under a style."""
    name, numbers = parse_style(style)
    if name == "shared_colwise":
        width = output.shape[-1] // numbers[0]
        return output.narrow(-1, rank * numbers[0] // size * width, width)
    parts = output.split(part_sizes(style, output.shape[-1]), dim=-1)
    return torch.cat([p.chunk(size, dim=-1)[rank] for p in parts], dim=-1)


def styled_regions(styles: Mapping[str, Any], names: Sequence[str]) -> list[SplitRegion]:
    """Guess the regions of a user's plan: column projections that one module holds, and the next row projection.

    A row projection of the same module ends a region; one elsewhere ends the last that is open.

    Args:
        styles: Module name to style.
        names: Module names in the model's order.
    """
    found: list[SplitRegion] = []
    for name in names:
        style = styles.get(name)
        kind = parse_style(style)[0] if isinstance(style, str) else ""
        scope = name.rpartition(".")[0]
        if kind in COLUMN_STYLES:
            open_here = next((i for i, r in enumerate(found) if r.row is None and r.scope == scope), None)
            if open_here is None:
                found.append(SplitRegion((name,), None, scope))
            else:
                found[open_here] = SplitRegion((*found[open_here].columns, name), None, scope)
        elif kind == "rowwise":
            waiting = [i for i, r in enumerate(found) if r.row is None]
            here = [i for i in waiting if found[i].scope == scope] or waiting[-1:]
            if here:
                region = found[here[0]]
                found[here[0]] = SplitRegion(region.columns, name, region.scope)
    return found
