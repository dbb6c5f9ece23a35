"""Attention and its gradient for one part, in float32, from the definition.

The gradient starts from the statistics of the forward pass, as the NPU kernel does; so it is also right for statistics
that were merged over several devices (ring attention).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOWEST = torch.finfo(torch.float32).min
"""Maximum of a row in which everything is hidden; its sum is 0. What an NPU says there is not documented."""


@dataclass(frozen=True)
class Scores:
    """How scores are made.

    Attributes:
        scale: Factor.
        pse: Position bias, or None; it broadcasts to (batch, heads, sq, skv).
        scaled_pse: The bias is added before scaling (``pse_type`` 1), not after.
        hidden: Hidden positions, or None.
        sink: One more score of each head, which takes part in the softmax only, or None.
        kept: Which positions dropout keeps, or None.
        keep: Probability of that.
    """

    scale: float
    pse: torch.Tensor | None
    scaled_pse: bool
    hidden: torch.Tensor | None
    sink: torch.Tensor | None
    kept: torch.Tensor | None
    keep: float

    def of(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Scores before the softmax; k has as many heads as q."""
        s = q @ k.transpose(-1, -2)
        if self.pse is not None and self.scaled_pse:
            s = s + self.pse
        s = s * self.scale
        if self.pse is not None and not self.scaled_pse:
            s = s + self.pse
        return s if self.hidden is None else s.masked_fill(self.hidden, float("-inf"))

    def dropped(self, p: torch.Tensor) -> torch.Tensor:
        """Probabilities, or their gradients, after dropout."""
        return p if self.kept is None else torch.where(self.kept, p, 0) / self.keep


def spread(kv: torch.Tensor, heads: int) -> torch.Tensor:
    """Key or value with a copy for each head of the query (grouped-query attention)."""
    return kv if kv.size(1) == heads else kv.repeat_interleave(heads // kv.size(1), 1)


def gather(grad: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The inverse for gradients: the sum over the heads of a group."""
    return grad if grad.size(1) == kv_heads else grad.unflatten(1, (kv_heads, -1)).sum(2)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Scores) -> tuple[torch.Tensor, ...]:
    """Result, maximum and sum of each row; the latter two with a last dimension of 1."""
    heads = q.size(1)
    s = how.of(q, spread(k, heads))
    top = s.amax(-1, keepdim=True) if s.size(-1) else s.new_full((*s.shape[:-1], 1), float("-inf"))
    if how.sink is not None:
        top = torch.maximum(top, how.sink.view(1, -1, 1, 1))
    top = top.clamp(min=LOWEST)
    e = (s - top).exp()
    total = e.sum(-1, keepdim=True)
    if how.sink is not None:
        total = total + (how.sink.view(1, -1, 1, 1) - top).exp()
    p = e / total.masked_fill(total == 0, 1)
    return how.dropped(p) @ spread(v, heads), top, total


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    how: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients by q, k, v and the sink."""
    heads, kv_heads = q.size(1), k.size(1)
    wide_k, wide_v = spread(k, heads), spread(v, heads)
    norm = total.masked_fill(total == 0, 1)
    p = (how.of(q, wide_k) - top).exp() / norm
    row = (dout * out).sum(-1, keepdim=True)
    dv = how.dropped(p).transpose(-1, -2) @ dout
    ds = p * (how.dropped(dout @ wide_v.transpose(-1, -2)) - row) * how.scale
    dsink = None
    if how.sink is not None:
        sink_p = (how.sink.view(1, -1, 1, 1) - top).exp() / norm
        dsink = -(sink_p * row).sum((0, 2, 3))
    return ds @ wide_k, gather(ds.transpose(-1, -2) @ q, kv_heads), gather(dv, kv_heads), dsink
