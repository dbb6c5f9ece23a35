"""ZeRO-1 and its options: exact with any optimizer and shape, less memory, less sent; wrong use is said."""

from __future__ import annotations

from typing import Any

import pytest
import zeros
from rank_pool import RankError, RankPool

ZERO1 = {"zero_stage": 1}
PARTITION = {**ZERO1, "partition_gradients": True}


@pytest.mark.parametrize("config", [ZERO1, PARTITION, {**PARTITION, "contiguous_gradients": True}], ids=str)
def test_uneven_shapes_unused_parameters_and_any_optimizer(pool: RankPool, config: dict[str, Any]) -> None:
    """Dimensions 5, 3, 1 and 0 on 2 and 3 ranks, optimizers that look at the whole parameter, a layer that joins later."""
    for world, kind, freeze in ((2, "adamw", False), (3, "norm", False), (3, "adamw", True)):
        for worst in pool.run(world, zeros.uneven, config, kind, freeze):
            assert max(worst.values()) < 2e-6, (world, kind, worst)


def test_a_layer_that_joins_later_is_averaged_without_sharding_too(pool: RankPool) -> None:
    for worst in pool.run(2, zeros.uneven, {}, "adamw", True):
        assert max(worst.values()) < 2e-6, worst


def test_what_a_rank_holds_and_sends(pool: RankPool) -> None:
    """On 4 ranks: a quarter of Adam's state; partitioned gradients leave by reduce-scatter and are not kept whole."""
    whole, sharded, parted = (pool.run(4, zeros.held, config) for config in ({}, ZERO1, PARTITION))
    model = whole[0]["model"]
    assert all(r["state"] == 2 * model for r in whole)
    for results in (sharded, parted):
        assert sum(r["state"] for r in results) == 2 * model
        assert max(r["state"] for r in results) < 1.1 * 2 * model / 4
    padding = 200  # flags, and dimensions that 4 does not divide
    assert all(r["gradients"] == model for r in sharded) and all(r["gradients"] == 0 for r in parted)
    for r in sharded:
        assert model <= r["sent"]["all_reduce"] < model + padding and "reduce_scatter_tensor" not in r["sent"]
    for r in parted:
        assert model <= r["sent"]["reduce_scatter_tensor"] < model + 4 * padding
        assert model / 4 <= r["sent"]["all_gather_into_tensor"] < model / 4 + padding
        assert "all_reduce" not in r["sent"]


def test_gradients_live_in_buckets(pool: RankPool) -> None:
    for seen in pool.run(2, zeros.in_buckets):
        assert seen and all(seen.values()), seen


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (zeros.unset, "zero_stage=1 without an optimizer that was set up.*model.setup_optimizer"),
        (zeros.late_setup, "AdamW has state for parameters that zero_stage=1 shards"),
        (zeros.moved_memory, "was given other memory after zero_stage=1 sharded it"),
    ],
)
def test_wrong_use_is_said(pool: RankPool, function: Any, match: str) -> None:
    with pytest.raises(RankError, match=f"(?s){match}"):
        pool.run(2, function)


@pytest.mark.parametrize(
    ("world", "config"),
    [(2, {}), (2, {"contiguous_gradients": True}), (2, ZERO1), (4, {"tensor_parallel_size": 2})],
    ids=["replicate", "contiguous", "zero1", "tp2"],
)
def test_overlap_is_bit_equal_and_nothing_travels_while_gradients_accumulate(
    pool: RankPool, world: int, config: dict[str, Any]
) -> None:
    for result in pool.run(world, zeros.overlapped, config):
        assert result["same"]
        plain, overlapped = result["plain"], result["overlapped"]
        assert plain["backward"] == plain["accumulating"] == overlapped["accumulating"] == 0
        assert overlapped["backward"] > overlapped["after"]
        assert overlapped["backward"] + overlapped["after"] == plain["after"]


def test_a_gradient_that_comes_twice_is_refused_under_overlap(pool: RankPool) -> None:
    assert max(pool.run(2, zeros.twice, False)) < 1e-6
    with pytest.raises(RankError, match="got a gradient twice in one backward"):
        pool.run(2, zeros.twice, True)
