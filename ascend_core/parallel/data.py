"""Data parallel: gradients averaged over replicas, or parameters sharded by FSDP2.

Replication uses no wrapper. After the last backward of a step, local gradients travel in flat buckets, which is exact
under every schedule and with tensor-parallel shards, where torch's DDP is not (:mod:`ascend_core.parallel.buckets`).
Sharding is torch's ``fully_shard`` on each block; that of optimizer state alone is :mod:`ascend_core.parallel.zero1`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ascend_core.mesh import HybridMesh


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
