"""Data for a split model: all ranks of one replica read the same batches.

Samplers are dealt by data-parallel rank (the strategy's ``distributed_sampler_kwargs``); this file does the rest:
iterable datasets, the seeds of loader workers, and a check that the first batches really agree.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ascend_core._shim import pytree
from ascend_core.errors import ModelError
from ascend_core.mesh import HybridMesh


class EveryNth(IterableDataset):
    """Deal the samples of an iterable dataset to data-parallel ranks in turn.

    The last incomplete round is filled up by repeating its samples, so that all ranks see the same number, as
    ``DistributedSampler`` does.

    Args:
        dataset: The user's dataset, the same on all ranks.
        rank: Data-parallel rank.
        size: Data-parallel size.
    """

    def __init__(self, dataset: Iterable[Any], rank: int, size: int) -> None:
        super().__init__()
        self.dataset, self.rank, self.size = dataset, rank, size

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's samples."""
        round_: list[Any] = []
        for sample in self.dataset:
            round_.append(sample)
            if len(round_) == self.size:
                yield round_[self.rank]
                round_ = []
        if round_:
            yield round_[self.rank % len(round_)]


def deal_iterable(loader: Any, mesh: HybridMesh) -> bool:
    """Deal a DataLoader's iterable dataset by data-parallel rank, in place.

    Returns:
        Whether the loader had one that needed it.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset) or mesh.size("dp") == 1:
        return False
    if not isinstance(loader.dataset, EveryNth):
        loader.__dict__["dataset"] = EveryNth(loader.dataset, mesh.rank("dp"), mesh.size("dp"))
    return True


def seed_workers_by_replica(loader: Any, init_function: Any, mesh: HybridMesh) -> None:
    """Make loader workers of one replica draw the same random numbers.

    Args:
        loader: A DataLoader.
        init_function: Lightning's ``pl_worker_init_function`` of the namespace in use.
        mesh: The mesh.
    """
    if isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        loader.worker_init_fn = functools.partial(init_function, rank=mesh.rank("dp"))


def fingerprint(batch: Any) -> str:
    """A digest of all tensors, strings and numbers in a batch."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu()
            digest.update(repr((tuple(leaf.shape), leaf.dtype)).encode())
            digest.update(leaf.contiguous().flatten().view(torch.uint8).numpy().tobytes() if leaf.numel() else b"")
        elif isinstance(leaf, (str, bytes, int, float)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def check_same_batch(batch: Any, mesh: HybridMesh) -> None:
    """Check that all ranks of this replica hold the same batch.

    Raises:
        ModelError: They do not; on every rank of the replica.

    Communication:
        One object all-gather over the world.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mesh.rank("dp"), fingerprint(batch)))
    mine = mesh.rank("dp")
    replicas: dict[int, set[str]] = {}
    for replica, digest in everyone:
        replicas.setdefault(replica, set()).add(digest)
    bad = sorted(r for r, digests in replicas.items() if len(digests) > 1)
    if bad:
        raise ModelError(
            f"Ranks of one replica read different batches (data-parallel ranks {bad}; this one is {mine}).",
            "Pipeline and tensor ranks of a replica work on one batch; data split by the global rank gives each another.",
            "Leave sharding to the strategy, or split by trainer.strategy.distributed_sampler_kwargs; "
            "make random data and shuffling the same in all processes with seed_everything().",
        )
