"""Tiny Hugging Face models with random weights and a batch for each: what the parity tests of both splits train.

Labels hold -100 at padding, unevenly over the samples, so that a mean of microbatch means is not the batch's mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCAB, BATCH, SEQ = 48, 8, 10
LLAMA_LIKE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BERT_LIKE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
GEMMA = {**LLAMA_LIKE, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
Built = tuple[nn.Module, dict[str, torch.Tensor]]


def tokens(masked: bool = False) -> dict[str, torch.Tensor]:
    """Ids (8, 10) int64 padded on the right to lengths 10, 9, ... 3, their mask, and labels for the tokens or some of them."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (BATCH, SEQ), generator=generator)
    mask = (torch.arange(SEQ) < torch.arange(SEQ, SEQ - BATCH, -1).unsqueeze(1)).long()
    labelled = mask.bool() & (torch.rand(BATCH, SEQ, generator=generator) < 0.4 if masked else True)
    labelled[:, 1] = True
    labels = torch.where(labelled, ids, -100)
    return {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask, "labels": labels}


def _build(model_class: str, config_class: str, options: dict[str, Any], inputs: dict[str, torch.Tensor]) -> Built:
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, config_class)(**options)
    model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # away from the symmetric start: biases 0, norms 1
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return model.train(), inputs


def _causal(family: str, options: dict[str, Any] = LLAMA_LIKE) -> Built:
    return _build(f"{family}ForCausalLM", f"{family}Config", options, tokens())


def _gemma3() -> Built:
    return _build("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA, tokens())


def _gpt2() -> Built:
    options = {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return _build("GPT2LMHeadModel", "GPT2Config", options, tokens())


def _bert(task: str) -> Built:
    inputs = tokens(masked=True)
    if task == "SequenceClassification":
        inputs["labels"] = torch.tensor([0, 1, 2, 1, 0, 2, 2, 1])
    options = {**BERT_LIKE, "vocab_size": VOCAB, "max_position_embeddings": 32, "num_labels": 3}
    return _build(f"BertFor{task}", "BertConfig", options, inputs)


def _vit() -> Built:
    generator = torch.Generator().manual_seed(7)
    inputs = {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator), "labels": torch.arange(BATCH) % 3}
    return _build(
        "ViTForImageClassification", "ViTConfig", {**BERT_LIKE, "image_size": 8, "patch_size": 4, "num_labels": 3}, inputs
    )


def t5() -> Built:
    """An encoder-decoder, which a pipeline refuses."""
    options = {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0
    }  # fmt: skip
    return _build("T5ForConditionalGeneration", "T5Config", options, tokens())


FAMILIES: dict[str, Callable[[], Built]] = {
    "Llama": functools.partial(_causal, "Llama"),
    "Llama, tied": functools.partial(_causal, "Llama", {**LLAMA_LIKE, "tie_word_embeddings": True}),
    "Qwen2": functools.partial(
        _causal, "Qwen2", {**LLAMA_LIKE, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    ),
    "Qwen3": functools.partial(_causal, "Qwen3", {**LLAMA_LIKE, "head_dim": 8}),
    "Mistral": functools.partial(_causal, "Mistral", {**LLAMA_LIKE, "sliding_window": 4}),
    "Phi3": functools.partial(_causal, "Phi3"),
    "Gemma2": functools.partial(_causal, "Gemma2", {**GEMMA, "query_pre_attn_scalar": 8}),
    "Gemma3": _gemma3,
    "GPT-2": _gpt2,
    "GPT-NeoX": functools.partial(_causal, "GPTNeoX", {k: v for k, v in LLAMA_LIKE.items() if k != "num_key_value_heads"}),
    "BERT, masked LM": functools.partial(_bert, "MaskedLM"),
    "BERT, classification": functools.partial(_bert, "SequenceClassification"),
    "ViT": _vit,
}
"""By family: ``() -> (model in train(), its keyword arguments)``; the loss is ``model(**inputs).loss``."""
