"""What must hold under every schedule: automatic microbatches, uneven last batches, evaluation inside an accumulation."""

from __future__ import annotations

import every_schedule
import pytest
from rank_pool import RankPool

from ascend_core.schedule_rules import SCHEDULES


@pytest.fixture(scope="module")
def gaps(pool: RankPool) -> list[dict[str, dict[str, float]]]:
    """Batches of 16, 6, 7 and 1 samples with num_microbatches="auto" on two ranks."""
    return pool.run(2, every_schedule.accumulate, SCHEDULES, (16, 6, 7, 1), deadline_s=120)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulation_over_uneven_batches_with_evaluation(gaps: list[dict[str, dict[str, float]]], schedule: str) -> None:
    """fp32, sums in another order: 1e-5 on losses near 4, gradients and logits of at most about 1."""
    for rank in gaps:
        assert max(rank[schedule].values()) < 1e-5, rank[schedule]
