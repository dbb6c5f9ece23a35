"""The share of each microbatch's loss in the loss of its batch.

The mean of microbatch means is the batch's mean only if all microbatches count alike. A loss that is a mean over valid
tokens needs their numbers; for a Hugging Face model that computes its own loss they are read off ``labels``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ascend_core.errors import ConfigError, ModelError, nearest

_IGNORED = -100
_KINDS: dict[str, tuple[str, ...]] = {
    "shifted": ("ForCausalLM", "LMHeadModel"),
    "tokens": ("ForMaskedLM", "ForTokenClassification"),
    "samples": (
        "ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification",
        "ForMultipleChoice", "ForNextSentencePrediction",
    ),
    "spans": ("ForQuestionAnswering",),
}  # fmt: skip
"""What the losses of Hugging Face classes are means over, by the ends of their names."""

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
    """What the model's own loss is a mean over, counted by microbatch; None if the step has its own, or if all are equal."""
    if not all(isinstance(p, Mapping) for p in parts):
        return None
    if parts[0].get("num_items_in_batch") is not None:
        raise ModelError(
            "num_items_in_batch in a pipelined batch.",
            "With it a loss is a part of a sum (or is ignored: some models do), and microbatch losses are averaged.",
            "Leave it out: microbatches are weighted by their valid labels. Or divide by it and use reduction='sum'.",
        )
    kind = _kind(model)
    if kind == "spans":
        return _answers(model, parts)
    name, kind = ("shift_labels", "tokens") if kind == "shifted" and "shift_labels" in parts[0] else ("labels", kind)
    labels = [p.get(name) for p in parts]
    if labels[0] is None or kind == "none":
        return None
    if kind == "unknown":
        raise _unknown(model)
    if kind == "samples" and (labels[0].is_floating_point() or getattr(model.config, "num_labels", 2) == 1):
        return None  # a mean over all elements, of which every microbatch has as many
    return [float((t[..., 1:] if kind == "shifted" else t).ne(_IGNORED).sum()) for t in labels]


def _kind(model: nn.Module) -> str:
    """What the loss of a Hugging Face class is a mean over; by the names that the library gives to its classes."""
    names = [c.__name__ for c in type(model).__mro__]  # a user's subclass has another name
    for kind, suffixes in _KINDS.items():
        if any(name.endswith(suffixes) for name in names):
            return kind
    return "unknown" if "labels" in inspect.signature(model.forward).parameters else "none"


def _answers(model: nn.Module, parts: Sequence[Any]) -> list[float] | None:
    """Start and end positions behind the text are left out of the two means, which one weight cannot follow."""
    for part in parts:
        positions, ids = [part.get("start_positions"), part.get("end_positions")], part.get("input_ids")
        if ids is not None and any(p is not None and bool(((p < 0) | (p >= ids.shape[1])).any()) for p in positions):
            raise _unknown(model)
    return None


def _unknown(model: nn.Module) -> ModelError:
    return ModelError(
        f"What the loss of {type(model).__name__} is a mean over is not known, with pipeline_parallel_size > 1.",
        "The mean of microbatch means may not be the batch's mean.",
        "Give weight_fn to forward_backward() or define microbatch_weight(batch) on the LightningModule (1.0 for a mean over "
        "samples); for a loss that is a sum, use reduction='sum' or microbatch_reduction = 'sum'.",
    )
