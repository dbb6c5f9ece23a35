"""Evaluation, outputs, logging and other models under the hybrid strategy, against one process."""

from __future__ import annotations

from typing import Any

import evaluations
import pytest
import trainers
from rank_pool import RankError, RankPool
from test_parity import PP2, TP2


@pytest.fixture(scope="module")
def plain(pool: RankPool) -> dict[str, Any]:
    return pool.run(1, evaluations.evaluate, None)[0]


@pytest.mark.parametrize(
    "config", [PP2, {**PP2, **TP2}, {**PP2, "schedule": "Interleaved1F1B"}], ids=["pp2", "pp2-tp2", "interleaved"]
)
def test_fit_test_predict(pool: RankPool, plain: dict[str, Any], config: dict[str, Any]) -> None:
    """Metric objects in test_step, several model calls in predict_step, reduce_fx, and extra outputs of training_step."""
    world = 4 if "tensor_parallel_size" in config else 2
    for result in pool.run(world, evaluations.evaluate, config):
        assert result["metrics"] == pytest.approx(plain["metrics"], abs=1e-5)
        assert result["test"] == pytest.approx(plain["test"])
        assert result["predicted"] == plain["predicted"]
        for ours, theirs in zip(result["extra"], plain["extra"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_low_precision_runs_alike(pool: RankPool, precision: str) -> None:
    """bf16 has 8 bits of mantissa: outputs near 30 agree to about 0.3; predictions are not compared."""
    config = {**PP2, **TP2}
    ours = pool.run(4, evaluations.evaluate, config, precision)
    plain = pool.run(1, evaluations.evaluate, None, precision)[0]
    for result in ours:
        assert result["metrics"] == ours[0]["metrics"]
        assert result["metrics"]["largest"] == pytest.approx(plain["metrics"]["largest"], abs=0.3)


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "seq-first"])
@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_tensor_parallel_transformer_layers(pool: RankPool, batch_first: bool, decoder: bool) -> None:
    assert max(pool.run(2, evaluations.transformer_layers, TP2, batch_first, decoder)) < 1e-5


@pytest.mark.parametrize("config", [PP2, {**PP2, **TP2}], ids=["pp2", "pp2-tp2"])
def test_pipelined_transformer_encoder(pool: RankPool, config: dict[str, Any]) -> None:
    world = 4 if "tensor_parallel_size" in config else 2
    assert max(pool.run(world, evaluations.transformer_layers, config, True, False)) < 1e-5


@pytest.mark.parametrize(
    ("heads", "full_width", "local_heads"),
    [(4, False, 1), (6, False, 6), (4, True, 4)],
    ids=["by-heads", "6-heads-over-4", "needs-full-width"],
)
def test_attention_is_split_only_where_that_is_exact(pool: RankPool, heads: int, full_width: bool, local_heads: int) -> None:
    """48 columns over 4 ranks are 12 each in every case; where heads cannot be dealt, activations are gathered."""
    for result in pool.run(4, evaluations.odd_attention, heads, full_width):
        assert result["gap"] < 1e-6
        assert result["shard"] == (12, 48)
        assert result["heads"] == local_heads


def test_heads_only_refuses_the_gather(pool: RankPool) -> None:
    with pytest.raises(RankError, match="cannot be split by heads over 4 ranks"):
        pool.run(4, evaluations.odd_attention, 6, False, "heads")


def test_norms_of_every_kind(pool: RankPool) -> None:
    for gaps in pool.run(4, evaluations.norms):
        assert gaps.pop("value") <= 0.01
        assert max(gaps.values()) < 1e-5


def test_a_users_own_plan(pool: RankPool) -> None:
    assert max(pool.run(4, evaluations.user_plan)) < 1e-5


@pytest.mark.parametrize("config", [{}, PP2], ids=["dp", "pp"])
def test_buffers(pool: RankPool, config: dict[str, Any]) -> None:
    """Rank 0's buffers everywhere at the start; one replica's statistics when shared; dry runs leave no trace in them."""
    world = 4 if config else 2
    results = pool.run(world, evaluations.buffers, config)
    for result in results:
        assert result["mask"] == [True, False]
        assert result["positions"] == [0.0, 0.0, 0.0]
        assert result["counts"] == ({8} if config else {2})
    first, second = (results[0], results[1])
    for name, value in first["last"].items():
        assert (value == second["last"][name]).all(), name


def test_sharding_a_model_without_blocks(pool: RankPool) -> None:
    assert max(pool.run(2, evaluations.sharded_without_blocks, False)) < 1e-6
    with pytest.raises(RankError, match="Bare has nothing that can be sharded"):
        pool.run(2, evaluations.sharded_without_blocks, True)


def test_validation_never_uses_inference_mode(pool: RankPool) -> None:
    """Lightning would on any backend but gloo, and FSDP2 parameters could then not be trained any more."""
    assert pool.run(2, trainers.inference_mode, {"zero_stage": 2}) == [{False}] * 2


def test_reductions(pool: RankPool) -> None:
    """Over the two replicas only; the mean of whole numbers is not truncated."""
    assert pool.run(4, trainers.reductions) == [[4.5, 9, 6, False, True, [3.0, 6.0], "text"]] * 4


def test_microbatch_weights_of_a_lightning_module(pool: RankPool) -> None:
    """With ``microbatch_weight`` a mean over tokens is that of the whole batch."""
    ours = pool.run(2, trainers.token_mean, PP2)[0]
    plain = pool.run(1, trainers.token_mean, None)[0]
    assert max(float((ours[n] - p).abs().max()) for n, p in plain.items()) < 1e-5
