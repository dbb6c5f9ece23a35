"""Send tokens to the ranks that hold their experts, and bring the results back.

Both ways are one all-to-all with uneven splits; in the backward pass the same two run in reverse. Nothing is padded or
dropped here, so the result is that of one process that holds all experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


class _AllToAll(torch.autograd.Function):
    """Rows to ranks; the gradient of each row goes back to the rank it came from.

    An anchor that requires gradients makes the rank take part in backward even if its rows do not require any.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, anchor: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None, None


def _exchange(rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received


def dispatch_and_combine(
    tokens: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    trained: bool,
) -> torch.Tensor:
    """Compute ``sum over k of weights[t, k] * expert[index[t, k]](tokens[t])`` with experts on other ranks.

    Rank ``r`` of the group holds experts ``r * n`` up to ``(r + 1) * n`` with ``n = num_experts / ranks``.

    Args:
        tokens: ``(T, dim)``, floating point; ``T`` may differ between ranks, and be 0.
        index: ``(T, K)``, int64: the experts of each token; ``num_experts`` stands for none (a dropped token).
        weights: ``(T, K)``, floating point: their weights.
        num_experts: Experts on all ranks together.
        group: The expert-parallel group.
        run: ``(rows (R, dim), local expert of each row (R,)) -> (R, dim)``: this rank's experts. ``R`` may be 0.
        trained: Some expert of some rank is trained, so that gradients come back even to a rank without tokens.

    Returns:
        ``(T, dim)`` in the type of ``tokens``.

    Communication:
        Three all-to-alls over the group: counts, tokens there, tokens back; in backward the last two. Every rank of
        the group must call it equally often, in the same order, and run backward equally often. Waits for the device
        once, to learn how many rows will come.
    """
    ranks, k = dist.get_world_size(group), index.shape[1]
    local = num_experts // ranks
    chosen = index.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=tokens.device)
    counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen))[:num_experts]
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    send, receive = torch.stack([counts, incoming]).view(2, ranks, local).sum(-1).tolist()

    order = torch.argsort(chosen, stable=True)[: sum(send)]  # dropped tokens come last
    token_of = order // k
    rows = _AllToAll.apply(tokens[token_of], tokens.new_empty(0), send, receive, group)
    expert_of = torch.arange(local, device=tokens.device).repeat(ranks).repeat_interleave(incoming, output_size=sum(receive))
    results = run(rows, expert_of).to(rows.dtype)
    returned = _AllToAll.apply(results, tokens.new_empty(0).requires_grad_(trained), receive, send, group)
    weighted = returned * weights.reshape(-1)[order, None]
    return torch.zeros_like(tokens).index_add(0, token_of, weighted.to(tokens.dtype))
