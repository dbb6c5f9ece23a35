"""Data parallel: gradients averaged over replicas, or parameters sharded by FSDP2.

Replication uses no wrapper. After the last backward of a step, local gradients travel in flat buckets, which is exact
under every schedule and with tensor-parallel shards, where torch's DDP is not. Sharding is torch's ``fully_shard`` on
each block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ascend_core.mesh import HybridMesh

BUCKET_BYTES = 64 * 2**20


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_parameters(
    blocks: Sequence[nn.Module],
    mesh: HybridMesh,
    *,
    reshard_after_forward: bool,
    wrap: nn.Module | None,
    ignored: Set[nn.Parameter] = frozenset(),
) -> list[FSDPModule]:
    """Shard parameters over the data-parallel axes with FSDP2.

    Args:
        blocks: Blocks to shard, each on its own.
        mesh: The mesh.
        reshard_after_forward: Free the gathered parameters after forward (ZeRO-3) or keep them (ZeRO-2).
        wrap: A module around the blocks whose remaining parameters are sharded as one more unit, or None. It must be
            one whose ``forward`` always runs to its end, so never one that a pipeline cuts.
        ignored: Parameters that FSDP2 leaves alone (experts, which are spread over the same ranks already).

    Returns:
        The sharded modules.
    """
    options: Any = {
        "mesh": mesh.data_mesh(),
        "reshard_after_forward": reshard_after_forward,
        "ignored_params": set(ignored) or None,
    }
    sharded = []
    for block in blocks:
        if any(p.requires_grad and p not in ignored for p in block.parameters()):
            sharded.append(fully_shard(block, **options))
    if wrap is not None and wrap not in blocks:
        sharded.append(fully_shard(wrap, **options))
    return sharded  # type: ignore[return-value]


def is_data_sharded(parameter: torch.Tensor, mesh: HybridMesh) -> bool:
    """Tell whether FSDP2 manages a parameter (and so reduces its gradient)."""
    return isinstance(parameter, DTensor) and "dp_shard" in (parameter.device_mesh.mesh_dim_names or ())


def mark_expert(parameter: nn.Parameter) -> None:
    """Say that a plain parameter belongs to an expert that only some ranks of the data-parallel axis hold."""
    parameter.expert_parallel = True  # type: ignore[attr-defined]


def is_expert(parameter: torch.Tensor) -> bool:
    """Tell whether an expert-parallel rank has its own part; the gradient then holds the tokens of all of them."""
    if isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ()):
        return True
    return getattr(parameter, "expert_parallel", False)


class GradientReducer:
    """Sums gradients over a process group in flat buckets.

    A gradient that is None on some ranks counts as zero there; one that is None on all ranks stays None, so that an
    optimizer skips the parameter as it would in one process.

    Args:
        parameters: The parameters, in the same order on all ranks of the group.
        group: The group.
        divisor: Divide the sums by it; the group size gives the mean.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, divisor: int = 1) -> None:
        self.group, self.divisor = group, divisor
        self.buckets: list[list[nn.Parameter]] = []
        size = 0
        for p in sorted(parameters, key=lambda p: str(p.dtype)):
            nbytes = local(p).numel() * p.element_size()
            if not self.buckets or self.buckets[-1][0].dtype != p.dtype or size + nbytes > BUCKET_BYTES:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += nbytes

    def __call__(self) -> None:
        """Reduce all gradients.

        Communication: one all-reduce per bucket over the group: the bytes of its gradients plus one element each.
        """
        for bucket in self.buckets:
            self._reduce(bucket)

    def _reduce(self, bucket: list[nn.Parameter]) -> None:
        parts = []
        for p in bucket:
            grad = p.grad
            if grad is None:
                parts.append(torch.zeros(local(p).numel() + 1, dtype=p.dtype, device=local(p).device))
            else:
                flat = local(grad).reshape(-1)
                parts.append(torch.cat([flat, flat.new_ones(1)]))
        buffer = torch.cat(parts)
        dist.all_reduce(buffer, group=self.group)
        offset = 0
        flags = buffer[torch.tensor([0, *[local(p).numel() + 1 for p in bucket]]).cumsum(0)[1:].to(buffer.device) - 1].tolist()
        for p, flag in zip(bucket, flags, strict=True):
            count = local(p).numel()
            if flag > 0:
                value = buffer[offset : offset + count].view(local(p).shape)
                if self.divisor != 1:
                    value = value / self.divisor
                self._store(p, value)
            offset += count + 1

    @staticmethod
    def _store(p: nn.Parameter, value: torch.Tensor) -> None:
        if p.grad is None:
            value = value.clone()
            p.grad = (
                DTensor.from_local(value, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
                if isinstance(p, DTensor)
                else value
            )
        else:
            local(p.grad).copy_(value)
