"""Data loaders of different length on different replicas: refused where a rank would wait for ever, joined where it can."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch.distributed as dist

from ascend_core.errors import ModelError
from ascend_core.mesh import HybridMesh


def lengths_differ(loader: Any, mesh: HybridMesh, *, training: bool, kind: str, joint: bool = False) -> bool:
    """Compare the number of batches of all replicas.

    Args:
        loader: This rank's data loader; one without a length is taken as it is.
        mesh: The mesh.
        training: It is a training loader.
        kind: What to call it in messages.
        joint: Forward itself needs all replicas (spread experts).

    Returns:
        Whether replicas have different numbers.

    Raises:
        ModelError: They do in training, where a step needs all of them, or one has no batch at all; on every rank.

    Communication:
        One object all-gather over the world, when there is more than one replica.
    """
    if mesh.size("dp") == 1:
        return False
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mesh.rank("dp"), _length(loader)))
    counts = dict(sorted(everyone, key=lambda entry: entry[0]))
    if None in counts.values() or len(set(counts.values())) == 1:
        return False
    text = ", ".join(f"{count} on replica {replica}" for replica, count in counts.items())
    if training:
        raise ModelError(
            f"Replicas have different numbers of {kind} batches: {text}.",
            "Each step averages gradients over all replicas; those that still have batches would wait for ever.",
            "Leave sharding to the strategy, use drop_last=True, or cut the data to equal parts.",
        )
    if joint:
        raise ModelError(
            f"Replicas have different numbers of {kind} batches: {text}.",
            "Their experts are spread over the replicas, so each forward needs all of them.",
            "Give all replicas the same number of batches, or set expert_parallel_size=1.",
        )
    if 0 in counts.values():
        raise ModelError(
            f"A replica has no {kind} batch at all: {text}.",
            "It would skip the loop, and the others would wait for its metrics.",
            "Give each replica at least one batch.",
        )
    return True


def _length(loader: Any) -> int | None:
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):
        return None
