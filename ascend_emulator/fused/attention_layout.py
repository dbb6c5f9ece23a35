"""Layouts of attention: from any of them to (batch, heads, sequence, dimension) and back.

B batch, S sequence, N heads, D dimension of a head, H = N * D, T all tokens of all sequences one after another (TND).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAYOUTS = ("BNSD", "BSND", "BSH", "SBH", "TND")


def to_bnsd(tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """A view as (batch, heads, sequence, dimension); one batch for TND."""
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    if layout == "BSH":
        return tensor.unflatten(2, (heads, -1)).transpose(1, 2)
    if layout == "SBH":
        return tensor.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
    return tensor.transpose(0, 1).unsqueeze(0)


def from_bnsd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of :func:`to_bnsd`."""
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    if layout == "BSH":
        return tensor.transpose(1, 2).flatten(2)
    if layout == "SBH":
        return tensor.permute(2, 0, 1, 3).flatten(2)
    return tensor.squeeze(0).transpose(0, 1)


@dataclass(frozen=True)
class Part:
    """What is attended together: the whole batch, or one sequence of TND.

    Attributes:
        index: Which sequence; None for a whole batch.
        queries: Its tokens in T.
        keys: Its tokens in T of key and value.
    """

    index: int | None
    queries: slice
    keys: slice


def parts(layout: str, query_ends: list[int], key_ends: list[int]) -> list[Part]:
    """The parts of a call.

    Args:
        layout: One of :data:`LAYOUTS`.
        query_ends: For TND, where each sequence of the query ends; zeros at the end stand for sequences left out.
        key_ends: The same for key and value.
    """
    if layout != "TND":
        return [Part(None, slice(None), slice(None))]
    found, q0, k0 = [], 0, 0
    for index, (q1, k1) in enumerate(zip(query_ends, key_ends, strict=True)):
        if index and q1 == 0 and k1 == 0:
            break
        if q1 < q0 or k1 < k0:
            raise RuntimeError(f"actual_seq_qlen {query_ends} and actual_seq_kvlen {key_ends} must be running sums")
        found.append(Part(index, slice(q0, q1), slice(k0, k1)))
        q0, k0 = q1, k1
    return found
