"""Communication between the parts of a layer, each with the gradient that belongs to it.

Two kinds of tensors meet at the edge of a split region: *whole* ones, equal on every rank, whose gradient is whole too,
and *parts*, of which each rank has its own. A function here names what it turns into what.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function


def chunk_sizes(total: int, parts: int) -> list[int]:
    """Sizes of ``torch.chunk``'s pieces, with zeros for the ranks that get none; DTensor cuts the same way."""
    step = -(-total // parts)
    return [max(0, min(step, total - step * i)) for i in range(parts)]


def cut(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's piece of a whole tensor, without communication (and without a gradient of its own)."""
    sizes = chunk_sizes(x.shape[dim], dist.get_world_size(group))
    rank = dist.get_rank(group)
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def gather(x: torch.Tensor, dim: int, total: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Join the pieces of all ranks along ``dim``. Communication: one all-gather."""
    size = dist.get_world_size(group)
    sizes = chunk_sizes(total, size)
    if x.shape[dim] < sizes[0]:
        shape = list(x.shape)
        shape[dim] = sizes[0] - x.shape[dim]
        x = torch.cat([x, x.new_zeros(shape)], dim=dim)
    x = x.contiguous()
    out = x.new_empty((size, *x.shape))
    dist.all_gather_into_tensor(out.view(-1, *x.shape[1:]), x, group=group)
    pieces = [p.narrow(dim, 0, n) for p, n in zip(out.unbind(0), sizes, strict=True)]
    return torch.cat(pieces, dim=dim)


def add_up(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, in new memory. Communication: one all-reduce."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's piece of the sum over ranks. Communication: one reduce-scatter (uneven pieces: an all-reduce)."""
    size = dist.get_world_size(group)
    if x.shape[dim] % size:
        return cut(add_up(x, group), dim, group)
    stacked = torch.cat(x.chunk(size, dim=dim), dim=0) if dim % x.dim() else x
    stacked = stacked.contiguous()
    shape = list(x.shape)
    shape[dim] //= size
    out = x.new_empty(shape)
    dist.reduce_scatter_tensor(out, stacked, group=group)
    return out


class _WholeToParts(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return add_up(grad, ctx.group), None


class _SumParts(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return add_up(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, total: int, group: dist.ProcessGroup, parts: bool) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.parts = dim, group, parts
        return gather(x, dim, total, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        local = reduce_scatter(grad, ctx.dim, ctx.group) if ctx.parts else cut(grad, ctx.dim, ctx.group)
        return local, None, None, None, None


class _Cut(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.total = dim, group, x.shape[dim]
        return cut(x, dim, group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return gather(grad, ctx.dim, ctx.total, ctx.group), None, None


class _SumAndCut(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.total = dim, group, x.shape[dim]
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return gather(grad, ctx.dim, ctx.total, ctx.group), None, None


class _ScaleGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: int) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


def whole_to_parts(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Pass a whole tensor on to ranks that each use it for their part. Backward: one all-reduce."""
    return _WholeToParts.apply(x, group) if x.requires_grad and torch.is_grad_enabled() else x


def sum_parts(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum partial results to a whole one. Forward: one all-reduce; backward: none."""
    return _SumParts.apply(x, group)


def gather_parts(x: torch.Tensor, dim: int, total: int, group: dist.ProcessGroup, *, used_in_parts: bool) -> torch.Tensor:
    """Join pieces along ``dim`` to a tensor of ``total`` entries.

    Args:
        x: This rank's piece, cut as ``torch.chunk`` does.
        dim: The dim of the pieces.
        total: Entries of the whole along ``dim``.
        group: The group.
        used_in_parts: Each rank uses the whole for its own part of the work, so that gradients differ and are summed
            (backward: one reduce-scatter). False: every rank does the same with it (backward: no communication).

    Communication:
        Forward: one all-gather.
    """
    return _Gather.apply(x, dim, total, group, used_in_parts)


def cut_whole(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Keep this rank's piece of a whole tensor. Backward: one all-gather."""
    return _Cut.apply(x, dim, group)


def sum_and_cut(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum partial results and keep this rank's piece. Forward: one reduce-scatter; backward: one all-gather."""
    return _SumAndCut.apply(x, dim, group)


def scale_gradient(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the tensor; its gradient is multiplied by ``factor``.

    A parameter that each rank uses for its part of the work gets part of the gradient. Kept as ``ranks x part``, the
    mean over ranks is the sum of the parts, and stays right however often it is taken while gradients accumulate.
    """
    return _ScaleGradient.apply(x, factor) if x.requires_grad and torch.is_grad_enabled() else x
