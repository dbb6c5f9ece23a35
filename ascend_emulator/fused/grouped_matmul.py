"""Several matrix products in one call, as mixture-of-experts layers need them.

torch_npu has no derivative for them: training code calls the same operator with the other grouping axis. Products of
quantized types are not emulated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ascend_emulator.fused.precision import wide
from ascend_emulator.fused.registry import DOCS, OP_TEST, formula
from ascend_emulator.fused.scalar_types import type_of

_QUANTIZED = (
    "scale offset antiquant_scale antiquant_offset per_token_scale activation_input activation_quant_scale "
    "activation_quant_offset"
)

_ACTIVATIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    0: lambda y: y,
    1: torch.relu,
    2: lambda y: F.gelu(y, approximate="tanh"),
    4: lambda y: y * torch.sigmoid(1.702 * y),
    5: F.silu,
}


def group_sizes(group_list: torch.Tensor | list[int], kind: int, total: int) -> list[int]:
    """Sizes of the groups.

    Args:
        group_list: One number for each group.
        kind: 0 for running sums, 1 for sizes.
        total: Length of the grouped axis.

    Returns:
        The sizes; what they leave of the axis is in no group.
    """
    if kind not in (0, 1):
        raise NotImplementedError("group_list_type 2 exists for int8 only, which the emulator does not compute")
    numbers = [int(n) for n in group_list]
    sizes = numbers if kind == 1 else [b - a for a, b in zip([0, *numbers], numbers, strict=False)]
    if any(s < 0 for s in sizes) or sum(sizes) > total:
        raise RuntimeError(f"group_list {numbers} (type {kind}) does not fit an axis of length {total}")
    return sizes


def _each(tensors: list[torch.Tensor] | None, count: int) -> list[torch.Tensor | None]:
    """One tensor for each group: a list of them, or one with the groups in its first dimension."""
    if not tensors:
        return [None] * count
    return list(tensors[0]) if len(tensors) == 1 and tensors[0].size(0) == count else list(tensors)


def _products(
    xs: list[torch.Tensor], weights: list[torch.Tensor], biases: list[torch.Tensor | None], act_type: int
) -> list[torch.Tensor]:
    if act_type not in _ACTIVATIONS:
        raise RuntimeError(f"npu_grouped_matmul: act_type {act_type} is not supported")
    if not len(xs) == len(weights) == len(biases):
        raise RuntimeError(f"npu_grouped_matmul: {len(xs)} inputs, {len(weights)} weights and {len(biases)} biases do not fit")
    out = []
    for x, weight, bias in zip(xs, weights, biases, strict=True):
        y = wide(x) @ wide(weight)
        out.append(_ACTIVATIONS[act_type](y if bias is None else y + wide(bias)))
    return out


def _check_split(split_item: int, xs: int, weights: int, groups: int) -> None:
    if split_item not in (0, 1, 2, 3):
        raise RuntimeError(f"npu_grouped_matmul: split_item must be 0, 1, 2 or 3, not {split_item}")
    if split_item < 2 and groups and (xs != 1 or weights != groups):
        raise RuntimeError(
            "npu_grouped_matmul: with split_item 0 or 1 and a group_list, x must be one tensor and every group needs a "
            f"weight; got {xs} tensors, {weights} weights, {groups} groups"
        )
    if split_item < 2 and not groups and xs != weights:
        raise RuntimeError(f"npu_grouped_matmul: {xs} tensors and {weights} weights without a group_list")


def _by_rows(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    bias: list[torch.Tensor] | None,
    sizes: list[int] | None,
    split_item: int,
    act_type: int,
) -> list[torch.Tensor]:
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
    _check_split(split_item, len(x), len(weights), len(sizes or ()))
    rest = 0
    if sizes is not None and len(x) == 1:
        rest = x[0].size(0) - sum(sizes)
        x = list(x[0][: sum(sizes)].split(sizes))
    out = _products(x, weights, _each(bias, len(weights)), act_type)
    if split_item < 2:
        return out
    unwritten = out[0].new_full((rest, out[0].size(1)), float("nan"))
    return [torch.cat([*out, unwritten])]


@formula(
    "npu_grouped_matmul",
    source=DOCS,
    checked="one matmul for each group; weight gradient by the k axis",
    refused=f"{_QUANTIZED} x_dtype weight_dtype scale_dtype per_token_scale_dtype",
    ignored="tuning_config",
)
def grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    bias: list[torch.Tensor] | None,
    group_list: torch.Tensor | None,
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
    act_type: int | None,
    output_dtype: int | None,
) -> list[torch.Tensor]:
    """``x_i @ weight_i + bias_i``; ``split_item`` 0 and 1 give one tensor for each group, 2 and 3 give one for all.

    ``group_type`` -1: lists, no grouping; 0: the rows of x are grouped; 2: its columns (and the rows of weight) are
    grouped, which gives the weights' gradients as (groups, m, n). Rows in no group are not written on an NPU; here they
    are NaN.
    """
    if group_type not in (-1, 0, 2):
        raise RuntimeError(f"npu_grouped_matmul: group_type must be given as -1, 0 or 2, not {group_type}")
    split_item, kind, act_type = split_item or 0, group_list_type or 0, act_type or 0
    dtype = x[0].dtype if output_dtype is None else type_of(output_dtype)
    if group_type != -1 and group_list is None:
        raise RuntimeError(f"npu_grouped_matmul: group_type {group_type} needs a group_list")
    if group_type == 2:
        assert group_list is not None
        if len(x) != 1 or len(weight) != 1 or bias:
            raise NotImplementedError("npu_grouped_matmul: along the k axis the emulator takes one x, one weight and no bias")
        sizes = group_sizes(group_list, kind, x[0].size(1))
        used = sum(sizes)
        groups = _products(
            list(x[0][:, :used].split(sizes, 1)), list(weight[0][:used].split(sizes)), [None] * len(sizes), act_type
        )
        return [y.to(dtype) for y in groups] if split_item < 2 else [torch.stack(groups).to(dtype)]
    total = x[0].size(0) if len(x) == 1 else sum(t.size(0) for t in x)
    rows = group_sizes(group_list, kind, total) if group_list is not None and group_type == 0 else None
    return [y.to(dtype) for y in _by_rows(x, weight, bias, rows, split_item, act_type)]


@formula(
    "npu_grouped_matmul.List",
    source=DOCS,
    checked="one matmul for each group",
    refused=f"{_QUANTIZED} group_type group_list_type act_type",
)
def grouped_matmul_list(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    bias: list[torch.Tensor] | None,
    group_list: list[int] | None,
    split_item: int | None,
    output_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """The older form: groups of rows by a list of running sums."""
    total = x[0].size(0) if len(x) == 1 else sum(t.size(0) for t in x)
    rows = group_sizes(group_list, 0, total) if group_list else None
    return [y.to(output_dtype or x[0].dtype) for y in _by_rows(x, weight, bias, rows, split_item or 0, 0)]


@formula("npu_grouped_matmul_add_", source=OP_TEST, checked="x_i.T @ weight_i for each group, added")
def grouped_matmul_add_(
    input: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    group_list: torch.Tensor,
    transpose_x: bool,
    transpose_weight: bool,
    group_type: int,
    group_list_type: int | None,
) -> torch.Tensor:
    """Adds ``x_i.T @ weight_i`` of each group of rows to the input, in place: accumulation of weight gradients."""
    if not transpose_x or transpose_weight or group_type != 2:
        raise NotImplementedError("npu_grouped_matmul_add_: only transpose_x=True, transpose_weight=False, group_type=2")
    sizes = group_sizes(group_list, group_list_type or 0, x.size(0))
    used = sum(sizes)
    pairs = zip(x[:used].split(sizes), weight[:used].split(sizes), strict=True)
    return input.add_(torch.stack([wide(a).t() @ wide(b) for a, b in pairs]).view_as(input))
