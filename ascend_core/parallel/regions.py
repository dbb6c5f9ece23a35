"""A region of a layer whose work is divided: in through column projections, out through a row projection.

Parameters are DTensors (checkpoints and FSDP2 need them), but the arithmetic is done on this rank's local tensors, which
costs a third of DTensor's time per operation on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ascend_core.parallel import tensor_collectives as collectives
from ascend_core.parallel.projections import Projection, matmul
from ascend_core.parallel.rng import RegionRng


class Region:
    """What the projections of one region share.

    Args:
        mesh: The one-axis ``tp`` mesh.
        row: The region ends in a row projection, so it has random numbers of its own in between.
    """

    def __init__(self, mesh: DeviceMesh, *, row: bool = True) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.sequence_dim: int | None = None
        self.gather_at_columns = False
        self.gathered_for_parts = False
        self.rng = RegionRng(self.rank) if row else None
        self._has_row = row
        self._entered: set[int] = set()
        self._shared: tuple[torch.Tensor, torch.Tensor, bool] | None = None

    def enter(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Take the input of a column projection into the region.

        Projections that read the same tensor share one all-reduce in backward. The first one switches to the random
        stream of this rank's part.

        Communication:
            Backward: one all-reduce per input. With sequence parallel: see :mod:`ascend_core.parallel.sequence`.
        """
        if id(module) in self._entered:
            self._entered.clear()  # the last pass was given up half-way, e.g. by a recomputation that had all it needed
        if not self._entered and self.rng is not None:
            self.rng.enter(module.training)
        self._entered.add(id(module))
        key = torch.is_grad_enabled()
        if self._shared is not None and self._shared[0] is x and self._shared[2] == key:
            return self._shared[1]
        inside = self.read(x)
        if self._has_row:  # which lets go of it
            self._shared = (x, inside, key)
        return inside

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """The input as column projections use it."""
        if self.sequence_dim is not None and self.gather_at_columns:
            total = x.shape[self.sequence_dim] * self.size
            return collectives.gather_parts(x, self.sequence_dim, total, self.group, used_in_parts=True)
        if self.sequence_dim is not None and self.gathered_for_parts:
            return x  # gathered where the module that holds the columns was entered
        return collectives.whole_to_parts(x, self.group)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum the row projection's partial outputs. Communication: one all-reduce (sequence parallel: reduce-scatter)."""
        self._entered.clear()
        self._shared = None
        if self.rng is not None:
            self.rng.leave()
        if self.sequence_dim is not None:
            return collectives.sum_and_cut(partial, self.sequence_dim, self.group)
        return collectives.sum_parts(partial, self.group)


