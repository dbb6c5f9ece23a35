"""Every layout trains exactly like one process: loss, norm, gradients and parameters over 10 steps."""

from __future__ import annotations

from typing import Any

import parity
import pytest
from rank_pool import RankPool

PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}
TP2 = {"tensor_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, PP2),
    "pp2-gpipe": (2, {**PP2, "schedule": "GPipe"}),
    "pp2-interleaved": (2, {**PP2, "schedule": "Interleaved1F1B"}),
    "pp2-looped": (2, {**PP2, "schedule": "LoopedBFS"}),
    "pp2-zero-bubble": (2, {**PP2, "schedule": "InterleavedZeroBubble"}),
    "pp2-zbv": (2, {**PP2, "schedule": "ZBVZeroBubble"}),
    "pp2-dualpipev": (2, {**PP2, "schedule": "DualPipeV"}),
    "pp4": (4, {"pipeline_parallel_size": 4, "num_microbatches": 4}),
    "tp2": (2, TP2),
    "tp4": (4, {"tensor_parallel_size": 4}),
    "dp2-replicate": (2, {}),
    "dp2-zero1": (2, {"zero_stage": 1}),
    "dp2-zero2": (2, {"zero_stage": 2}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "dp4-hsdp": (4, {"zero_stage": 3, "data_parallel_shard_size": 2}),
    "pp2-tp2": (4, {**PP2, **TP2}),
    "pp2-dp2": (4, PP2),
    "pp2-dp2-zero1": (4, {**PP2, "zero_stage": 1, "partition_gradients": True, "contiguous_gradients": True}),
    "pp2-dp2-zero2": (4, {**PP2, "zero_stage": 2}),
    "pp2-interleaved-dp2-zero2": (4, {**PP2, "schedule": "Interleaved1F1B", "zero_stage": 2}),
    "pp2-zbv-dp2-zero2": (4, {**PP2, "schedule": "ZBVZeroBubble", "zero_stage": 2}),
    "pp2-tp2-zero-bubble": (4, {**PP2, **TP2, "schedule": "InterleavedZeroBubble"}),
    "tp2-dp2": (4, TP2),
    "tp2-dp2-zero1": (4, {**TP2, "zero_stage": 1, "partition_gradients": True, "contiguous_gradients": True}),
    "tp2-dp2-zero3": (4, {**TP2, "zero_stage": 3}),
    "pp2-dp4-hsdp": (8, {**PP2, "zero_stage": 2, "data_parallel_shard_size": 2}),
    "pp2-tp2-dp2": (8, {**PP2, **TP2}),
    "pp2-tp2-dp2-interleaved": (8, {**PP2, **TP2, "schedule": "Interleaved1F1B"}),
    "pp2-tp2-dp2-dualpipev": (8, {**PP2, **TP2, "schedule": "DualPipeV"}),
    "pp2-tp2-dp2-zero2": (8, {**PP2, **TP2, "zero_stage": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_like_one_process(pool: RankPool, name: str) -> None:
    """Tolerance 1e-5 (fp32): the layouts only change the order of sums."""
    world, config = LAYOUTS[name]
    results = pool.run(world, parity.compare, config, deadline_s=120)
    for key in results[0]:
        worst = max(r[key] for r in results if key in r)
        assert worst < 1e-5, f"{name}: {key} differs by {worst:.2e}"


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_split_backward_of_unusual_stages(pool: RankPool, schedule: str) -> None:
    """Frozen first stages, whose successors receive no gradient path; blocks whose outputs are views; too few microbatches."""
    config = {"pipeline_parallel_size": 2, "schedule": schedule}
    for options in ({"tied": False, "frozen_blocks": 1}, {"tied": False, "frozen_blocks": 3}, {"views": True}):
        results = pool.run(2, parity.compare, {**config, "num_microbatches": 4}, options, deadline_s=120)
        worst = {key: max(r[key] for r in results if key in r) for key in results[0]}
        assert max(worst.values()) < 1e-5, (options, worst)
    assert max(pool.run(2, parity.odd_batches, config, deadline_s=120)) < 1e-5
