"""Finish gradients after the last backward of a step: one place for every sum that a layout leaves open.

Order: DTensor gradients take the placement of their parameter; parameters that live on several stages (tied weights)
are summed over those stages; FSDP2 reduces its shards; everything else is averaged over the replicas. The gradients of
experts hold the tokens of their whole expert-parallel group already: they are summed over the copies of each expert.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ascend_core import _shim
from ascend_core.errors import ConfigError
from ascend_core.mesh import HybridMesh
from ascend_core.parallel.buckets import GradientReducer
from ascend_core.parallel.data import is_data_sharded, is_expert, local
from ascend_core.parallel.zero1 import OptimizerShards, check_set_up


class GradientFinisher:
    """Finishes the gradients of one model.

    Args:
        parameters: Name to parameter of this rank, in the model's order.
        mesh: The mesh.
        sharded: FSDP2 modules whose gradients are reduced by hand (those of a pipeline).
        shards: Shards of the parameters under ZeRO-1, or None.
        contiguous: Keep gradients in flat buckets from the moment they are made.
        overlap: Average over the replicas while backward still runs.
        summed: Names of whole parameters whose gradient is a part on every tensor-parallel rank, kept as ranks x part.

    Communication:
        Building it: one object all-gather over the pipeline group, and process groups for tied weights.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: HybridMesh,
        sharded: Sequence[nn.Module] = (),
        shards: OptimizerShards | None = None,
        *,
        summed: Collection[str] = (),
        contiguous: bool = False,
        overlap: bool = False,
    ) -> None:
        self.overlap, self.summed = overlap, frozenset(summed)
        self.mesh, self.parameters, self.sharded = mesh, dict(parameters), list(sharded)
        self.shards, self.contiguous = shards, contiguous
        self.first_holder: dict[int, bool] = {}
        self._holders: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        if mesh.size("pp") > 1:
            self._find_shared()
        if shards is not None:
            self.first_holder |= shards.first_holder(self.first_holder)
        self._trained: tuple[bool, ...] = ()
        self._shared: list[GradientReducer] = []
        self._kept: list[GradientReducer] = []
        self._averages: list[GradientReducer] = []
        self._sum_parts: GradientReducer | None = None
        self._finished_copies = False
        self._experts: GradientReducer | None = None
        self._build()

    def _build(self) -> None:
        """Make the buckets of what is trained now; again when parameters were frozen or unfrozen. No communication."""
        trained = tuple(p.requires_grad for p in self.parameters.values())
        if trained == self._trained:
            return
        self._trained = trained
        for reducer in self._kept:
            reducer.close()
        self._shared = [GradientReducer([p for p in held if p.requires_grad], group) for group, held in self._holders]
        whole = [p for p in self.parameters.values() if p.requires_grad and not is_data_sharded(p, self.mesh)]
        partitioned = self.shards.cuts if self.shards is not None and self.shards.partition else {}
        replicated = [p for p in whole if id(p) not in partitioned and not is_expert(p)]
        experts = [p for p in whole if is_expert(p)]
        dp = self.mesh.size("dp")
        parts = [p for n, p in self.parameters.items() if p.requires_grad and n in self.summed]
        self._sum_parts = GradientReducer(parts, self.mesh.group("tp"), self.mesh.size("tp")) if parts else None
        late = {id(p) for p in parts}  # summed over tensor-parallel ranks first, so not to be sent during backward
        self._averages = [
            GradientReducer(members, self.mesh.group("dp"), dp, contiguous=self.contiguous, overlap=overlap)
            for members, overlap in (
                ([p for p in replicated if id(p) not in late], self.overlap and dp > 1),
                ([p for p in replicated if id(p) in late], False),
            )
        ]
        others = [p for p in whole if id(p) in partitioned]
        self._kept = [*self._averages, GradientReducer(others, None, contiguous=self.contiguous)]
        self._experts = None
        if experts:
            self._experts = GradientReducer(experts, self.mesh.group("edp"), dp, contiguous=self.contiguous)
            self._kept.append(self._experts)

    @contextmanager
    def gradients_elsewhere(self) -> Iterator[None]:
        """Leave gradients made inside where autograd puts them."""
        for reducer in self._kept:
            reducer.paused = True
        try:
            yield
        finally:
            for reducer in self._kept:
                reducer.paused = False

    def arm(self) -> None:
        """Announce that :meth:`finish` follows the next backward, so that gradients may travel while it runs."""
        self._build()
        if self.mesh.size("dp") > 1:
            for reducer in self._averages:
                reducer.arm()

    def drop_finished_copies(self) -> None:
        """Before another backward: of a tied weight's finished gradient only the first stage's copy goes on to add up.

        Otherwise gradients that are not zeroed between two finishes would be counted once for every stage.
        """
        if self._finished_copies:
            for _, held in self._holders:
                for p in held:
                    if not self.first_holder.get(id(p), True):
                        p.grad = None
        self._finished_copies = False

    def keep(self) -> None:
        """Move gradients that were made elsewhere into the buckets, if gradients are kept there."""
        if self.contiguous:
            for reducer in self._kept:
                reducer.keep()

    def finish(self) -> None:
        """Make every ``.grad`` the gradient of the global batch's mean loss.

        Communication: all-reduce of tied weights over their stages; reduce-scatter of FSDP2 shards; all-reduce of the
        rest over the data-parallel axis, of experts over its part with the same experts; under ZeRO-1 see
        :meth:`OptimizerShards.take_gradients`.

        Raises:
            ConfigError: ZeRO-1 has no optimizer.
        """
        check_set_up(self.shards)
        self._build()
        for p in self.parameters.values():
            _match_placement(p)
        for reducer in self._shared:
            reducer()
        _shim.reduce_accumulated_gradients(self.sharded)
        if self._sum_parts is not None:
            self._sum_parts()
        if self.mesh.size("dp") > 1:
            for reducer in self._averages:
                reducer()
        if self._experts is not None:
            self._experts()
        self._finished_copies = bool(self._holders)
        if self.shards is not None:
            self.shards.take_gradients()

    def _find_shared(self) -> None:
        """Find the parameters that live on several stages, and make a group for each set of stages."""
        names: list[list[str]] = [[] for _ in range(self.mesh.size("pp"))]
        dist.all_gather_object(names, list(self.parameters), group=self.mesh.group("pp"))
        holders: dict[str, tuple[int, ...]] = {}
        for name in sorted({n for held in names for n in held}):
            holders[name] = tuple(r for r, held in enumerate(names) if name in held)
        here = self.mesh.rank("pp")
        self.first_holder = {id(p): holders[n][0] == here for n, p in self.parameters.items() if len(holders[n]) > 1}
        for ranks in sorted({h for h in holders.values() if len(h) > 1}):
            group = _stage_group(self.mesh, ranks)
            mine = [p for n, p in self.parameters.items() if holders[n] == ranks]
            if here in ranks:
                self._holders.append((group, mine))


