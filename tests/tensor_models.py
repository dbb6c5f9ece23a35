"""Tiny random Hugging Face models, each with a batch: ``FAMILIES[name]()`` gives (model, inputs with labels)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, torch.Tensor]]
VOCAB, BATCH, SEQ = 96, 4, 10


def _tokens(labels: str = "tokens") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    return {"input_ids": ids, "labels": ids.clone() if labels == "tokens" else torch.arange(BATCH) % 2}


def _causal(kind: str, **options: Any) -> Built:
    import transformers

    torch.manual_seed(1)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": None, "attention_dropout": 0.0,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval(), _tokens()


def _gemma(kind: str, **options: Any) -> Built:
    sizes = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
    return _causal(kind, **{**sizes, **options})


def _gpt2(**options: Any) -> Built:
    import transformers

    torch.manual_seed(1)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **off, **options})).eval(), _tokens()


def _neox(**options: Any) -> Built:
    import transformers

    torch.manual_seed(1)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**{**sizes, **options})).eval(), _tokens()


def _bert(**options: Any) -> Built:
    import transformers

    torch.manual_seed(1)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    model = transformers.BertForMaskedLM(transformers.BertConfig(**{**sizes, **options})).eval()
    inputs = _tokens()
    inputs["attention_mask"] = (torch.arange(SEQ) < torch.tensor([[10], [7], [9], [4]])).long()
    return model, inputs


def _vit(**options: Any) -> Built:
    import transformers

    torch.manual_seed(1)
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
        "patch_size": 4, "num_channels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**{**sizes, **options})).eval()
    pixels = torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    return model, {"pixel_values": pixels, "labels": torch.arange(BATCH) % 2}


FAMILIES: dict[str, Callable[..., Built]] = {
    "llama": lambda **o: _causal("Llama", **o),
    "qwen2": lambda **o: _causal("Qwen2", **o),
    "qwen3": lambda **o: _causal("Qwen3", head_dim=8, **o),
    "mistral": lambda **o: _causal("Mistral", **{"sliding_window": 6, **o}),
    "phi3": lambda **o: _causal("Phi3", **o),
    "gemma2": lambda **o: _gemma("Gemma2", **o),
    "gemma3": lambda **o: _gemma("Gemma3Text", **o),
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "bert": _bert,
    "vit": _vit,
}
