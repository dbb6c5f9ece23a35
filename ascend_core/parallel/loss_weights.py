"""The share of each microbatch's loss in the loss of its batch.

The mean of microbatch means is the batch's mean only if all microbatches count alike. A loss that is a mean over valid
tokens needs their numbers; for a Hugging Face model that computes its own loss they are read off ``labels``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ascend_core.errors import ConfigError, ModelError, nearest

_IGNORED = -100
_SHIFTED = ("ForCausalLM", "LMHeadModel")
_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Shares:
    """Shares of the microbatches.

    Attributes:
        values: One factor per microbatch; they add up to 1 in a mean, and are all 1 in a sum.
        from_labels: They were read off the batch's labels, and are right only if the model computed the loss from these.
    """

    values: list[float]
    from_labels: bool = False

    @property
    def equal(self) -> bool:
        """All microbatches count alike."""
        return max(self.values) - min(self.values) < 1e-12


def loss_shares(
    parts: Sequence[Any], weight_fn: Callable[[Any], float] | None, reduction: str, pretrained: nn.Module | None
) -> Shares:
    """Work out the shares.

    Args:
        parts: The microbatches.
        weight_fn: The user's weight of a microbatch in the mean.
        reduction: ``"mean"``: the batch's loss is the (weighted) mean of the microbatches'; ``"sum"``: their sum.
        pretrained: The Hugging Face model that is trained, or None.

    Raises:
        ConfigError: An unknown reduction, or a sum with weights.
        ModelError: A Hugging Face batch whose weights cannot be told.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r} is not known.", "", nearest(reduction, REDUCTIONS))
    if reduction == "sum":
        if weight_fn is not None:
            raise ConfigError("weight_fn with reduction='sum'.", "Weights belong to a mean.", "Leave one of them out.")
        return Shares([1.0] * len(parts))
    counts = [float(weight_fn(p)) for p in parts] if weight_fn else None
    from_labels = False
    if counts is None and pretrained is not None:
        counts = _valid_labels(pretrained, parts)
        from_labels = counts is not None
    weights = counts or [1.0] * len(parts)
    total = sum(weights) or 1.0
    return Shares([w / total for w in weights], from_labels)


def weighted(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """Scale a loss; a microbatch without weight counts as zero even if its mean over nothing is NaN."""
    return loss.nan_to_num() * 0.0 if factor == 0 else loss * factor


def refuse_own_loss(shares: Shares, labels_given: bool) -> None:
    """Refuse label counts as weights if the step did not leave the loss to the model.

    Raises:
        ModelError: The step computes its own loss, and the microbatches do not count alike.
    """
    if shares.from_labels and not labels_given and not shares.equal:
        raise ModelError(
            "The step computes its own loss, and its microbatches have different numbers of valid labels.",
            "How the loss uses labels of -100 is not known, and the mean of microbatch means may not be the batch's mean.",
            "Pass labels to the model, give weight_fn to forward_backward(), or define microbatch_weight(batch) on the "
            "LightningModule.",
        )


def _valid_labels(model: nn.Module, parts: Sequence[Any]) -> list[float] | None:
    """Labels that the model's own loss counts, by microbatch; None if the loss is a mean over samples."""
    if not all(isinstance(p, Mapping) for p in parts):
        return None
    if parts[0].get("num_items_in_batch") is not None:
        raise ModelError(
            "num_items_in_batch in a pipelined batch.",
            "With it a loss is a part of a sum (or is ignored: some models do), and microbatch losses are averaged.",
            "Leave it out: microbatches are weighted by their valid labels. Or divide by it and use reduction='sum'.",
        )
    labels = [p.get("labels") for p in parts]
    if not all(isinstance(t, torch.Tensor) and not t.is_floating_point() and t.dim() for t in labels):
        return None
    plain = [float((t != _IGNORED).sum()) for t in labels]
    if labels[0].dim() == 1:
        return plain
    shifted = [float((t[..., 1:] != _IGNORED).sum()) for t in labels]
    kinds = (type(model).__name__, str(getattr(model, "loss_type", None)))
    if any(kind.endswith(_SHIFTED) for kind in kinds):
        return shifted
    if any(kind.endswith(_UNSHIFTED) for kind in kinds) or _alike(plain, shifted):
        return plain
    raise ModelError(
        f"The microbatches have different numbers of valid labels, and how {type(model).__name__} counts them is not known.",
        "The mean of microbatch means is then not the batch's mean.",
        "Give weight_fn to forward_backward(), or define microbatch_weight(batch) on the LightningModule.",
    )


def _alike(a: list[float], b: list[float]) -> bool:
    total_a, total_b = sum(a) or 1.0, sum(b) or 1.0
    return all(abs(x / total_a - y / total_b) < 1e-12 for x, y in zip(a, b, strict=True))
