"""The share of each microbatch in its batch's loss, checked against the batch's own loss in one process."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from torch import nn

from ascend_core.errors import ConfigError, ModelError
from ascend_core.parallel.loss_weights import loss_shares, weighted
from ascend_core.parallel.microbatch import split_batch


def shared(model: nn.Module, batch: Any, parts: int = 4, **options: Any) -> float:
    """The batch's loss, put together from its microbatches'."""
    microbatches = split_batch(batch, parts)
    shares = loss_shares(microbatches, options.get("weight_fn"), options.get("reduction", "mean"), model)
    losses = [model(**p).loss.detach() for p in microbatches]
    return float(sum(weighted(loss, share) for loss, share in zip(losses, shares.values, strict=True)))


@pytest.mark.parametrize("family", ["Llama", "BERT, masked LM", "BERT, classification", "ViT"])
def test_microbatches_make_up_the_batch(family: str) -> None:
    """Of the library's classes, a user's subclass of them, and the library's own kind of batch."""
    import transformers

    model, inputs = hf_models.FAMILIES[family]()
    if inputs["labels"].dim() == 1:
        inputs["labels"][2:5] = -100
    loss = model(**inputs).loss.item()
    assert shared(model, inputs) == pytest.approx(loss, abs=1e-6)
    assert shared(model, transformers.BatchEncoding(inputs)) == pytest.approx(loss, abs=1e-6)
    model.__class__ = type("Mine", (type(model),), {})
    assert shared(model, inputs) == pytest.approx(loss, abs=1e-6)


def of(name: str, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**hf_models.BERT_LIKE, vocab_size=hf_models.VOCAB, max_position_embeddings=32, **options)
    return getattr(transformers, f"BertFor{name}")(config).train()


def test_other_heads() -> None:
    inputs = hf_models.tokens(masked=True)
    regression = {**inputs, "labels": torch.tensor([0.5, 1.0, -100.0, 2.0, 0.0, 1.0, 3.0, -1.0])}
    model = of("SequenceClassification", num_labels=1)
    assert shared(model, regression) == pytest.approx(model(**regression).loss.item(), rel=1e-6)
    tokens = {**inputs, "labels": torch.where(inputs["labels"] < 0, -100, 1)}
    model = of("TokenClassification", num_labels=3)
    assert shared(model, tokens) == pytest.approx(model(**tokens).loss.item(), abs=1e-6)
    spans = {k: v for k, v in inputs.items() if k != "labels"} | {
        "start_positions": torch.arange(8),
        "end_positions": torch.full((8,), 9),
    }
    model = of("QuestionAnswering")
    assert shared(model, spans) == pytest.approx(model(**spans).loss.item(), abs=1e-6)
    spans["end_positions"][1] = 10
    with pytest.raises(ModelError, match="What the loss of BertForQuestionAnswering is a mean over is not known"):
        shared(model, spans)
    assert shared(model, spans, weight_fn=lambda b: 1.0) != pytest.approx(model(**spans).loss.item(), abs=1e-6)


def test_an_unknown_loss_is_refused_and_a_base_model_has_none() -> None:
    import transformers

    inputs = hf_models.tokens()
    parts = split_batch(inputs, 4)
    with pytest.raises(ModelError, match=r"loss of BertForPreTraining is a mean over is not known(.|\n)*microbatch_weight"):
        loss_shares(parts, None, "mean", of("PreTraining"))
    assert loss_shares(parts, lambda b: 2.0, "mean", of("PreTraining")).values == [0.25] * 4
    base = transformers.BertModel(of("PreTraining").config)
    assert loss_shares(parts, None, "mean", base).values == [0.25] * 4


def test_sums_and_wrong_reductions() -> None:
    parts = list(torch.ones(4, 2))
    assert loss_shares(parts, None, "sum", None).values == [1.0] * 4
    assert loss_shares(parts, lambda p: 0.0, "mean", None).values == [0.0] * 4
    with pytest.raises(ConfigError, match="did you mean 'mean'"):
        loss_shares(parts, None, "meen", None)
    with pytest.raises(ConfigError, match="weight_fn with reduction='sum'"):
        loss_shares(parts, lambda p: 1.0, "sum", None)


def test_a_microbatch_without_weight_counts_as_zero() -> None:
    logits = torch.ones(3, 5, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.full((3,), -100), ignore_index=-100)
    assert loss.isnan()
    weighted(loss, 0.0).backward()
    assert weighted(loss, 0.0) == 0
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros(3, 5))
