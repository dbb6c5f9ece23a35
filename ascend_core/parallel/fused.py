"""Fused projections under tensor parallel: one weight that holds q, k and v, or gate and up, becomes parts.

Cutting a fused ``[q; k; v]`` weight into equal blocks would mix the three. Here every part is a module of its own,
column-sharded, and the local outputs are concatenated, so that the model's own ``chunk(3)`` still works. The parts may
differ in size (grouped-query attention). Weights that are interleaved head by head need none of this: equal blocks of
them are whole heads. Saved checkpoints hold the original fused weight (:mod:`ascend_core.parallel.state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ascend_core.errors import ModelError
from ascend_core.parallel.projections import Projection, matmul

PARTS = ("q", "k", "v")


class ProjectionPart(nn.Module):
    """Some of the output columns of a fused projection, with the weight in the same memory order.

    Args:
        weight: ``(out, in)``, or ``(in, out)`` with ``out_dim`` 1.
        bias: ``(out,)`` or None.
        out_dim: The dim of ``weight`` that counts output columns.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, out_dim: int) -> None:
        super().__init__()
        self.weight, self.bias, self.out_dim = weight, bias, out_dim

    @property
    def projection(self) -> Projection:
        """Its description."""
        return Projection(self, self.weight.shape[1 - self.out_dim], self.weight.shape[self.out_dim], self.out_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(*, in)`` to ``(*, out)``."""
        return matmul(x, self.weight, self.bias, self.out_dim)


def _add_parts(
    owner: nn.Module,
    names: Sequence[str],
    sizes: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dim: int = 0,
) -> None:
    """Give ``owner`` one module per part of a fused weight; frozen stays frozen, weight and bias each for itself."""
    biases = bias.split(list(sizes)) if bias is not None else [None] * len(sizes)
    for name, w, b in zip(names, weight.split(list(sizes), dim=out_dim), biases, strict=True):
        part = nn.Parameter(w.detach().clone(memory_format=torch.contiguous_format), requires_grad=weight.requires_grad)
        part_bias = None if b is None or bias is None else nn.Parameter(b.detach().clone(), requires_grad=bias.requires_grad)
        owner.add_module(name, ProjectionPart(part, part_bias, out_dim))


class FusedColumnLinear(nn.Module):
    """``y = [x W1; x W2; ...]`` with each part a module that can be split by columns.

    Args:
        projection: The fused projection.
        sizes: Output columns of each part, e.g. those of q, k and v.

    Shape:
        input ``(*, in)``; output ``(*, local columns of all parts)``.
    """

    def __init__(self, projection: Projection, sizes: Sequence[int]) -> None:
        super().__init__()
        fused: Any = projection.module
        self.in_features, self.out_features = projection.in_features, projection.out_features
        self.parts = tuple(PARTS[i] if len(sizes) == 3 else f"part{i}" for i in range(len(sizes)))
        _add_parts(self, self.parts, sizes, fused.weight, fused.bias, projection.out_dim)
        self.fused_parameters = {"weight": tuple(f"{p}.weight" for p in self.parts)}
        self.fused_dims = {"weight": projection.out_dim}
        if fused.bias is not None:
            self.fused_parameters["bias"] = tuple(f"{p}.bias" for p in self.parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the parts' outputs on the last dim."""
        return torch.cat([self.get_submodule(p)(x) for p in self.parts], dim=-1)


class ParallelMultiheadAttention(nn.Module):
    """``nn.MultiheadAttention`` whose heads are spread over tensor-parallel ranks.

    It takes the same arguments; attention weights are never returned. Parameter names in checkpoints stay those of
    ``nn.MultiheadAttention``.

    Args:
        attention: The module to replace.
        tensor_parallel_size: Ranks; must divide the number of heads.
        rank: This rank's coordinate on the tensor-parallel axis.

    Raises:
        ModelError: The module uses an option that cannot be split (different key sizes, bias_kv, zero attention), or
            the heads do not divide.
    """

    def __init__(self, attention: nn.MultiheadAttention, tensor_parallel_size: int, rank: int) -> None:
        super().__init__()
        if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
            raise ModelError(
                "nn.MultiheadAttention with kdim/vdim, add_bias_kv or add_zero_attn cannot be split.",
                "Only the common form with one fused input projection can.",
                "Leave these options off, or use tensor_parallel_size=1.",
            )
        if attention.num_heads % tensor_parallel_size:
            raise ModelError(
                f"{attention.num_heads} attention heads do not divide over {tensor_parallel_size} tensor-parallel ranks.",
                "nn.MultiheadAttention is split by whole heads.",
                "Choose a tensor_parallel_size that divides the heads.",
            )
        self.embed_dim, self.head_dim, self.batch_first = attention.embed_dim, attention.head_dim, attention.batch_first
        self.num_heads = attention.num_heads // tensor_parallel_size
        self.dropout, self.rank = attention.dropout, rank
        self._qkv_same_embed_dim = False  # keeps nn.TransformerEncoderLayer off its inference fast path
        self.in_proj_bias = None
        _add_parts(self, PARTS, [self.embed_dim] * 3, attention.in_proj_weight, attention.in_proj_bias)
        self.out_proj = attention.out_proj
        self.fused_parameters = {"in_proj_weight": tuple(f"{p}.weight" for p in PARTS)}
        if attention.in_proj_bias is not None:
            self.fused_parameters["in_proj_bias"] = tuple(f"{p}.bias" for p in PARTS)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """Attend with the local heads; see ``nn.MultiheadAttention`` for shapes and masks.

        Returns:
            The output, full on every rank, and None.

        Raises:
            ModelError: ``need_weights=True``.
        """
        if need_weights:
            raise ModelError(
                "need_weights=True on a tensor-parallel nn.MultiheadAttention.",
                "Each rank has the weights of its own heads only.",
                "Pass need_weights=False.",
            )
        if not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = (self._heads(self.get_submodule(n)(t)) for n, t in zip(PARTS, (query, key, value), strict=True))
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal and mask is None)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return (out if self.batch_first else out.transpose(0, 1)), None

    def _heads(self, t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(
        self, attn_mask: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor | None:
        """Add both masks to one additive mask ``(batch or 1, heads or 1, queries, keys)``."""
        total = None
        if attn_mask is not None:
            m = _additive(attn_mask, q.dtype)
            if m.dim() == 3:
                m = m.unflatten(0, (q.shape[0], -1))
                m = m[:, self.rank * self.num_heads : (self.rank + 1) * self.num_heads]
            total = m
        if padding is not None:
            m = _additive(padding, q.dtype)[:, None, None, :]
            total = m if total is None else total + m
        return total


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