class ColumnForward:
    """Forward of a projection whose output columns are spread over ranks.

    Args:
        projection: The projection, before it is split.
        region: Its region.
        gathers: Every rank gets all output columns and does the same with them.
        groups: Every rank gets the columns of one of so many groups (key/value heads, of which there are fewer than
            ranks), which several ranks share. 0: not.
        keeps: The output is a DTensor of all columns (logits); without gradients, it is gathered.
    """

    def __init__(
        self, projection: Projection, region: Region, *, gathers: bool = False, groups: int = 0, keeps: bool = False
    ) -> None:
        self.module, self.region, self.out_dim = projection.module, region, projection.out_dim
        self.out_features, self.gathers, self.groups, self.keeps = projection.out_features, gathers, groups, keeps
        shard_parameter(self.module, "weight", region.mesh, projection.out_dim)
        shard_parameter(self.module, "bias", region.mesh, 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``(*, in)``, whole, to ``(*, local columns)``."""
        region = self.region
        x = region.read(x) if self.gathers or self.keeps else region.enter(self.module, x)
        y = matmul(x, local_parameter(self.module, "weight"), local_parameter(self.module, "bias"), self.out_dim)
        if self.keeps and torch.is_grad_enabled():
            shape = torch.Size((*y.shape[:-1], self.out_features))
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(y, region.mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride)
        if not self.gathers and not self.groups and not self.keeps:
            return y
        y = collectives.gather_parts(y, -1, self.out_features, region.group, used_in_parts=self.groups > 0)
        if self.groups:
            width = self.out_features // self.groups
            y = y.narrow(-1, region.rank * self.groups // region.size * width, width)
        return y


class RowForward:
    """Forward of a projection whose input columns are spread over ranks; the bias stays whole and is added to the sum.

    Args:
        projection: The projection, before it is split.
        region: Its region.
        cuts: The input is whole, and each rank takes its own columns of it.
    """

    def __init__(self, projection: Projection, region: Region, *, cuts: bool = False) -> None:
        self.module, self.region, self.out_dim, self.cuts = projection.module, region, projection.out_dim, cuts
        shard_parameter(self.module, "weight", region.mesh, projection.in_dim)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``(*, local columns)``, or whole with ``cuts``, to ``(*, out)``."""
        if self.cuts:
            x = collectives.cut_whole(x, -1, self.region.group)
        y = self.region.leave(matmul(x, local_parameter(self.module, "weight"), None, self.out_dim))
        bias: Any = self.module.bias
        if bias is not None and self.region.sequence_dim is not None:
            bias = collectives.scale_gradient(bias, self.region.size)  # added to this rank's tokens only
        return y if bias is None else y + bias.to(y.dtype)


class EmbeddingForward:
    """Forward of an embedding whose rows (the vocabulary) are spread over ranks.

    Args:
        module: The embedding.
        region: Names the ranks.
    """

    def __init__(self, module: nn.Embedding, region: Region) -> None:
        self.module, self.region = module, region
        sizes = collectives.chunk_sizes(module.num_embeddings, region.size)
        self.first, self.count = sum(sizes[: region.rank]), sizes[region.rank]
        shard_parameter(module, "weight", region.mesh, 0)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids (*)`` to ``(*, dim)``. Communication: one all-reduce."""
        here = ids - self.first
        outside = (here < 0) | (here >= self.count)
        weight = local_parameter(self.module, "weight")
        padding = self.module.padding_idx
        if padding is not None:
            padding = padding - self.first if self.first <= padding < self.first + self.count else None
        rows = nn.functional.embedding(here.masked_fill(outside, 0), weight, padding) if self.count else None
        if rows is None:
            rows = weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum()
        return collectives.sum_parts(rows.masked_fill(outside.unsqueeze(-1), 0.0), self.region.group)


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Replace a parameter by the DTensor whose local part this rank keeps; every rank holds equal values already."""
    whole = getattr(module, name, None)
    if whole is None:
        return
    part = collectives.cut(whole.detach(), dim, mesh.get_group()).clone(memory_format=torch.contiguous_format)
    spread = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())
    module.register_parameter(name, nn.Parameter(spread, requires_grad=whole.requires_grad))


def local_parameter(module: nn.Module, name: str) -> Any:
    """This rank's part of a parameter (None without one), with a gradient that goes back to it."""
    value = getattr(module, name)
    return value.to_local() if isinstance(value, DTensor) else value


def share_gradient(module: nn.Module, size: int) -> None:
    """Mark the parameters of a module, which is whole but works on this rank's part, for :func:`scale_gradient`.

    Args:
        module: A module whose own parameters get part of their gradient on every rank.
        size: Tensor-parallel ranks.
    """
    call = module.forward
    names = [n for n, _ in module.named_parameters(recurse=False)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(module.named_parameters(recurse=False))
        for name in names:  # an attribute of the instance hides the parameter of the same name
            module.__dict__[name] = collectives.scale_gradient(own[name], size)
        try:
            return call(*args, **kwargs)
        finally:
            for name in names:
                module.__dict__.pop(name, None)

    module.forward = forward  # type: ignore[method-assign]
