"""Choosing experts, expanding tokens and merging the experts' results: the inference forms, without derivatives."""

from __future__ import annotations

import torch

from ascend_emulator.fused.precision import wide
from ascend_emulator.fused.registry import DOCS, formula


@formula("npu_moe_gating_top_k_softmax", source=DOCS, checked="softmax and topk")
def gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities and numbers of the k best experts of each row, and the rows' places in column order.

    Equal probabilities keep the experts' order; rows in ``finished`` get the number of experts instead of an expert.
    """
    scores = wide(x).softmax(-1)
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[..., :k]
    best = scores.gather(-1, chosen)
    if finished is not None:
        chosen = torch.where(finished.unsqueeze(-1), x.size(-1), chosen)
    rows = best[..., 0].numel()
    places = torch.arange(rows * k, dtype=torch.int32).view(k, rows).t().reshape(best.shape)
    return best.to(x.dtype), chosen.int(), places


@formula("npu_moe_init_routing", source=DOCS, checked="argsort and index_select")
def init_routing(
    x: torch.Tensor, row_idx: torch.Tensor, expert_idx: torch.Tensor, active_num: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of x sorted by expert (those of the first ``active_num`` tokens' count), the place of each, and the experts."""
    rows, k = x.size(0), expert_idx.size(-1)
    experts, order = expert_idx.reshape(-1).sort(stable=True)
    sources = row_idx.reshape(-1)[order].long()
    places = torch.empty_like(sources, dtype=torch.int32)
    places[sources] = torch.arange(sources.numel(), dtype=torch.int32)
    return x[sources[: min(active_num, rows) * k] % rows], places, experts.int()


@formula("npu_moe_finalize_routing", source=DOCS, checked="a loop over tokens and choices", ignored="k")
def finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None,
) -> torch.Tensor:
    """Sum over the choices of ``scale * (row + bias of its expert)``, plus the skips.

    ``drop_pad_mode`` 0 and 1 have the places in column order, 2 and 3 in row order; place -1 (modes 1, 3) is a dropped
    token, whose row counts as zero.
    """
    mode = drop_pad_mode or 0
    choices = 1 if scales is None else scales.size(1)
    rows = wide(expanded_permuted_rows).reshape(-1, expanded_permuted_rows.size(-1))
    flat = expanded_src_to_dst_row.long()
    places = flat.view(choices, -1).t() if mode < 2 else flat.view(-1, choices)
    if mode in (0, 2) and bool((places < 0).any()):
        raise RuntimeError(f"npu_moe_finalize_routing: a negative place in expanded_src_to_dst_row with drop_pad_mode {mode}")
    picked = torch.where((places < 0).unsqueeze(-1), 0, rows[places.clamp(min=0)])
    if bias is not None:
        if export_for_source_row is None:
            raise RuntimeError("npu_moe_finalize_routing: bias needs the experts of the rows")
        picked = picked + wide(bias)[export_for_source_row.long()]
    if scales is not None:
        picked = picked * wide(scales).unsqueeze(-1)
    out = picked.sum(1)
    for skip in (skip1, skip2):
        out = out if skip is None else out + wide(skip)
    return out.to(expanded_permuted_rows.dtype)
