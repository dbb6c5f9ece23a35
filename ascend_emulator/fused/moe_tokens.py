"""Sorting tokens by expert and back (mixture of experts), for routing given as a list of experts of each token.

``sorted_indices`` says for each (token, choice), in order, at which row of the sorted tokens it is. torch_npu's tests
show that: it is the inverse of the stable sort by expert. The padded mode is not emulated.
"""

from __future__ import annotations

import torch

from ascend_emulator.fused.precision import maybe_wide, wide
from ascend_emulator.fused.registry import OP_TEST, SOURCE, formula
from ascend_emulator.fused.vjp import vjp


def _rows(sorted_tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows at these places; zeros for tokens that were dropped because the sorted tokens were cut."""
    places = places.long()
    kept = places < sorted_tokens.size(0)
    return torch.where(kept[:, None], sorted_tokens[places.clamp(max=max(sorted_tokens.size(0) - 1, 0))], 0)


def _merge(sorted_tokens: torch.Tensor, probs: torch.Tensor | None, places: torch.Tensor, choices: int) -> torch.Tensor:
    rows = _rows(sorted_tokens, places).view(-1, choices, sorted_tokens.size(1))
    return (rows if probs is None else rows * probs.unsqueeze(-1)).sum(1)


@formula(
    "npu_moe_token_permute",
    source=OP_TEST,
    checked="argsort and index_select",
    backward="npu_moe_token_permute_grad_v2",
    refused="padded_mode",
)
def permute(tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens sorted by expert, and the place of each; ``indices`` is (tokens,) or (tokens, choices).

    A positive ``num_out_tokens`` is how many sorted tokens to keep, a negative one how many to drop.
    """
    if tokens.dim() != 2 or indices.dim() not in (1, 2):
        raise RuntimeError("npu_moe_token_permute: tokens must have 2 dimensions, and indices 1 or 2")
    flat = indices.reshape(-1)
    order = torch.argsort(flat, stable=True)
    kept = num_out_tokens or 0
    kept = min(kept, flat.numel()) if kept > 0 else flat.numel() + kept
    choices = 1 if indices.dim() == 1 else indices.size(1)
    return tokens[(order // choices)[:kept]], torch.argsort(order).int()


def _permute_grad(grad: torch.Tensor, places: torch.Tensor, tokens: int, choices: int, dtype: torch.dtype) -> torch.Tensor:
    return _merge(wide(grad), None, places.reshape(-1), choices).view(tokens, -1).to(dtype)


@formula("npu_moe_token_permute_grad_v2", source=SOURCE, checked="autograd of index_select", refused="padded_mode")
def permute_grad_v2(
    grad_permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,  # noqa: N803 - the operator's name for it
) -> torch.Tensor:
    """Gradient by the tokens."""
    return _permute_grad(grad_permuted_tokens, sorted_indices, tokens_size_0, num_topK, tokens_dtype)


@formula("npu_moe_token_permute_grad", source=SOURCE, checked="autograd of index_select", refused="padded_mode")
def permute_grad(
    tokens: torch.Tensor, grad_permuted_tokens: torch.Tensor, indices: torch.Tensor, sorted_indices: torch.Tensor
) -> torch.Tensor:
    """Gradient by the tokens, the older form."""
    choices = 1 if indices.dim() == 1 else indices.size(1)
    return _permute_grad(grad_permuted_tokens, sorted_indices, tokens.size(0), choices, tokens.dtype)


def _unpermute(sorted_tokens: torch.Tensor, places: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
    if sorted_tokens.dim() != 2 or places.dim() != 1 or (probs is not None and probs.dim() != 2):
        raise RuntimeError("npu_moe_token_unpermute: permuted_tokens and probs must have 2 dimensions, sorted_indices 1")
    choices = 1 if probs is None else probs.size(1)
    return _merge(wide(sorted_tokens), maybe_wide(probs), places, choices).to(sorted_tokens.dtype)


@formula(
    "_npu_moe_token_unpermute",
    source=SOURCE,
    checked="index_select, times probabilities, sum over choices",
    backward="npu_moe_token_unpermute_grad_v2",
    refused="padded_mode",
    ignored="restore_shape",
    aliases=True,
)
def unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens in their first order, the choices of each merged by ``probs``; and what the gradient by ``probs`` needs."""
    return _unpermute(permuted_tokens, sorted_indices, probs), None if probs is None else permuted_tokens


@formula(
    "npu_moe_token_unpermute",
    source=OP_TEST,
    checked="index_select, times probabilities, sum over choices",
    backward="npu_moe_token_unpermute_grad_v2",
    refused="padded_mode",
    ignored="restore_shape",
)
def unpermute_only(permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
    """Tokens in their first order; with gradients torch_npu calls :func:`unpermute`."""
    return _unpermute(permuted_tokens, sorted_indices, probs)


def _unpermute_grads(
    sorted_tokens: torch.Tensor, grad: torch.Tensor, places: torch.Tensor, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if probs is None:
        return vjp(lambda t: _merge(t, None, places, 1), [sorted_tokens], grad)[0], None
    dtokens, dprobs = vjp(lambda t, p: _merge(t, p, places, probs.size(1)), [sorted_tokens, probs], grad)
    return dtokens, dprobs


@formula(
    "npu_moe_token_unpermute_grad_v2",
    source=SOURCE,
    checked="autograd of the same",
    refused="padded_mode",
    ignored="restore_shape",
)
def unpermute_grad_v2(
    grad_unpermuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: torch.Tensor | None,
    permuted_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients by the sorted tokens and by the probabilities."""
    if permuted_tokens is None:
        if probs is not None:
            raise RuntimeError("npu_moe_token_unpermute_grad_v2: the gradient by probs needs permuted_tokens")
        shape = (permuted_tokens_size_0, grad_unpermuted_tokens.size(1))
        permuted_tokens = torch.zeros(shape, dtype=permuted_tokens_dtype)
    return _unpermute_grads(permuted_tokens, grad_unpermuted_tokens, sorted_indices, probs)


@formula(
    "npu_moe_token_unpermute_grad",
    source=SOURCE,
    checked="autograd of the same",
    refused="padded_mode",
    ignored="restore_shape",
)
def unpermute_grad(
    permuted_tokens: torch.Tensor,
    grad_unpermuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients by the sorted tokens and by the probabilities, the older form."""
    return _unpermute_grads(permuted_tokens, grad_unpermuted_tokens, sorted_indices, probs)
