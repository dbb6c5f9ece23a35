"""Hugging Face models split by tensors train like the unsplit model: logits, loss, gradients, parameters of three steps."""

from __future__ import annotations

from typing import Any

import hf_tensor
import pytest
from rank_pool import RankPool
from tensor_models import FAMILIES

UNEVEN: dict[str, tuple[int, dict[str, Any]]] = {
    "llama-one-kv-head": (2, {"num_key_value_heads": 1}),
    "qwen3-shared-kv-heads": (4, {}),
    "llama-six-heads": (4, {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}),
    "gpt2-three-heads": (2, {"n_embd": 24, "n_head": 3}),
    "gpt_neox-three-heads": (2, {"hidden_size": 24, "num_attention_heads": 3}),
    "phi3-three-heads": (2, {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}),
}
"""Heads that do not divide: key/value heads that ranks share, and columns that are gathered."""


@pytest.fixture(scope="module", autouse=True)
def imported(pool: RankPool) -> None:
    """Workers forked after the models are imported need not import them each."""
    for build in FAMILIES.values():
        build()
    pool._renew(4)


def check(results: list[dict[str, float]]) -> None:
    """Tolerance 1e-5 (fp32): only the order of sums differs."""
    worst = {key: max(r[key] for r in results) for key in results[0]}
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_like_the_unsplit_model(pool: RankPool, family: str) -> None:
    check(pool.run(2, hf_tensor.compare, family, {"tensor_parallel_size": 2}, deadline_s=90))


@pytest.mark.parametrize("case", UNEVEN)
def test_heads_that_do_not_divide(pool: RankPool, case: str) -> None:
    world, options = UNEVEN[case]
    check(
        pool.run(
            world, hf_tensor.compare, case.split("-", maxsplit=1)[0], {"tensor_parallel_size": world}, options, deadline_s=90
        )
    )


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3", "gpt2", "gpt_neox", "bert"])
def test_sequence_parallel(pool: RankPool, family: str) -> None:
    config = {"tensor_parallel_size": 2, "sequence_parallel": True}
    check(pool.run(2, hf_tensor.compare, family, config, deadline_s=90))


def test_sequence_parallel_with_gathered_attention(pool: RankPool) -> None:
    """Three heads over two ranks: attention is whole on both, the norms around it work on half of the tokens."""
    config = {"tensor_parallel_size": 2, "sequence_parallel": True}
    for case in ("gpt2-three-heads", "llama-one-kv-head"):
        check(pool.run(2, hf_tensor.compare, case.split("-")[0], config, UNEVEN[case][1], deadline_s=90))


def test_plans_split_what_can_be_split() -> None:
    """Attention and MLP of every family stay split at 2; where heads do not divide, the columns are gathered."""
    for family in FAMILIES:
        styles = {k.split(".", 3)[-1]: v for k, v in hf_tensor.styles(family, 2).items()}
        gathered = {k for k, v in styles.items() if v in ("colwise_gather", "rowwise_split")} - {"lm_head"}
        assert not gathered, (family, styles)
        assert sum(v == "rowwise" for v in hf_tensor.styles(family, 2).values()) == 4, (family, styles)
    assert "colwise_gather" in hf_tensor.styles("gpt2", 2, {"n_embd": 24, "n_head": 3}).values()
    phi3 = hf_tensor.styles("phi3", 2)
    assert {"fused_colwise:32,16,16", "packed_colwise"} <= set(phi3.values())
