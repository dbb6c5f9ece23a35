"""D82: a stage whose input gets no gradient, in some microbatches or ever, under every schedule."""

from __future__ import annotations

import pytest
import unconnected
from rank_pool import RankPool

from ascend_core.schedule_rules import SCHEDULES

CASES = {
    "sometimes": ("none", "none", "odd", "none"),
    "first of its stage": ("none", "all", "none", "none"),
    "last layer": ("none", "none", "none", "odd"),
    "integers": None,
}


@pytest.mark.parametrize("case", CASES)
def test_d82_an_input_without_a_gradient(pool: RankPool, case: str) -> None:
    """Zeros travel where there is no gradient, and the stage's own parameters still get theirs. fp32, one step: 1e-6."""
    for gaps in pool.run(2, unconnected.gradients, SCHEDULES, CASES[case], deadline_s=60):
        assert max(gaps.values()) < 1e-6, gaps