def _stage_group(mesh: HybridMesh, stages: tuple[int, ...]) -> dist.ProcessGroup:
    """The ranks of this pipeline that hold the given stages. Every rank of the world must call it in the same order."""
    if len(stages) == mesh.size("pp"):
        return mesh.group("pp")
    columns = mesh.device_mesh.mesh.reshape(mesh.size("pp"), -1)
    found = None
    for column in range(columns.shape[1]):
        ranks = [int(columns[s, column]) for s in stages]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            found = group
    return found  # type: ignore[return-value]


def _match_placement(p: nn.Parameter) -> None:
    """A DTensor gradient may come replicated or partial; its parameter's placement is the one optimizers expect."""
    grad = p.grad
    if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
        p.grad = grad.redistribute(placements=p.placements)


def total_norm(
    parameters: Iterable[nn.Parameter], mesh: HybridMesh, first_holder: Mapping[int, bool], norm_type: float = 2.0
) -> torch.Tensor:
    """Norm of all gradients of the model, over all axes.

    Shards are summed over their axes; replicated gradients and tied weights count once.

    Args:
        parameters: This rank's parameters.
        mesh: The mesh.
        first_holder: ``id(parameter)`` to whether this stage is the first that holds it, for tied weights.
        norm_type: p of the p-norm; ``inf`` for the largest element.

    Returns:
        0-dim float32 tensor, equal on all ranks.

    Communication:
        All-reduces of at most four elements over ``tp``, ``dp_shard``, ``ep`` and ``pp``.
    """
    if norm_type <= 0:
        raise ConfigError(f"norm_type={norm_type} is not a norm.", "", "Use a positive number or inf.")
    infinite = math.isinf(norm_type)
    device: torch.device | None = None
    slots: dict[frozenset[str], list[torch.Tensor]] = {}
    for p in parameters:
        device = device or local(p).device
        if p.grad is None or not first_holder.get(id(p), True):
            continue
        _match_placement(p)
        grad = local(p.grad).detach().float()
        value = grad.abs().max() if infinite and grad.numel() else grad.abs().pow(norm_type).sum()
        slots.setdefault(_shard_axes(p, p.grad), []).append(value)
    combine = (lambda v: v.max()) if infinite else (lambda v: v.sum())
    shards = ((), ("tp",), ("dp_shard",), ("tp", "dp_shard"), ("ep",), ("tp", "ep"))
    keys = [frozenset(axes) for axes in shards]
    zero = torch.zeros((), device=device or torch.device(mesh.device_type))
    vector = torch.stack([combine(torch.stack(slots[k])) if k in slots else zero for k in keys])
    op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    for axis in ("tp", "dp_shard", "ep"):
        vector = _reduce_slots(vector, [i for i, axes in enumerate(shards) if axis in axes], mesh, axis, op)
    total = combine(vector)
    if mesh.size("pp") > 1:
        dist.all_reduce(total, op=op, group=mesh.group("pp"))
    return total if infinite else total.pow(1.0 / norm_type)


def _reduce_slots(
    vector: torch.Tensor, slots: list[int], mesh: HybridMesh, axis: str, op: dist.ReduceOp.RedOpType
) -> torch.Tensor:
    if mesh.size(axis) == 1:
        return vector
    part = vector[slots].contiguous()
    dist.all_reduce(part, op=op, group=mesh.group(axis))
    vector = vector.clone()
    vector[slots] = part
    return vector


def _shard_axes(p: nn.Parameter, grad: torch.Tensor) -> frozenset[str]:
    experts = frozenset({"ep"} if is_expert(p) else ())
    if not isinstance(grad, DTensor):
        return experts
    names = grad.device_mesh.mesh_dim_names or ()
    return experts.union(n for n, placement in zip(names, grad.placements, strict=True) if _shim.is_sharded(placement))


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients by ``max_norm / norm`` where the norm is larger, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        parameters: This rank's parameters.
        max_norm: Largest norm allowed.
        norm: The norm of the whole model, from :func:`total_norm`.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for p in parameters:
        if p.grad is not None:
            grad = local(p.grad)
            grad.mul_(factor.to(grad.dtype))


def clip_by_value(parameters: Iterable[nn.Parameter], value: float) -> None:
    """Clamp every gradient element to ``[-value, value]``."""
    for p in parameters:
        if p.grad is not None:
            local(p.grad).clamp_(-value, value)
