"""Cut a batch into microbatches, and choose how many.

All microbatches of a step have the same size, so that the mean of their means is the batch's mean. A batch that the
requested number does not divide runs with the nearest number that does; when the schedule cannot run so few, its
all-forward-all-backward sibling does. The result is the same, only the bubble grows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ascend_core.errors import ModelError
from ascend_core.schedule_rules import microbatch_problem

_PLAIN = (str, bytes, int, float, bool, type(None))
_FALLBACK = {
    "1F1B": "GPipe", "Interleaved1F1B": "LoopedBFS", "InterleavedZeroBubble": "LoopedBFS", "DualPipeV": "ZBVZeroBubble"
}  # fmt: skip
"""Schedules with the same placement of stages that run any number of microbatches."""


def batch_size(batch: Any) -> int:
    """Number of samples in a batch: dim 0 of its first tensor with a dim.

    Args:
        batch: Tensors in any nesting of lists, tuples, mappings and dataclasses.

    Raises:
        ModelError: There is no tensor to tell the size by.
    """
    size = _first_size(batch)
    if size is None:
        raise ModelError(
            f"A batch of type {type(batch).__name__} holds no tensor with a batch dim.",
            "A pipeline cuts every batch into microbatches along dim 0.",
            "Return tensors (or a nesting of them) from the data loader.",
        )
    return size


def _first_size(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else None
    for child in _children(value):
        size = _first_size(child)
        if size is not None:
            return size
    return None


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    return []


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Cut a batch into equal microbatches along dim 0.

    Tensors, and lists of plain values, whose length is the batch size are cut; everything else goes whole to each.

    Args:
        batch: As in :func:`batch_size`.
        num_microbatches: A divisor of the batch size.

    Returns:
        ``num_microbatches`` batches of the same structure.
    """
    size = batch_size(batch)
    assert size % num_microbatches == 0, "choose_microbatches gives divisors"
    part = size // num_microbatches
    return [_slice(batch, size, i * part, (i + 1) * part) for i in range(num_microbatches)]


def take_samples(batch: Any, count: int) -> Any:
    """The first ``count`` samples of a batch, cut as :func:`split_batch` cuts it."""
    return _slice(batch, batch_size(batch), 0, count)


def _slice(value: Any, size: int, start: int, end: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[start:end] if value.dim() and value.shape[0] == size else value
    if isinstance(value, Mapping):
        items = {k: _slice(v, size, start, end) for k, v in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        if len(value) == size and size > 0 and all(isinstance(v, _PLAIN) for v in value):
            return value[start:end]
        items_list = [_slice(v, size, start, end) for v in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items_list)
        return type(value)(items_list)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _slice(getattr(value, f.name), size, start, end) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


def choose_microbatches(schedule: str, pipeline_size: int, requested: int | str, size: int) -> tuple[str, int]:
    """Choose the schedule and the number of microbatches for one batch.

    Args:
        schedule: The configured schedule.
        pipeline_size: Pipeline ranks.
        requested: Configured number, or ``"auto"`` for up to four per rank.
        size: Samples in the batch.

    Returns:
        Schedule name and a divisor of ``size``.

    Raises:
        ModelError: The batch is empty.
    """
    if size < 1:
        raise ModelError("An empty batch reached the pipeline.", "", "Drop empty batches in the data loader.")
    wanted = 4 * pipeline_size if requested == "auto" else int(requested)
    divisors = [m for m in range(1, size + 1) if size % m == 0]
    legal = [m for m in divisors if microbatch_problem(schedule, pipeline_size, m) is None]
    if legal:
        return schedule, min(legal, key=lambda m: (abs(m - wanted), -m))
    return _FALLBACK.get(schedule, schedule), min(divisors, key=lambda m: (abs(m - wanted), -m))
