"""Tensor and sequence parallel: parity, checkpoints of fused weights, refused holes, norms, random numbers."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import spread_logits
import tensor_split
from rank_pool import RankPool

SP = {"tensor_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-sp": (2, SP),
    "tp4-sp": (4, {**SP, "tensor_parallel_size": 4}),
    "pp2-tp2-sp": (4, {**SP, **PP2}),
    "pp2-tp2-sp-zbv": (4, {**SP, **PP2, "schedule": "ZBVZeroBubble"}),
    "tp2-dp2-sp-zero3": (4, {**SP, "zero_stage": 3}),
}
ROWS = {"*.last": "rowwise"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_sequence_parallel_trains_like_one_process(pool: RankPool, name: str) -> None:
    """Tolerance 1e-5 (fp32): only the order of sums differs."""
    world, config = LAYOUTS[name]
    results = pool.run(world, parity.compare, config, deadline_s=120)
    worst = {key: max(r[key] for r in results if key in r) for key in results[0]}
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3"])
def test_fused_weights_in_checkpoints(pool: RankPool, family: str) -> None:
    """Weights and Adam states have the original layout; frozen weights stay; a resumed run goes on exactly."""
    for gaps in pool.run(2, tensor_split.fused_checkpoint, family, deadline_s=90):
        assert gaps["frozen"] == 0.0
        assert max(gaps.values()) < 1e-5, gaps


REFUSED: dict[str, tuple[dict[str, str], bool, str]] = {
    "no-row": ({"*.first": "colwise"}, True, "ModelError: Block 'layers.0' fails once it is split"),
    "head": ({"*.first": "colwise", **ROWS, "head": "colwise"}, True, "ConfigError: tensor_parallel_plan: the output of 'head' stays split"),
    "needs-all-columns": ({"*.first": "colwise", **ROWS}, False, "ModelError: Block 'layers.0' fails once it is split"),
    "wrong-parts": ({"*.first": "fused_colwise:2,4,2", **ROWS}, True, "ModelError: Block 'layers.0' gives another output once it is split; the first module that differs is 'last'"),
    "mixed-parts": ({"*.first": "packed_colwise", **ROWS}, True, "ModelError: Block 'layers.0' gives another output once it is split"),
    "right": ({"*.first": "colwise", **ROWS}, True, "exact"),
    "gathered": ({"*.first": "colwise_gather", "*.last": "rowwise_split"}, False, "exact"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_is_exact_or_refused(pool: RankPool, name: str) -> None:
    plan, per_piece, expected = REFUSED[name]
    for result in pool.run(2, tensor_split.refusal, plan, per_piece):
        assert result.startswith(expected), result


def test_sequence_parallel_of_what_cannot_be_split(pool: RankPool) -> None:
    gathered = {"*.first": "colwise_gather", "*.last": "rowwise_split"}
    for result in pool.run(2, tensor_split.refusal, gathered, False, sequence_parallel=True):
        assert result.startswith(
            "ModelError: Block 'layers.0' gives another gradient once it is split, for parameter 'norm.weight'"
        )
    head = {"head": "colwise_gather"}
    for result in pool.run(2, tensor_split.refusal, head, sequence_parallel=True):
        assert result.startswith("ModelError: sequence_parallel=True: block 'layers.0' (Normed) has no split region")


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"}], ids=str)
def test_loss_of_spread_logits(pool: RankPool, options: dict[str, Any]) -> None:
    """Tied embedding and head over the vocabulary; logits stay spread in training and are whole in evaluation."""
    for rank, result in enumerate(pool.run(2, spread_logits.vocabulary_loss, options, {})):
        assert set(result["gaps"]) == {"loss", "tok.weight", "norm.weight", "pos", "logits"}
        assert max(result["gaps"].values()) < 1e-5, result
        assert result["shapes"] == [(4, 12, 19 - rank)]


def test_loss_of_large_spread_logits(pool: RankPool) -> None:
    assert max(pool.run(2, spread_logits.large_logits)) < 1e-6


def test_loss_of_spread_logits_in_a_pipeline(pool: RankPool) -> None:
    config = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    for rank, result in enumerate(pool.run(4, spread_logits.vocabulary_loss, {}, config)):
        assert max(result["gaps"].values()) < 1e-5, (rank, result)


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputation_and_zero3_of_split_blocks(pool: RankPool, sequence: bool) -> None:
    """Norms inside attention get parts of their gradient from each rank, and FSDP2 shards them. Tolerance: fp32 sums."""
    for gaps in pool.run(4, tensor_split.recomputed, sequence, deadline_s=120):
        assert max(gaps.values()) < 1e-5, gaps


def test_autocast(pool: RankPool) -> None:
    """bf16 keeps 8 bits: the order of sums moves the loss by less than 1 %."""
    assert max(pool.run(2, tensor_split.in_half_precision, deadline_s=90)) < 1e-2


def test_d06_norm_of_split_and_whole_layers(pool: RankPool) -> None:
    """D06: one norm on both ranks, that of one process, and the clipped gradients too."""
    results = pool.run(2, tensor_split.clipped_norm)
    assert results[0][0] == results[1][0]
    for norm, expected, gap in results:
        assert abs(norm - expected) < 1e-5 * expected
        assert gap < 1e-6


def test_d26_norms_under_sequence_parallel(pool: RankPool) -> None:
    """D26: a norm's gradient is the sum over the sequence, and the weights stay bit-equal on all ranks."""
    for worst, same in pool.run(2, tensor_split.sequence_norms):
        assert worst < 1e-5
        assert same


@pytest.mark.parametrize("sequence", [False, True])
def test_finished_gradients_can_be_added_to(pool: RankPool, sequence: bool) -> None:
    assert max(pool.run(2, tensor_split.accumulated, sequence)) < 1e-5


@pytest.mark.parametrize("sequence", [False, True])
def test_d63_random_numbers_by_region(pool: RankPool, sequence: bool) -> None:
    """D63: shards are the one-process init; masks of copies agree within a tensor-parallel group, all others differ."""
    results = pool.run(4, tensor_split.dropout_masks, sequence)  # ranks: dp x tp
    assert all(r["exact"] for r in results)
    for key in ("inner", "outer"):
        masks = [r[key] for r in results]
        within = masks[0] == masks[1], masks[2] == masks[3]
        copies = key == "outer" and not sequence
        assert within == (copies, copies), key
        assert masks[0] != masks[2], key
        assert masks[1] != masks[3], key


def test_d64_plain_data_parallel_with_tensor_parallel(pool: RankPool) -> None:
    """D64: dp 2 x tp 2 without ZeRO trains like one process, and replicas stay bit-equal."""
    for gap, same in pool.run(4, tensor_split.replicated):
        assert gap < 1e-5
        assert same
