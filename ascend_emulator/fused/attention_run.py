"""Forward and backward of a prepared call, over its parts."""

from __future__ import annotations

import torch

from ascend_emulator.fused import attention_math, attention_stats
from ascend_emulator.fused.attention_call import Prepared
from ascend_emulator.fused.precision import wide


def run_forward(call: Prepared, keep_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Result in the call's layout, and the statistics. Tokens of sequences left out give zeros."""
    out = torch.zeros(*call.q.shape[:3], call.v.size(3), dtype=call.q.dtype)
    top, total = attention_stats.empty_stats(call), attention_stats.empty_stats(call)
    for part, how in call.scores(keep_mask):
        q, k, v = (wide(t) for t in (call.q[:, :, part.queries], call.k[:, :, part.keys], call.v[:, :, part.keys]))
        result, row_top, row_total = attention_math.forward(q, k, v, how)
        out[:, :, part.queries] = result.to(out.dtype)
        attention_stats.write(call, top, part, row_top)
        attention_stats.write(call, total, part, row_total)
    return call.back(out), top, total


def run_backward(
    call: Prepared,
    keep_mask: torch.Tensor | None,
    out: torch.Tensor,
    dout: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients by query, key and value in the call's layout, and by the sink.

    Args:
        call: The call.
        keep_mask: Its dropout mask.
        out: Result of the forward pass, as (batch, heads, sequence, dimension).
        dout: Its gradient, likewise.
        top: Maximum of the rows.
        total: Sum of the rows.
    """
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype) for t in (call.q, call.k, call.v))
    dsink = None if call.call.sink is None else torch.zeros(call.call.head_num)
    for part, how in call.scores(keep_mask):
        rows, keys = part.queries, part.keys
        q, k, v, o, do = (
            wide(t) for t in (call.q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys], out[:, :, rows], dout[:, :, rows])
        )
        row_top, row_total = attention_stats.read(call, top, part), attention_stats.read(call, total, part)
        gq, gk, gv, gsink = attention_math.backward(q, k, v, o, do, row_top, row_total, how)
        dq[:, :, rows], dk[:, :, keys], dv[:, :, keys] = gq.to(dq.dtype), gk.to(dk.dtype), gv.to(dv.dtype)
        if dsink is not None and gsink is not None:
            dsink += gsink
    return call.back(dq), call.back(dk), call.back(dv), dsink
