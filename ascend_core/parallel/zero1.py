"""ZeRO-1: optimizer state sharded over data-parallel ranks, parameters whole on each.

An optimizer gets, in place of each parameter, this rank's shard of it: a DTensor whose local part is a view of the whole
parameter. It updates the view; afterwards every rank collects what the others updated. Norms, checkpoints and
per-tensor optimizers see DTensors, and so the whole parameter.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, section 5.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ascend_core import _shim
from ascend_core.errors import ConfigError
from ascend_core.mesh import HybridMesh
from ascend_core.parallel.buckets import gather_rows, make_buckets, reduce_rows, split_evenly
from ascend_core.parallel.data import local


@dataclass(frozen=True)
class _Cut:
    """How a parameter is cut: along which dimension of its local tensor, and where."""

    parameter: nn.Parameter
    shard: nn.Parameter
    dim: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """Elements of the largest piece."""
        tensor = local(self.parameter)
        return self.pieces[0][1] * (tensor.numel() // max(1, tensor.shape[self.dim]))

    def piece(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of a tensor shaped like the local parameter; a view."""
        return tensor.narrow(self.dim, *self.pieces[rank])


class OptimizerShards:
    """The shards of a model's parameters that its optimizers update.

    Args:
        parameters: This rank's parameters that may be trained.
        mesh: The mesh; shards lie on its ``dp_shard`` axis.
        partition: Reduce gradients onto the rank that needs them, instead of onto all ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: HybridMesh, *, partition: bool) -> None:
        self.mesh, self.partition, self.ranks, self.rank = mesh, partition, mesh.size("dp_shard"), mesh.rank("dp_shard")
        self.group = mesh.group("dp_shard")
        self.cuts: dict[int, _Cut] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self._buckets: list[list[_Cut]] | None = None
        for p in parameters:
            cut = self._cut(p)
            if cut is not None:
                self.cuts[id(p)] = cut

    def _cut(self, p: nn.Parameter) -> _Cut | None:
        """Cut along the first dimension that is whole on this rank; None for what must stay whole (state is small)."""
        mesh, placements = self.mesh.device_mesh["dp_shard"], []
        taken: set[int] = set()
        if isinstance(p, DTensor):
            if p.device_mesh.mesh_dim_names != ("tp",):
                return None
            (placement,) = p.placements
            taken = {placement.dim} if isinstance(placement, Shard) else set()
            if _shim.is_sharded(placement) and not taken:
                return None
            mesh, placements = self.mesh.device_mesh["dp_shard", "tp"], [placement]
        tensor = local(p).detach()
        dim = next((d for d in range(tensor.dim()) if d not in taken), None)
        if dim is None:
            return None
        pieces = tuple(split_evenly(tensor.shape[dim], self.ranks))
        view = tensor.narrow(dim, *pieces[self.rank])
        shape, stride = p.shape, torch.empty(p.shape, device="meta").stride()
        shard = DTensor.from_local(view, mesh, [Shard(dim), *placements], run_check=False, shape=shape, stride=stride)
        return _Cut(p, nn.Parameter(shard, requires_grad=p.requires_grad), dim, pieces)

    # ---- optimizers

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer update shards.

        Raises:
            ConfigError: It has state for whole parameters already.
        """
        self._swap(optimizer)
        if any(o is optimizer for o in self.optimizers):
            return
        self.optimizers.append(optimizer)
        optimizer.register_step_pre_hook(lambda opt, *_: self._before(opt))
        optimizer.register_step_post_hook(lambda opt, *_: self.gather(opt))
        optimizer.zero_grad = functools.partial(self._zero_grad, optimizer)  # type: ignore[method-assign]

    def _swap(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            whole = [p for p in group["params"] if id(p) in self.cuts]
            if any(optimizer.state.get(p) for p in whole):
                raise ConfigError(
                    f"{type(optimizer).__name__} has state for parameters that zero_stage=1 shards.",
                    "Its state was made before the optimizer was set up for the model.",
                    "Set the optimizer up before its first step, and load its state afterwards.",
                )
            group["params"] = [self.cuts[id(p)].shard if id(p) in self.cuts else p for p in group["params"]]

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over parameters that were added since, and check that shards still are views of their parameters."""
        self._swap(optimizer)
        for cut in self.cuts.values():
            view = cut.piece(local(cut.parameter).detach(), self.rank)
            if view.numel() and view.data_ptr() != local(cut.shard).data_ptr():
                raise ConfigError(
                    f"A parameter of shape {tuple(cut.parameter.shape)} was given other memory after zero_stage=1 sharded it.",
                    "Its optimizer would go on updating the old memory.",
                    "Move and convert the model before it is spread over the ranks.",
                )

    def _zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        type(optimizer).zero_grad(optimizer, set_to_none)
        for cut in self._cuts_of(optimizer):
            grad = cut.parameter.grad
            if grad is not None and set_to_none:
                cut.parameter.grad = None
            elif grad is not None:
                grad.detach_().zero_()

    def _cuts_of(self, optimizer: torch.optim.Optimizer) -> list[_Cut]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [c for c in self.cuts.values() if id(c.shard) in held]

    # ---- gradients

    def carriers(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Whatever holds the finished gradient of each parameter: its shard, or itself where it is whole."""
        return [self.cuts[id(p)].shard if id(p) in self.cuts else p for p in parameters]

    def take_gradients(self) -> None:
        """Give shards their finished gradients.

        Communication: with ``partition``, one reduce-scatter per bucket over ``dp_shard``, and an all-reduce of the
        result over ``dp_replicate`` if there are replicas; otherwise none.
        """
        if not self.partition:
            for cut in self.cuts.values():
                grad = cut.parameter.grad
                if grad is not None:
                    self._give(cut, cut.piece(local(grad), self.rank))
            return
        trained = [c.parameter for c in self.cuts.values() if c.parameter.requires_grad]
        for members in make_buckets(trained):
            self._reduce([self.cuts[id(p)] for p in members])

    def _reduce(self, cuts: list[_Cut]) -> None:
        first = local(cuts[0].parameter)
        widths = [c.width for c in cuts]
        rows = torch.zeros(self.ranks, sum(widths) + len(cuts), dtype=first.dtype, device=first.device)
        rows[:, sum(widths) :] = torch.tensor([float(c.parameter.grad is not None) for c in cuts]).to(first)
        at = 0
        for cut, width in zip(cuts, widths, strict=True):
            if cut.parameter.grad is not None:
                grad = local(cut.parameter.grad)
                for rank in range(self.ranks):
                    piece = cut.piece(grad, rank)
                    rows[rank, at : at + piece.numel()].view(piece.shape).copy_(piece)
            at += width
        own = reduce_rows(rows, self.group)
        del rows
        if self.mesh.size("dp_replicate") > 1:
            dist.all_reduce(own, group=self.mesh.group("dp_replicate"))
        held = (own[at:] > 0).tolist()
        own.div_(self.mesh.size("dp"))
        at = 0
        for cut, width, somewhere in zip(cuts, widths, held, strict=True):
            if somewhere:
                shape = local(cut.shard).shape
                self._give(cut, own[at : at + shape.numel()].view(shape).clone(), add=True)
            cut.parameter.grad = None
            at += width

    def _give(self, cut: _Cut, value: torch.Tensor, *, add: bool = False) -> None:
        shard = cut.shard
        if add and shard.grad is not None:
            local(shard.grad).add_(value)
            return
        assert isinstance(shard, DTensor)
        shard.grad = DTensor.from_local(
            value, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
        )

    # ---- parameters

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Collect what the other ranks' optimizers updated. Communication: one all-gather per bucket over ``dp_shard``."""
        parameters = [c.parameter for c in self._cuts_of(optimizer)]
        for members in make_buckets(parameters):
            self._gather([self.cuts[id(p)] for p in members])

    @torch.no_grad()
    def _gather(self, cuts: list[_Cut]) -> None:
        first = local(cuts[0].parameter)
        own = torch.zeros(sum(c.width for c in cuts), dtype=first.dtype, device=first.device)
        at = 0
        for cut in cuts:
            piece = cut.piece(local(cut.parameter), self.rank)
            own[at : at + piece.numel()].view(piece.shape).copy_(piece)
            at += cut.width
        rows = gather_rows(own, self.ranks, self.group)
        at = 0
        for cut in cuts:
            for rank in range(self.ranks):
                piece = cut.piece(local(cut.parameter), rank)
                if rank != self.rank:
                    piece.copy_(rows[rank, at : at + piece.numel()].view(piece.shape))
            at += cut.width

    def names(self, parameter_names: Mapping[int, str]) -> dict[int, str]:
        """``id(shard)`` to the name of its parameter."""
        return {id(c.shard): parameter_names[i] for i, c in self.cuts.items()}

    def first_holder(self, holders: Mapping[int, bool]) -> dict[int, bool]:
        """``id(shard)`` to what is known of its parameter."""
        return {id(c.shard): holders[i] for i, c in self.cuts.items() if i in holders}


def check_set_up(shards: OptimizerShards | None) -> None:
    """Refuse to finish gradients that no optimizer would use.

    Raises:
        ConfigError: ``zero_stage=1`` without an optimizer that was set up.
    """
    if shards is not None and not shards.optimizers:
        raise ConfigError(
            "zero_stage=1 without an optimizer that was set up for the model.",
            "Each rank must step its own shards only.",
            "Call model.setup_optimizer(optimizer) right after building the optimizer.",
        )
