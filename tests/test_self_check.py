"""The self-check: silent for what is right, and naming the first module that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checked
import lit
import pytest
from npu_pool import NpuPool
from rank_pool import RankError, RankPool
from test_parity import PP2, TP2

RIGHT: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, PP2),
    "pp2-zbv-recompute": (2, {**PP2, "schedule": "ZBVZeroBubble", "activation_checkpoint_blocks": 2}),
    "tp2": (2, TP2),
    "dp2": (2, {}),
    "dp2-zero1": (2, {"zero_stage": 1, "partition_gradients": True, "contiguous_gradients": True}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "pp2-tp2": (4, {**PP2, **TP2}),
    "pp2-dp2-zero2": (4, {**PP2, "zero_stage": 2}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_it_leaves_no_trace(pool: RankPool, name: str) -> None:
    world, config = RIGHT[name]
    assert all(pool.run(world, checked.leaves_no_trace, config))


def test_it_leaves_no_trace_on_npus(npu_pool: NpuPool) -> None:
    assert all(npu_pool.run(4, checked.leaves_no_trace, {**PP2, **TP2}, "npu", deadline_s=90))


def test_a_plan_with_a_hole_is_named_by_default(pool: RankPool) -> None:
    """A fused projection split by plain rows gives each rank the wrong heads."""
    with pytest.raises(RankError, match=r"Self-check: the output of block 'blocks.0' differs"):
        pool.run(2, checked.with_plan, {"tensor_parallel_plan": checked.HOLE})


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("pp2", "blocks.2.norm1.weight"),
        ("pp2", "head.weight"),
        ("pp2", "tok.weight"),
        ("dp2", "pos"),
        ("tp2", "norm.bias"),
    ],
)
def test_a_wrong_gradient_is_named(pool: RankPool, layout: str, name: str) -> None:
    world, config = RIGHT[layout]
    with pytest.raises(RankError, match=f"Self-check: the gradient of '{name}' differs") as raised:
        pool.run(world, checked.wrong_gradient, config, name)
    assert len(raised.value.errors) == world  # nobody waits for a timeout


def test_a_wrong_output_is_named(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"Self-check: the output of block 'blocks.3' differs"):
        pool.run(2, checked.wrong_output, PP2, "blocks.3")
    with pytest.raises(RankError, match="the model's output, though those of its blocks agree, differs"):
        pool.run(2, checked.wrong_output, {"zero_stage": 3}, "head")


def test_in_the_trainer(pool: RankPool, plain: dict[str, Any], tmp_path: Path) -> None:
    """The run is the one without the check; logs and counters too."""
    from test_trainer_parity import check_same_run

    config = {**PP2, "self_check": "first_batch"}
    check_same_run(pool.run(2, lit.fit, "lightning.pytorch", str(tmp_path), config, {}, deadline_s=120), plain)
