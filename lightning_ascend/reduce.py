"""Reductions of the hybrid strategy: over replicas for values, over the world for decisions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ascend_core import hccl
from ascend_core.mesh import HybridMesh

_OPS = {"sum": "SUM", "max": "MAX", "min": "MIN", "product": "PRODUCT", "mean": "AVG", "avg": "AVG"}


def _name(reduce_op: Any) -> str | None:
    """The name of a reduction, or None for one that only its backend knows."""
    if isinstance(reduce_op, str):
        return _OPS[reduce_op.lower()]
    return next((n for n in sorted(set(_OPS.values())) if reduce_op == getattr(dist.ReduceOp, n)), None)


class ReduceMixin:
    """Values are equal on the pipeline and tensor ranks of a replica, so they are reduced over replicas only."""

    mesh: HybridMesh | None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over replicas.

        Args:
            tensor: Any shape and dtype; other values are returned as they are.
            group: Another process group.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"``, ``"min"`` or a ``ReduceOp``. The mean of integers and flags is a
                float: HCCL cannot average integers, and truncating them would be wrong.

        Returns:
            The reduced tensor. Like Lightning's, a floating tensor is reduced in place.

        Communication:
            One all-reduce over the data-parallel group; see :func:`ascend_core.hccl.all_reduce` for 64-bit floats.
        """
        if not isinstance(tensor, torch.Tensor) or not dist.is_initialized():
            return tensor
        if group is None:
            group = self.mesh.group("dp") if self.mesh is not None else dist.group.WORLD
        name = _name(reduce_op)
        if name == "AVG" and not tensor.is_floating_point():
            tensor = tensor.float()
        if dist.get_world_size(group) == 1:
            return tensor
        if name is None:
            dist.all_reduce(tensor, op=reduce_op, group=group)
            return tensor
        return hccl.all_reduce(tensor, name, group)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree on a decision over all ranks; ``all=False`` means any. Communication: one all-reduce of one int32."""
        device = self.root_device  # type: ignore[attr-defined]
        votes = torch.tensor(int(decision), dtype=torch.int32, device=device)
        dist.all_reduce(votes)
        count = int(votes)
        return count == dist.get_world_size() if all else count > 0

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather over replicas: ``(replicas, *shape)``."""
        if group is None and self.mesh is not None:
            group = self.mesh.group("dp")
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)  # type: ignore[misc]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks of the world."""
        if not dist.is_initialized():
            return
        device = self.root_device  # type: ignore[attr-defined]
        if device.type == "cpu":
            dist.barrier()
        else:
            dist.barrier(device_ids=[device.index])
