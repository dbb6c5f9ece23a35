"""The softmax statistics of fused attention: maximum and sum of each row, float32, each eight times.

Shape (B, N, S, 8); for TND (T, N, 8), whose memory holds for each sequence its (N, S, 8) block, unless
``softmax_layout="TND"`` asks for what the shape says. The former is how public training code reads it.
"""

from __future__ import annotations

import torch

from ascend_emulator.fused.attention_call import STAT, Prepared
from ascend_emulator.fused.attention_layout import Part


def empty_stats(call: Prepared) -> torch.Tensor:
    """Zeros in the statistics' shape."""
    batch, heads, length = call.q.shape[:3]
    shape = (length, heads, STAT) if call.call.input_layout == "TND" else (batch, heads, length, STAT)
    return torch.zeros(shape)


def write(call: Prepared, stats: torch.Tensor, part: Part, value: torch.Tensor) -> None:
    """Put a part's numbers, (batch, heads, sequence, 1), into the statistics."""
    _block(call, stats, part).copy_(value.expand(*value.shape[:-1], STAT))


def read(call: Prepared, stats: torch.Tensor, part: Part) -> torch.Tensor:
    """A part's numbers as (batch, heads, sequence, 1)."""
    expected = empty_stats(call).shape
    if stats.shape != expected:
        raise RuntimeError(f"softmax_max and softmax_sum must have shape {tuple(expected)}, not {tuple(stats.shape)}")
    return _block(call, stats, part)[..., :1]


def _block(call: Prepared, stats: torch.Tensor, part: Part) -> torch.Tensor:
    if call.call.input_layout != "TND":
        return stats
    if call.call.softmax_layout == "TND":
        return stats[part.queries].transpose(0, 1).unsqueeze(0)
    heads = stats.size(1)
    start, stop = part.queries.start * heads, part.queries.stop * heads
    return stats.view(-1, STAT)[start:stop].view(1, heads, -1, STAT)
