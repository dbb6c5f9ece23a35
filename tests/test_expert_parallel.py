"""Experts spread over ranks train like one process that holds them all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import expert_refusals
import experts
import lit
import pytest
from npu_pool import NpuPool
from rank_pool import RankPool
from test_trainer_parity import check_same_checkpoint, check_same_run

EP2 = {"expert_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}
TP2 = {"tensor_parallel_size": 2}
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "ep2": (2, "plain", EP2, {}, (1, 1)),
    "ep4-gelu-top1": (4, "plain", {"expert_parallel_size": 4}, {"top_k": 1, "activation": "gelu", "normalize_weights": False}, (1, 1)),
    "dp4-ep2-balance": (4, "plain", EP2, {"load_balance_coefficient": 0.1}, (1, 1)),
    "dp2-balance": (2, "plain", {}, {"load_balance_coefficient": 0.1}, (1, 1)),
    "ep4-idle": (4, "plain", {"expert_parallel_size": 4}, {"idle": True}, (1, 1)),
    "ep2-capacity": (2, "plain", EP2, {"capacity_factor": 0.8}, (1, 2)),
    "dp4-ep2-list": (4, "plain", EP2, {"listed": True}, (1, 1)),
    "ep4-list-idle": (4, "plain", {"expert_parallel_size": 4}, {"listed": True, "idle": True}, (1, 1)),
    "tp2-ep2-list": (4, "plain", {**TP2, **EP2}, {"listed": True}, (1, 1)),
    "pp2-ep2-list-zero2": (4, "plain", {**PP2, **EP2, "zero_stage": 2}, {"listed": True}, (1, 1)),
    "pp2-ep2-capacity": (4, "plain", {**PP2, **EP2}, {"capacity_factor": 0.8}, (1, 8)),
    "pp2-ep2-balance": (4, "plain", {**PP2, **EP2}, {"load_balance_coefficient": 0.1}, (2, 4)),
    "pp2-ep2-balance-zbv": (
        4,
        "plain",
        {**PP2, **EP2, "schedule": "ZBVZeroBubble", "activation_checkpoint_blocks": 1},
        {"layers": 4, "load_balance_coefficient": 0.1},
        (2, 4),
    ),
    "pp2-ep2-zero-bubble": (4, "plain", {**PP2, **EP2, "schedule": "ZBVZeroBubble"}, {"layers": 4}, (1, 1)),
    "dp4-ep2-zero1-list": (4, "plain", {**EP2, "zero_stage": 1, "partition_gradients": True}, {"listed": True}, (1, 1)),
    "dp4-ep2-zero1": (4, "plain", {**EP2, "zero_stage": 1, "contiguous_gradients": True}, {}, (1, 1)),
    "dp4-ep2-zero2": (4, "plain", {**EP2, "zero_stage": 2}, {}, (1, 1)),
    "dp4-ep2-hsdp3": (4, "plain", {**EP2, "zero_stage": 3, "data_parallel_shard_size": 2}, {}, (1, 1)),
    "qwen3-moe-ep2": (2, "qwen3", EP2, {}, (1, 1)),
    "qwen3-moe-pp2-ep2": (4, "qwen3", {**PP2, **EP2}, {}, (1, 1)),
    "mixtral-tp2-ep2": (4, "mixtral", {**TP2, **EP2}, {}, (1, 1)),
    "mixtral-ep2-zero3": (2, "mixtral", {**EP2, "zero_stage": 3}, {}, (1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_trains_like_one_process(pool: RankPool, name: str) -> None:
    """Tolerance 1e-5 (fp32): only the order of sums changes. The reference runs every expert on every token."""
    world, kind, config, options, cut = CASES[name]
    results = pool.run(world, experts.compare, kind, config, options, cut, deadline_s=120)
    assert max(results[0].values()) < 1e-5, results[0]


@pytest.mark.parametrize(
    ("config", "options"), [(EP2, {}), ({**PP2, **EP2}, {"listed": True})], ids=["dp4-ep2", "pp2-ep2-list"]
)
def test_whole_state_goes_out_and_in(pool: RankPool, config: dict[str, Any], options: dict[str, Any]) -> None:
    """Names and shapes of the unsplit model, which loads them and trains on as the spread one does."""
    gaps = pool.run(4, experts.resume, config, options, deadline_s=120)[0]
    assert gaps["same"] == 0 and gaps["plain"] < 1e-5, gaps


REFUSED: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "no_experts": (2, EP2, "ConfigError", "TinyGPT has no MoE layer that can be spread"),
    "three_experts": (2, EP2, "ConfigError", "'0.experts' has 3 experts, which do not divide over expert_parallel_size=2"),
    "tied_experts": (2, EP2, "ConfigError", "'0.experts.down_proj' is also '1.experts.down_proj'"),
    "mixing_experts": (2, EP2, "ModelError", r"(?s)MixingExperts\) cannot be spread.*its output differs by"),
    "planned_experts": (
        4,
        {**TP2, **EP2, "tensor_parallel_plan": {"*.up_proj": "colwise", "*.down_proj": "rowwise"}},
        "ConfigError",
        "'blocks.0.moe.experts.0.up_proj', which belongs to experts that are spread",
    ),
    "OutsideBlocks": (4, {**PP2, **EP2}, "ConfigError", "'moe.experts' is outside of the blocks 'blocks.0' to 'blocks.1'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_spread_is_refused(pool: RankPool, name: str) -> None:
    world, config, kind, text = REFUSED[name]
    for result in pool.run(world, expert_refusals.attempt, name, config):
        assert result[0] == kind and re.search(text, result[1]), result


def test_the_axis_divides_data_parallel(pool: RankPool) -> None:
    for kind, text in pool.run(3, expert_refusals.attempt, "no_experts", EP2):
        assert kind == "ConfigError" and "expert_parallel_size 2 does not divide the data-parallel size 3" in text


def test_replicas_with_unlike_batches(pool: RankPool) -> None:
    """Another size on one replica makes all measure; another number of microbatches is refused on all."""
    config = {**PP2, **EP2}
    assert max(pool.run(4, expert_refusals.unlike_replicas, [[8, 8], [8, 4], [4, 8], [8, 8]], config, {})) < 1e-5
    for kind, text in pool.run(4, expert_refusals.unlike_replicas, [[8, 8], [8, 6]], config, {}):
        assert kind == "ModelError" and "give between 3 and 4 microbatches" in text, text


def test_a_load_balance_loss_that_the_step_forgets(pool: RankPool) -> None:
    options = {"load_balance_coefficient": 0.1}
    for kind, text in pool.run(2, expert_refusals.unlike_replicas, [[8]], PP2, options):
        assert kind == "ModelError" and "did not add load_balance_loss(model)" in text, text


def test_in_the_trainer(pool: RankPool, tmp_path: Path) -> None:
    """Run, checkpoint and validation of the loaded checkpoint equal those of one process."""
    model = {"build": experts.MoEGPT, "listed": True}
    plain = pool.run(1, lit.fit_plain, "lightning.pytorch", str(tmp_path / "plain"), model, deadline_s=120)[0]
    results = pool.run(2, lit.fit, "lightning.pytorch", str(tmp_path / "ep"), EP2, model, deadline_s=120)
    check_same_run(results, plain)
    check_same_checkpoint(lit.saved(results[0]["best"]), lit.saved(plain["best"]))


def test_on_npus(npu_pool: NpuPool) -> None:
    """Over HCCL; one of the ranks gets no tokens."""
    results = npu_pool.run(2, experts.compare, "plain", EP2, {"idle": True}, (1, 1), "npu", deadline_s=200)
    assert max(results[0].values()) < 1e-5, results[0]
