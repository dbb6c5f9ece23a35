"""Hugging Face models, unmodified, on two pipeline stages: like one process, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import hf_cases
import hf_models
import hf_parity
import pytest
from rank_pool import RankPool
from torch import nn

from ascend_core.parallel.blocks import find_blocks

PP2 = hf_cases.PP2


@pytest.mark.parametrize("family", hf_models.FAMILIES)
def test_two_stages_train_like_one_process(pool: RankPool, family: str) -> None:
    """Loss, gradients, parameters after three SGD steps, and outputs; 1e-5 (fp32): only the order of sums differs."""
    assert_alike(pool.run(2, hf_parity.compare, family, PP2, deadline_s=60))


@pytest.mark.parametrize("family", hf_models.FAMILIES)
def test_two_stages_of_two_tensor_parallel_ranks(pool: RankPool, family: str) -> None:
    assert_alike(pool.run(4, hf_parity.compare, family, {**PP2, "tensor_parallel_size": 2}, deadline_s=60))


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("family", ["Llama, tied", "BERT, masked LM"])
def test_four_stages_on_two_ranks(pool: RankPool, family: str, schedule: str) -> None:
    assert_alike(pool.run(2, hf_parity.compare, family, {**PP2, "schedule": schedule}, deadline_s=60))


def assert_alike(results: list[dict[str, float]]) -> None:
    worst = {key: max(r[key] for r in results if key in r) for key in results[0]}
    assert set(worst) == {"loss", "output", "grad", "param"}
    assert max(v for k, v in worst.items() if k != "output") < 1e-5, worst
    assert worst["output"] < 3e-5, worst  # logits of up to 1 after three steps: parameters that differ by 1e-7 add up


@pytest.mark.parametrize(("family", "dropout"), [("Llama", "attention_dropout"), ("GPT-2", "p")])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_gradient_checkpointing(pool: RankPool, family: str, dropout: str, schedule: str) -> None:
    """Recomputed blocks drop out as before, so gradients are the same; and they are really recomputed."""
    for gap, (without, with_) in pool.run(2, hf_parity.checkpointed, family, {**PP2, "schedule": schedule}, dropout):
        assert gap < 1e-6
        assert with_ > without >= 4


REFUSALS = {
    "encoder-decoder": "T5ForConditionalGeneration is an encoder-decoder.*Use pipeline_parallel_size=1",
    "config": "LlamaForCausalLM with config.output_hidden_states=True",
    "output_hidden_states": "LlamaForCausalLM with output_hidden_states=True",
    "output_attentions": "LlamaForCausalLM with output_attentions=True",
    "use_cache": "called with a key-value cache.*Pass use_cache=False",
    "evaluation-cache": "called with a key-value cache",
    "own-loss": "computes its own loss, and its microbatches have different numbers of valid labels",
    "num-items": "num_items_in_batch in a pipelined batch",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_on_every_rank(pool: RankPool, case: str) -> None:
    """One error on both ranks, after which they are still in step with each other."""
    for text, works in pool.run(2, hf_cases.refused, case):
        assert re.match(f"ModelError: .*{REFUSALS[case]}", text, re.DOTALL), text
        assert works


def test_d05_losses_that_are_no_mean_over_samples(pool: RankPool) -> None:
    """The user's weights; a sum over the valid tokens of the batch; a microbatch whose own mean is NaN."""
    for gaps in pool.run(2, hf_cases.losses_of_all_kinds):
        assert set(gaps) == {"weights", "sum", "empty"}
        assert max(gaps.values()) < 2e-6, gaps


@pytest.mark.parametrize(("world", "zero_stage"), [(2, 0), (4, 0), (4, 2)], ids=["pp2", "pp2-dp2", "pp2-dp2-zero2"])
def test_d25_tied_embeddings(pool: RankPool, world: int, zero_stage: int) -> None:
    """Copies bit-equal after each step, equal to one process, stored once. 1e-5: five steps of AdamW with eps=1e-4."""
    results = pool.run(world, hf_cases.tied, {**PP2, "zero_stage": zero_stage}, deadline_s=60)
    assert all(r["equal"] for r in results)
    assert max(r["gap"] for r in results) < 1e-5
    assert results[0]["once"]


def test_generating(pool: RankPool) -> None:
    for ours, plain in pool.run(2, hf_cases.generated):
        assert ours == plain
        assert len(ours[0]) == 9


def test_in_a_lightning_module(pool: RankPool) -> None:
    ours = pool.run(2, hf_cases.lightning, PP2, deadline_s=60)
    plain = pool.run(1, hf_cases.lightning, None, deadline_s=60)[0]
    for result in ours:
        assert result["losses"] == pytest.approx(plain["losses"], abs=1e-5)
        assert result["val"] == pytest.approx(plain["val"], abs=1e-5)
    assert ours[0]["state"].keys() == plain["state"].keys()
    assert max(float((ours[0]["state"][n] - t).abs().max()) for n, t in plain["state"].items()) < 1e-5


def test_the_documented_table_is_the_tested_one() -> None:
    text = Path("docs/pipeline_parallel.md").read_text()
    section = text.split("## Hugging Face models")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| yes", section, re.MULTILINE)
    assert rows == list(hf_models.FAMILIES)
    assert re.search(r"^\| T5[^|]* \| refused", section, re.MULTILINE)


class Expert(nn.Module):
    """One layer of many experts: their list is the longest, and holds nearly all parameters."""

    def __init__(self, plan: dict[str, object] | None) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="moe", base_model_pp_plan=plan)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(8))}) for _ in range(1)
        )


def test_the_models_own_plan_names_the_blocks() -> None:
    plan = {"embed": (["input_ids"], ["hidden"]), "layers": (["hidden"], ["hidden"])}
    assert find_blocks(nn.ModuleDict({"model": Expert(plan)})).names == ("model.layers.0",)
    assert len(find_blocks(nn.ModuleDict({"model": Expert(None)})).names) == 8
