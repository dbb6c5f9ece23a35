"""Sorting tokens by expert and back, for routing given as a (tokens, experts) map of zeros and ones.

From torch_npu's tests. Without ``drop_and_pad`` every token has the same number of experts; with it, every expert takes
``capacity`` tokens: those of its map first, in order, then others. ``sorted_indices`` then holds the token of each row;
without it, the row of each (token, choice).
"""

from __future__ import annotations

import torch

from ascend_emulator.fused.precision import maybe_wide, wide
from ascend_emulator.fused.registry import OP_TEST, SOURCE, formula
from ascend_emulator.fused.vjp import vjp

_NO_INDEX = torch.empty(0, dtype=torch.int32)


def _tokens_of_rows(routing_map: torch.Tensor) -> torch.Tensor:
    """Token of each sorted row: expert by expert, tokens in order."""
    tokens, experts = routing_map.shape
    return torch.arange(tokens).expand(experts, tokens)[routing_map.t().bool()]


def _padded_probs(probs: torch.Tensor, row_tokens: torch.Tensor) -> torch.Tensor:
    experts = probs.size(1)
    return probs.t().gather(1, row_tokens.long().view(experts, -1)).reshape(-1)


@formula(
    "npu_moe_token_permute_with_routing_map",
    source=OP_TEST,
    checked="masked_select and index_select",
    backward="npu_moe_token_permute_with_routing_map_grad",
)
def permute(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None,
    num_out_tokens: int | None,
    drop_and_pad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Tokens sorted by expert, their probabilities, and the indices that lead back."""
    wanted = tokens.size(0) if num_out_tokens is None else num_out_tokens
    if drop_and_pad:
        capacity = wanted // routing_map.size(1)
        order = routing_map.t().to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        rows = order[:, :capacity].reshape(-1)
        return tokens[rows], None if probs is None else _padded_probs(probs, rows), rows.int()
    rows = _tokens_of_rows(routing_map)
    if rows.numel() != wanted // routing_map.size(0) * routing_map.size(0):
        raise RuntimeError(
            f"npu_moe_token_permute_with_routing_map: the map has {rows.numel()} entries, but num_out_tokens is {wanted}"
        )
    chosen = None if probs is None else probs.t()[routing_map.t().bool()]
    return tokens[rows], chosen, rows.argsort(stable=True).int()


@formula("npu_moe_token_permute_with_routing_map_grad", source=SOURCE, checked="autograd of the same")
def permute_grad(
    permuted_token_out_grad: torch.Tensor,
    probs_grad: torch.Tensor | None,
    sorted_indices: torch.Tensor,
    routing_map: torch.Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients by the tokens and by the probabilities."""
    rows = sorted_indices.long() if drop_and_pad else _tokens_of_rows(routing_map)
    grad = wide(permuted_token_out_grad)
    dtokens = torch.zeros(tokens_num, grad.size(1), dtype=grad.dtype).index_add_(0, rows, grad)
    dprobs = None
    if probs_grad is not None:
        dprobs = torch.zeros(experts_num, tokens_num, dtype=probs_grad.dtype)
        if drop_and_pad:
            dprobs.scatter_(1, rows.view(experts_num, -1), probs_grad.view(experts_num, -1))
        else:
            dprobs[routing_map.t().bool()] = probs_grad
        dprobs = dprobs.t()
    return dtokens.to(permuted_token_out_grad.dtype), dprobs


def _merge(
    sorted_tokens: torch.Tensor,
    probs: torch.Tensor | None,
    indices: torch.Tensor,
    routing_map: torch.Tensor | None,
    drop_and_pad: bool,
    restore_shape: list[int],
) -> torch.Tensor:
    if drop_and_pad:
        weighted = sorted_tokens if probs is None else sorted_tokens * _padded_probs(probs, indices).unsqueeze(-1)
        return torch.zeros(restore_shape, dtype=weighted.dtype).index_add(0, indices.long(), weighted)
    if routing_map is None:
        raise RuntimeError("npu_moe_token_unpermute_with_routing_map: without drop_and_pad it needs routing_map")
    choices = sorted_tokens.size(0) // routing_map.size(0)
    rows = sorted_tokens[indices.long()].view(-1, choices, sorted_tokens.size(1))
    if probs is not None:
        rows = rows * probs[routing_map.bool()].view(-1, choices, 1)
    return rows.sum(1)


@formula(
    "_npu_moe_token_unpermute_with_routing_map",
    source=OP_TEST,
    checked="index_select or index_add, times probabilities",
    backward="npu_moe_token_unpermute_with_routing_map_grad",
)
def unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: list[int],
    probs: torch.Tensor | None,
    routing_map: torch.Tensor | None,
    drop_and_pad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tokens in their first order; and for the gradient, with ``drop_and_pad``: rows by token, their tokens, probabilities."""
    merged = _merge(wide(permuted_tokens), maybe_wide(probs), sorted_indices, routing_map, drop_and_pad, restore_shape)
    out = merged.to(permuted_tokens.dtype)
    if not drop_and_pad:
        chosen = None if probs is None or routing_map is None else probs[routing_map.bool()]
        return out, _NO_INDEX, _NO_INDEX, chosen
    tokens, rows = sorted_indices.sort(stable=True)
    return out, rows.int(), tokens, None if probs is None else _padded_probs(probs, sorted_indices)


@formula(
    "npu_moe_token_unpermute_with_routing_map",
    source=OP_TEST,
    checked="index_select or index_add, times probabilities",
    backward="npu_moe_token_unpermute_with_routing_map_grad",
)
def unpermute_only(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: list[int],
    probs: torch.Tensor | None,
    routing_map: torch.Tensor | None,
    drop_and_pad: bool,
) -> torch.Tensor:
    """Tokens in their first order; with gradients torch_npu calls :func:`unpermute`."""
    return unpermute(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)[0]


@formula("npu_moe_token_unpermute_with_routing_map_grad", source=SOURCE, checked="autograd of the same")
def unpermute_grad(
    unpermuted_tokens_grad: torch.Tensor,
    out_index: torch.Tensor,
    permuted_token_id: torch.Tensor,
    routing_map: torch.Tensor | None,
    permuted_tokens: torch.Tensor | None,
    probs: torch.Tensor | None,
    drop_and_pad: bool,
    restore_shape: list[int],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients by the sorted tokens and by the probabilities.

    With ``drop_and_pad``, ``out_index`` lists the rows by token and ``permuted_token_id`` their tokens; without it, both are
    the indices of the forward operator.
    """
    indices = out_index
    if drop_and_pad:
        indices = torch.empty_like(permuted_token_id)
        indices[out_index.long()] = permuted_token_id
    if permuted_tokens is None:
        permuted_tokens = torch.zeros(indices.numel(), unpermuted_tokens_grad.size(1), dtype=unpermuted_tokens_grad.dtype)

    def merged(t: torch.Tensor, p: torch.Tensor | None = None) -> torch.Tensor:
        return _merge(t, p, indices, routing_map, drop_and_pad, restore_shape)

    if probs is None:
        return vjp(merged, [permuted_tokens], unpermuted_tokens_grad)[0], None
    dtokens, dprobs = vjp(merged, [permuted_tokens, probs], unpermuted_tokens_grad)
    return dtokens, dprobs
